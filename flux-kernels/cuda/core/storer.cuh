// The storer: a warp that sends finished output buffers on their way, to the caller's y or to their
// owners, and raises signals.
#pragma once
#include "core/config.cuh"
#include "core/reduce_rows.cuh"
#include "core/partials.cuh"
#include "core/scatter.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "core/trace.cuh"
#include "core/wait.cuh"

namespace flux {

template <class C>
struct Storer {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    u32 phase = 0;
    RingState<C::kInMainloopPieces> in_mainloop;

    __device__ __forceinline__ void store(const WorkItem& item, u32 consumer) const {
        const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows;
        const u32 first_col = C::kSplitColumns ? consumer * C::kCols : 0;
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
            const u32 row = first_row + (C::kSwapAB ? 0 : block * 64);
            if (row >= item.rows) break;
#pragma unroll
            for (u32 box = 0; box < C::kBoxes; ++box) {
                const u32 col = first_col + (C::kSwapAB ? block * 64 : box * C::kBoxCols);
                if (col >= item.cols) break;
                ptx::tensor_store_3d(&p.y, smem.out(consumer) + (block * C::kBoxes + box) * C::kBoxBytes, item.col + col, item.row + row, item.out_outer);
            }
        }
    }

    // A consumer's part of the slot, from its room. `last` of this CTA: what it sends nobody's
    // loads come after, and its owner may be waiting for it.
    __device__ __forceinline__ void send(const WorkItem& item, u32 consumer, bool last) const {
        const Slot<C> slots{p};
        const u64 slot = p.data[item.dest] + (epoch & 1) * p.half_stride + static_cast<u64>(item.slot) * slots.bytes();
        // CTAs finish their tiles nearly together: in pieces with gaps the link stays free of
        // bursts, which slow the GEMM's own loads.
        slots.store(slot, smem.out(consumer), consumer, last ? 0 : p.gap_ns);
    }

    // Where this CTA lays the first consumer's part of a partial tile aside, in this GPU's memory.
    // Sent at its pace it would hold up the second.
    __device__ __forceinline__ u64 global_staging() const { return p.global_staging + static_cast<u64>(blockIdx.x) * C::kOutBytesPerConsumer; }

    // Brings it back into the room, which the second part has left. By one lane.
    __device__ __forceinline__ void fetch_global_staging(u32 number) const {
        ptx::mbarrier_arrive_expect_tx(smem.staged_part_back(), C::kOutBytesPerConsumer);
        ptx::bulk_load(smem.out(0), global_staging(), C::kOutBytesPerConsumer, smem.staged_part_back());
        ptx::mbarrier_wait(smem.staged_part_back(), number & 1);
    }

    // Announces the item to its owner, once its chunk is complete.
    __device__ __forceinline__ void raise(const WorkItem& item) const {
        if (item.counter != kNone) {
            // Orders this worker's slot, at the peer, before the count that lets another worker
            // announce it.
            ptx::fence_acq_rel_sys();
            if (ptx::atomic_inc_wrap_relaxed(&p.control->counters[item.counter], item.raise_after - 1) != item.raise_after - 1) return;
        }
        // Orders the slots of the chunk before the signal: the bulk stores have completed, and this
        // acquires the count.
        ptx::fence_acq_rel_sys();
        ptx::store_relaxed_sys(signal_word(p.pad[item.dest], item.raise, epoch), epoch);
    }

    // Announces the rows to their owners; where they are of a chunk, once it is complete, to all
    // ranks. By the warp.
    __device__ __forceinline__ void raise_scattered(const WorkItem& item) const {
        // What nobody awaits.
        if (item.raise == kNone) return;
        u32 first = item.row / p.m_shard, last = (item.row + item.rows - 1) / p.m_shard;
        if (item.counter != kNone) {
            u32 counted = 0;
            if (lane == 0) {
                // Orders the consumers' rows, acquired with their barriers, before the count that
                // lets another worker announce them.
                ptx::fence_acq_rel_sys();
                counted = ptx::atomic_inc_wrap_relaxed(&p.control->counters[item.counter], item.raise_after - 1) + 1;
                ptx::fence_acq_rel_sys();
            }
            if (ptx::from_lane(counted, 0) != item.raise_after) return;
            // Orders what the lane that counts has acquired before the other lanes' signals.
            __syncwarp();
            first = 0;
            last = p.world - 1;
        }
        const u32 owner = first + lane;
        if (owner > last) return;
        // Orders the consumers' rows, acquired with their barriers, before the signal.
        ptx::fence_acq_rel_sys();
        ptx::store_relaxed_sys(signal_word(p.pad[owner], item.raise, epoch), epoch);
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        u32 i = walk.first, sent = 0;
        RowAwaits ahead{};
        u32 known = walk.count;  // whose they are
        for (; i < walk.count; i += walk.stride, phase ^= 1) {
            const WorkItem item = load_item(p, i);
            if constexpr (C::kScatters) {
                if (item.sink == static_cast<u32>(Sink::kReduceRows)) break;
                if (item.sink == static_cast<u32>(Sink::kScatter)) {
                    if (lane == 0) open_staging();
                    // The other lanes meet the one that did the items before, so the barriers are
                    // in this item's phase.
                    __syncwarp();
                    // Asked for while there is time, should it be a fold that comes next.
                    known = i + walk.stride;
                    if (known < walk.count) ahead = RowAwaits::of(p, known);
                    if (p.in_flight_limit != 0) {
                        scatter(item);
                    } else if (consumers_have_scattered()) {
                        raise_scattered(item);
                    }
                    __syncwarp();
                    stamp_sent(i);
                    continue;
                }
            }
            const bool sends = C::kSendsPartials && item.sink == static_cast<u32>(Sink::kSend);
            if (lane == 0) {
                const bool last = i + walk.stride >= walk.count;
                if constexpr (C::kSendsPartials) load_in_mainloop(item);
                open_staging();
                if (!sends) {
                    store_or_announce_partial(item);
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
        // What was stored to y is the caller's when the kernel has ended; that its rooms were read
        // each item has waited for.
    }

    // Waits until the consumers have scattered their rows; whether they have. By the warp.
    __device__ __forceinline__ bool consumers_have_scattered() const {
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
        return ptx::load_acquire_cta_shared(smem.dropped_rows()) == 0;
    }

    // Scatters their rows in their place, while they multiply the next tile, and announces them,
    // when it is this CTA's turn. By the warp.
    //
    // What is slow to be taken, by memory of the host say, holds up all that a multiprocessor asks
    // memory for behind it, loads of operands among it. So CTAs take turns: while some wait for
    // what they have stored, the others load and multiply.
    __device__ __forceinline__ void scatter(const WorkItem& item) const {
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
        if (lane == 0) {
            const u32 mine = ptx::atomic_inc_wrap_relaxed(&p.control->stores_begun, 0xFFFFFFFFu);
            // Whoever has a turn waits for nobody, so each comes. Later ones may be over before
            // this is looked at, so the difference has a sign.
            while (static_cast<i32>(mine - ptx::load_relaxed_gpu(&p.control->stores_ended)) >= static_cast<i32>(p.in_flight_limit)) ptx::sleep_ns(100);
        }
        __syncwarp();
        if (!__any_sync(0xFFFFFFFFu, poisoned(p))) {
#pragma unroll 1
            for (u32 c = 0; c < C::kConsumers; ++c) {
                const Scatter<C> rows(p, smem, epoch, item, c);
#pragma unroll 1
                for (u32 v = lane; v < Scatter<C>::kVectors; v += 32) rows.store(v);
            }
            // Orders the lanes' rows before the fence of the one that raises a signal.
            __syncwarp();
            raise_scattered(item);
        }
        __syncwarp();
        // By a lane that has raised a signal, if any was: the rows have been taken.
        if (lane == 0) ptx::atomic_inc_wrap_relaxed(&p.control->stores_ended, 0xFFFFFFFFu);
    }

    // Brings the partial tiles that are added during the multiplication, one after another, into
    // the rooms that the CTA's item before has left. They take no stage of the ring, and whoever
    // waits for them here waits beside the loads.
    __device__ __forceinline__ void load_in_mainloop(const WorkItem& item) {
        const u32 count = in_mainloop_partials(p, item);
        if (count == 0) return;
        const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
        for (u32 source = 0; source < count; ++source) {
            if (item.await_count != 0) wait_for(p, epoch, await_target(p, epoch, item.await_first + source));
            // Orders the acquired signal before the bulk loads of the partial tile that it
            // announces.
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
        // Both consumers have added the last ones before either leaves its part there.
        RingState<C::kInMainloopPieces> last = in_mainloop;
        for (u32 place = 0; place < C::kInMainloopPieces; ++place) {
            ptx::mbarrier_wait(smem.in_mainloop_empty(last.stage), last.phase ^ 1);
            last.advance();
        }
    }

    __device__ __forceinline__ void stamp_sent(u32 item) const {
        if (lane == 0) stamp<C>(p, item, &ItemStamps::sent);
    }

    // What follows is done by one lane.

    // Lets the consumers leave their parts of an item; where they share a room, the first of them.
    __device__ __forceinline__ void open_staging() const {
#pragma unroll
        for (u32 c = 0; c < C::kStagingBuffers; ++c) ptx::mbarrier_arrive(smem.out_empty(c));
    }

    // The first consumer's part has left the room: it is the second's turn.
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

    // After a failed wait nothing more is sent: a peer may be gone, or already in a new
    // communicator. Asked before an item is there, which costs no time, and once more where the
    // item has itself awaited something, parts or partial tiles: whoever gave up waiting for them
    // set the poison before they were loaded.
    __device__ __forceinline__ bool may_send(const WorkItem& item, bool before) const {
        return before && (item.await_count + item.late_count == 0 || !poisoned(p));
    }

    // One part after the other, from rooms that nobody waits for.
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

    // The first part is laid aside, so that the second consumer can leave its own and both go on;
    // `number` counts the items so sent.
    __device__ __forceinline__ void send_paced(const WorkItem& item, u32 number) const {
        ptx::mbarrier_wait(smem.out_full(0), phase);
        ptx::bulk_store(global_staging(), smem.out(0), C::kOutBytesPerConsumer);
        ptx::bulk_commit();
        pass_staging();
        const bool before = !poisoned(p);
        ptx::mbarrier_wait(smem.out_full(1), phase);
        const bool live = may_send(item, before);
        // What was laid aside is there before it is fetched; it has had the time of the second part
        // for that.
        ptx::bulk_wait<0>();
        if (live) {
            send(item, 1, false);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
            // Orders the bulk stores to where it was laid, which have completed, before the bulk
            // loads from there.
            ptx::fence_proxy_async_global();
            fetch_global_staging(number);
            send(item, 0, false);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
        }
        announce(item, live);
    }

    __device__ __forceinline__ void announce(const WorkItem& item, bool live) const {
        if (!live) return;
        // The whole write, not only the read of the room: the signal follows it.
        ptx::bulk_wait<0>();
        if (item.partials != 0 && !(intra_node_peers_agree(item) && intra_node_peers_work())) return;
        raise(item);
    }

    // Whether those are in the same call whose partial tiles are in the sum that a relay sends on:
    // its owner hears from none of them. A relay adds none early.
    __device__ __forceinline__ bool intra_node_peers_agree(const WorkItem& item) const {
#pragma unroll 1
        for (u32 n = item.parts; n < item.late_count; ++n) {
            if (!same_op(p, epoch, p.awaits[item.late_first + n].peer)) return false;
        }
        return true;
    }

    // Whether none of those has given up. One that has may have overwritten what it sent before it
    // was read, and the sum's owner, in another node, does not hear of it. All that the item adds
    // has been read by now.
    __device__ __forceinline__ bool intra_node_peers_work() const {
        u32 reasons = 0;
#pragma unroll 4
        for (u32 peer = 0; peer < p.world; ++peer) reasons |= ptx::load_relaxed_sys(broken_word(p.pad[p.rank], peer));
        for (u32 peer = 0; reasons != 0 && peer < p.world; ++peer) peer_works(p, epoch, peer);
        return reasons == 0;
    }
};

}  // namespace flux
