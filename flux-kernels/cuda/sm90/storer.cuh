// The storer: a warp that carries finished tiles from the staging buffers to the caller's y or to
// their owners, and raises signals.

#pragma once
#include "sm90/config.cuh"
#include "common/epilogue.cuh"
#include "common/raise.cuh"
#include "common/reduce_rows.cuh"
#include "sm90/partials.cuh"
#include "common/scatter.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "common/weights.cuh"

namespace flux {

template <class C>
struct Storer {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    u32 phase = 0;
    RingState<C::kInMainloopPieces> in_mainloop;

    __device__ __forceinline__ void run(const Walk& walk) {
        u32 i = walk.first, sent = 0;
        RowAwaits ahead{};
        u32 known = walk.count;  // the item of `ahead`
        for (; i < walk.count; i += walk.stride, phase ^= 1) {
            const WorkItem item = load_item(p, i);
            if constexpr (C::kScatters) {
                if (item.sink == static_cast<u32>(Sink::kReduceRows)) break;
                if (item.sink == static_cast<u32>(Sink::kScatter)) {
                    if (lane == 0) open_staging();
                    // The other lanes wait for the lane that did the items before, so the barriers
                    // are in this item's phase.
                    __syncwarp();
                    // Loaded early, in case a reduction is next.
                    known = i + walk.stride;
                    if (known < walk.count) ahead = RowAwaits::of(p, known);
                    if (p.in_flight_limit != 0) {
#pragma unroll 1
                        for (u32 part = 0; part < C::kScatterParts; ++part) {
                            if (part != 0) open_next_part();
                            scatter(item, part);
                        }
                    } else if (consumers_have_scattered()) {
                        raise_scattered(p, epoch, item);
                    }
                    __syncwarp();
                    stamp_sent(i);
                    continue;
                }
            }
            if (p.residual != 0 && finishes<C>(item)) prefetch_residual<typename C::Output>(p, item, lane);
            const bool sends = C::kSendsPartials && item.sink == static_cast<u32>(Sink::kSend);
            if (lane == 0) {
                const bool last = i + walk.stride >= walk.count;
                if constexpr (C::kSendsPartials) load_in_mainloop(item);
                open_staging();
                if (is_shared<C>(item)) {
                    share(item);
                } else if (!sends) {
                    store_or_announce_partial(item);
                } else if constexpr (C::kPartialsF32) {
                    send_from_global_staging(item, last);
                } else if (C::kStagingBuffers > 1 || last) {
                    send_in_order(item, last);
                } else {
                    send_paced(item, sent);
                }
            }
            if (sends) ++sent;
            stamp_sent(i);
        }
        if constexpr (C::kScatters) {
            if (i < walk.count && p.in_flight_limit == 0) await_rows_to_reduce<C>(p, smem, epoch, walk, i, known == i ? ahead : RowAwaits::of(p, i));
        }
        // The end of the kernel completes the stores to y; each item has waited until its buffers
        // were read.
    }

private:
    __device__ __forceinline__ void store(const WorkItem& item, u32 consumer) const {
        const bool is_short = item.out_outer >= p.full_shards;
        const WeightOf<C> weight(p, item.col);
        const TensorMap* map = is_short ? weight.short_shards() : weight.y();
        store_boxes(map, item, item.col - weight.operands().start, consumer, is_short ? item.out_outer - p.full_shards : item.out_outer);
    }

    // `item_col`: the item's first column in the map.
    __device__ __forceinline__ void store_boxes(const TensorMap* map, const WorkItem& item, u32 item_col, u32 consumer, u32 outer) const {
        const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows;
        const u32 first_col = C::kSplitColumns ? consumer * C::kOutCols : 0;
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
            const u32 row = first_row + (C::kSwapAB ? 0 : block * 64);
            if (row >= item.rows) break;
#pragma unroll
            for (u32 box = 0; box < C::kBoxes; ++box) {
                const u32 col = first_col + (C::kSwapAB ? block * C::kBlockCols : box * C::kBoxCols);
                if (col * C::kColsPerOut >= item.cols) break;
                ptx::tensor_store_3d(map, smem.out(consumer) + (block * C::kBoxes + box) * C::kBoxBytes, item_col / C::kColsPerOut + col,
                                     item.row + row, outer);
            }
        }
    }

    // Stores a consumer's part of a finished tile among the results of every peer.
    __device__ __forceinline__ void store_at_peers(const WorkItem& item, u32 consumer) const {
#pragma unroll 1
        for (u32 step = 1; step < p.world; ++step) store_boxes(&p.op_maps[(p.rank + step) % p.world], item, item.col, consumer, epoch & 1);
    }

    // Sends a consumer's part of a partial tile. The `last` of the CTA goes without gaps: no loads
    // of this CTA follow, and its owner may be waiting.
    __device__ __forceinline__ void send(const WorkItem& item, u32 consumer, bool last) const {
        const Slot<C> slots{p};
        const u64 slot = half_of(p, p.data[item.dest], epoch) + static_cast<u64>(item.slot) * slots.bytes();
        // CTAs finish their tiles at about the same time. Gaps between pieces keep bursts off the
        // link, which would slow the GEMM's own loads.
        slots.store(slot, smem.out(consumer), consumer, last ? 0 : p.gap_ns);
    }

    // Loads the part back into the shared buffer, which the second part has left. By one lane.
    __device__ __forceinline__ void fetch_global_staging(u32 number) const {
        ptx::mbarrier_arrive_expect_tx(smem.staged_part_back(), C::kOutBytesPerConsumer);
        ptx::bulk_load(smem.out(0), global_staging<C>(p), C::kOutBytesPerConsumer, smem.staged_part_back());
        ptx::mbarrier_wait(smem.staged_part_back(), number & 1);
    }

    // Waits for the consumers; whether they have scattered all of their rows. By the warp.
    __device__ __forceinline__ bool consumers_have_scattered() const {
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
        return ptx::load_acquire_cta_shared(smem.dropped_rows()) == 0;
    }

    // Lets the consumers write the next part of rows that leave in parts. By the warp.
    __device__ __forceinline__ void open_next_part() {
        phase ^= 1;
        if (lane == 0) open_staging();
        __syncwarp();
    }

    // Scatters a part of the consumers' rows, and behind the last raises their signals, within the
    // in-flight limit, while the consumers multiply the next tile. By the warp.
    //
    // Stores to host memory are slow to drain, and a multiprocessor's loads queue behind them. The
    // limit lets the other CTAs load and multiply meanwhile.
    __device__ __forceinline__ void scatter(const WorkItem& item, u32 part) const {
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
        if (lane == 0) {
            const u32 mine = ptx::atomic_inc_wrap_relaxed(&p.control->stores_begun, 0xFFFFFFFFu);
            // A CTA within the limit waits for nobody, so every CTA's time comes. Later ones may
            // end first: the difference has a sign.
            while (static_cast<i32>(mine - ptx::load_relaxed_gpu(&p.control->stores_ended)) >= static_cast<i32>(p.in_flight_limit)) ptx::sleep_ns(100);
        }
        __syncwarp();
        if (!__any_sync(0xFFFFFFFFu, poisoned(p))) {
#pragma unroll 1
            for (u32 c = 0; c < C::kConsumers; ++c) {
                const Scatter<C> rows(p, smem, epoch, item, c, part);
#pragma unroll 1
                for (u32 v = lane; v < Scatter<C>::kVectors; v += 32) rows.store(v);
            }
            // Orders the lanes' rows before the fence of the lane that raises a signal.
            __syncwarp();
            if (part + 1 == C::kScatterParts) {
                raise_scattered(p, epoch, item);
            } else {
                ptx::fence_acq_rel_sys();
            }
        }
        __syncwarp();
        // The fence of the lane, or of the raising lane, has completed the rows.
        if (lane == 0) ptx::atomic_inc_wrap_relaxed(&p.control->stores_ended, 0xFFFFFFFFu);
    }

    // Loads the in-mainloop partial tiles into the staging buffers, which the item before has left.
    // They take no stage of the ring, and waiting for them delays no loads.
    __device__ __forceinline__ void load_in_mainloop(const WorkItem& item) {
        const u32 count = in_mainloop_partials(p, item);
        if (count == 0) return;
        const u64 half = half_of(p, p.data[p.rank], epoch);
        for (u32 source = 0; source < count; ++source) {
            if (item.await_count != 0) wait_for(p, epoch, await_target(p, epoch, item.await_first + source));
            // Orders the acquired signal before the bulk loads of its partial tile.
            ptx::fence_proxy_async_global();
            const Slot<C> slots{p};
            const u64 slot = slots.partial(half, item, source);
            for (u32 piece = 0; piece < C::kPieces; ++piece) {
                ptx::mbarrier_wait(smem.in_mainloop_empty(in_mainloop.stage), in_mainloop.phase ^ 1);
                ptx::mbarrier_arrive_expect_tx(smem.in_mainloop_full(in_mainloop.stage), slots.piece_bytes(piece));
                slots.load_piece(slot, piece, smem.in_mainloop_piece(in_mainloop.stage, 0), smem.in_mainloop_full(in_mainloop.stage));
                in_mainloop.advance();
            }
        }
        // Both consumers have added the last pieces before either writes its part there.
        RingState<C::kInMainloopPieces> last = in_mainloop;
        for (u32 place = 0; place < C::kInMainloopPieces; ++place) {
            ptx::mbarrier_wait(smem.in_mainloop_empty(last.stage), last.phase ^ 1);
            last.advance();
        }
    }

    __device__ __forceinline__ void stamp_sent(u32 item) const {
        if (lane == 0) stamp(p, item, &ItemStamps::sent);
    }

    // The rest is done by one lane.

    // Lets the consumers write their parts of an item; of a shared buffer, the first consumer.
    __device__ __forceinline__ void open_staging() const {
#pragma unroll
        for (u32 c = 0; c < C::kStagingBuffers; ++c) ptx::mbarrier_arrive(smem.out_empty(c));
    }

    // Passes the shared buffer from the first consumer to the second.
    __device__ __forceinline__ void pass_staging() const {
        if constexpr (C::kStagingBuffers == 1) {
            ptx::bulk_wait_read<0>();
            ptx::mbarrier_arrive(smem.out_empty(1));
        }
    }

    __device__ __forceinline__ void store_or_announce_partial(const WorkItem& item) const {
        const bool is_partial = item.sink == static_cast<u32>(Sink::kPartial);
        static_assert(C::kConsumers == 2, "two consumers share a buffer");
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_wait(smem.out_full(c), phase);
            if (!is_partial) store(item, c);
            ptx::bulk_commit();
            if (c == 0) pass_staging();
        }
        if (is_partial) {
            // Orders the consumers' accumulators, acquired with their barriers, before the signal.
            ptx::fence_acq_rel_gpu();
            ptx::store_relaxed_gpu(signal_word(p.pad[p.rank], item.raise, epoch), epoch);
        }
        ptx::bulk_wait_read<0>();
    }

    // Whether an item may be sent: after a failed wait a peer may be gone, or in a new
    // communicator. The poison is loaded before the item is finished, which costs no time, and
    // again where the item has awaited something itself.
    __device__ __forceinline__ bool may_send(const WorkItem& item, bool before) const {
        return before && (item.await_count + item.late_count == 0 || !poisoned(p));
    }

    // Sends the parts one after the other, from buffers that nobody waits for.
    __device__ __forceinline__ void send_in_order(const WorkItem& item, bool last) const {
        bool live = !poisoned(p);
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_wait(smem.out_full(c), phase);
            if (c == 0) live = may_send(item, live);
            if (live) send(item, c, last);
            ptx::bulk_commit();
            if (c == 0) pass_staging();
        }
        ptx::bulk_wait_read<0>();
        announce(item, live);
    }

    // Stores a finished tile in the caller's y and at every peer, whose signals it then raises if
    // its chunk is complete.
    __device__ __forceinline__ void share(const WorkItem& item) const {
        bool live = !poisoned(p);
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_wait(smem.out_full(c), phase);
            if (c == 0) live = may_send(item, live);
            store(item, c);
            if (live) store_at_peers(item, c);
            ptx::bulk_commit();
            if (c == 0) pass_staging();
        }
        ptx::bulk_wait_read<0>();
        if (!live) return;
        // Completes the writes, not only the reads of the buffer: the signals follow them.
        ptx::bulk_wait<0>();
        if (!completes_chunk(p, item)) return;
        // Orders the chunk's completed tiles before the signals.
        ptx::fence_acq_rel_sys();
#pragma unroll 1
        for (u32 step = 1; step < p.world; ++step) ptx::store_relaxed_sys(signal_word(p.pad[(p.rank + step) % p.world], item.raise, epoch), epoch);
    }

    // Copies the first part to global staging memory, so that the second consumer can write and
    // both go on. `number` counts such items.
    __device__ __forceinline__ void send_paced(const WorkItem& item, u32 number) const {
        ptx::mbarrier_wait(smem.out_full(0), phase);
        ptx::bulk_store(global_staging<C>(p), smem.out(0), C::kOutBytesPerConsumer);
        ptx::bulk_commit();
        pass_staging();
        const bool before = !poisoned(p);
        ptx::mbarrier_wait(smem.out_full(1), phase);
        const bool live = may_send(item, before);
        // The copy is complete before it is loaded back; it has had the second part's time.
        ptx::bulk_wait<0>();
        if (live) {
            send(item, 1, false);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
            // Orders the completed bulk stores to global staging before the bulk loads from it.
            ptx::fence_proxy_async_global();
            fetch_global_staging(number);
            send(item, 0, false);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        announce(item, live);
    }

    // Sends a partial tile that the consumers have left in global staging memory, by way of the
    // buffers, while they multiply the next. The `last` of the CTA goes without gaps.
    __device__ __forceinline__ void send_from_global_staging(const WorkItem& item, bool last) const {
        // An even count, so that the barrier is in its first phase at each item.
        constexpr u32 kChunks = C::kSlotBytes / (C::kStagingBuffers * C::kOutBytesPerConsumer);
        static_assert(kChunks % 2 == 0, "phases");
        // Nobody writes the shared buffer.
        if constexpr (C::kStagingBuffers == 1) ptx::mbarrier_arrive(smem.out_empty(1));
        const bool before = !poisoned(p);
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
        const bool live = may_send(item, before);
        if (live) {
            // Orders the consumers' stores, acquired with their barriers, before the bulk loads.
            ptx::fence_proxy_async_global();
            const Slot<C> slots{p};
            const u32 bytes = slots.bytes() / kChunks;
            const u64 slot = half_of(p, p.data[item.dest], epoch) + static_cast<u64>(item.slot) * slots.bytes();
#pragma unroll 1
            for (u32 n = 0; n < kChunks; ++n) {
                ptx::mbarrier_arrive_expect_tx(smem.staged_part_back(), bytes);
                ptx::bulk_load(smem.out(0), global_staging<C>(p) + n * bytes, bytes, smem.staged_part_back());
                ptx::mbarrier_wait(smem.staged_part_back(), n & 1);
                slots.store_paced(slot + n * bytes, smem.out(0), bytes, last ? 0 : p.gap_ns);
                ptx::bulk_commit();
                ptx::bulk_wait_read<0>();
            }
        }
        announce(item, live);
    }

    __device__ __forceinline__ void announce(const WorkItem& item, bool live) const {
        if (!live) return;
        // Completes the write, not only the read of the buffer: the signal follows it.
        ptx::bulk_wait<0>();
        if (item.partials != 0 && !intra_node_peers_stand(p, epoch, item)) return;
        raise(p, epoch, item);
    }
};

}  // namespace flux
