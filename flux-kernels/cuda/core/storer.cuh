// The storer: a warp that sends finished output buffers on their way, to the caller's y or to their owners, and raises signals.
#pragma once
#include "core/config.cuh"
#include "core/fold.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "core/trace.cuh"
#include "core/wait.cuh"

namespace flux {

template <class C>
struct Storer {
    static_assert(C::kOutBytesPerConsumer % C::kPieceBytes == 0, "pieces");

    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    u32 phase = 0;

    __device__ __forceinline__ void store(const WorkItem& item, u32 consumer) const {
        const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows;
        const u32 first_col = C::kSplitColumns ? consumer * C::kCols : 0;
#pragma unroll
        for (u32 block = 0; block < C::kBlocksM; ++block) {
            const u32 row = first_row + block * 64;
            if (row >= item.rows) break;
#pragma unroll
            for (u32 box = 0; box < C::kBoxes; ++box) {
                const u32 col = first_col + box * C::kBoxCols;
                if (col >= item.cols) break;
                ptx::tensor_store_3d(&p.y, smem.out(consumer) + (block * C::kBoxes + box) * C::kBoxBytes, item.col + col, item.row + row,
                                     item.out_outer);
            }
        }
    }

    // `last` of this CTA: what it sends nobody's loads come after, and its owner may be waiting for it.
    __device__ __forceinline__ void send(const WorkItem& item, u32 consumer, bool last) const {
        const u64 slot = p.data[item.dest] + (epoch & 1) * p.half_stride + static_cast<u64>(item.slot) * C::kOutBytes;
        const u64 dst = slot + consumer * C::kOutBytesPerConsumer;
        if (p.send_gap_ns == 0 || last) {
            ptx::bulk_store(dst, smem.out(consumer), C::kOutBytesPerConsumer);
            return;
        }
        // CTAs finish their tiles nearly together: in pieces with gaps the link stays free of bursts, which slow the GEMM's own loads.
        for (u32 offset = 0; offset < C::kOutBytesPerConsumer; offset += C::kPieceBytes) {
            ptx::bulk_store(dst + offset, smem.out(consumer) + offset, C::kPieceBytes);
            ptx::bulk_commit();
            ptx::sleep_ns(p.send_gap_ns);
        }
    }

    // Announces the item to its owner, once its chunk is complete.
    __device__ __forceinline__ void raise(const WorkItem& item) const {
        if (item.counter != kNone) {
            // Orders this worker's slot, at the peer, before the count that lets another worker announce it.
            ptx::fence_acq_rel_sys();
            if (ptx::atomic_inc_wrap(&p.control->counters[item.counter], item.raise_after - 1) != item.raise_after - 1) return;
        }
        // Orders the slots of the chunk before the signal: the bulk stores have completed, and the count was acquired.
        ptx::store_release_sys(signal_word(p.pad[item.dest], item.raise, epoch), epoch);
    }

    // Announces the rows to their owners.
    __device__ __forceinline__ void raise_scattered(const WorkItem& item) const {
        const u32 first = item.row / p.m_shard;
        const u32 owner = first + lane;
        if (owner > (item.row + item.rows - 1) / p.m_shard) return;
        // Orders the consumers' rows, acquired with their barriers, before the signal.
        ptx::fence_acq_rel_sys();
        ptx::store_relaxed_sys(signal_word(p.pad[owner], item.raise, epoch), epoch);
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        u32 i = walk.first;
        for (; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            if constexpr (C::kReduceScatter) {
                if (item.sink == static_cast<u32>(Sink::kFold)) break;
                if (item.sink == static_cast<u32>(Sink::kScatter)) {
                    // The other lanes meet the one that did the items before, so the buffers' barriers are in this item's phase.
                    __syncwarp();
#pragma unroll
                    for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_wait(smem.out_full(c), phase);
                    // Rows that a consumer has left out are not announced: if it saw the poison, so does this load, which comes after its arrival.
                    if (!poisoned(p)) raise_scattered(item);
                    __syncwarp();
                    if (lane == 0) release();
                    stamp_sent(i);
                    phase ^= 1;
                    continue;
                }
            }
            if (lane == 0) send_or_store(item, i + walk.stride >= walk.count);
            phase ^= 1;
            stamp_sent(i);
        }
        if constexpr (C::kReduceScatter) {
            if (i < walk.count) await_folds<C>(p, smem, epoch, walk, i);
        }
        ptx::bulk_wait<0>();
    }

    __device__ __forceinline__ void stamp_sent(u32 item) const {
        if (lane == 0) stamp<C>(p, item, &ItemStamps::sent);
    }

    __device__ __forceinline__ void release() const {
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_arrive(smem.out_empty(c));
    }

    // By one lane.
    __device__ __forceinline__ void send_or_store(const WorkItem& item, bool last) const {
        bool send_item = false;
        if constexpr (C::kReduceScatter) send_item = item.sink == static_cast<u32>(Sink::kSend);
        const bool lend_item = item.sink == static_cast<u32>(Sink::kLend);
        // After a failed wait nothing more is sent: a peer may be gone, or already in a new communicator.
        bool live = !send_item || !poisoned(p);
#pragma unroll
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_wait(smem.out_full(c), phase);
            // A sum of partial tiles that this item itself has awaited: whoever gave up waiting for them set the poison before they were loaded.
            if (send_item && item.partials != 0 && c == 0) live = !poisoned(p);
            if (lend_item) continue;
            if (!send_item) {
                store(item, c);
            } else if (live) {
                send(item, c, last);
            }
            ptx::bulk_commit();
        }
        ptx::bulk_wait_read<0>();
        release();
        if (lend_item) {
            // Orders the consumers' accumulators, acquired with their barriers, before the signal.
            ptx::fence_acq_rel_gpu();
            ptx::store_release_gpu(signal_word(p.pad[p.rank], item.raise, epoch), epoch);
        }
        if (send_item && live) {
            // The whole write, not only the read of the buffer: the signal follows it.
            ptx::bulk_wait<0>();
            raise(item);
        }
    }
};

}  // namespace flux
