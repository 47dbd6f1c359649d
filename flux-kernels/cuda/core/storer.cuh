// The storer: one thread that sends finished output buffers on their way, to the caller's y or to their owner's slot, and raises signals.
#pragma once
#include "core/config.cuh"
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
    u32 phase = 0;

    __device__ __forceinline__ void store(const WorkItem& item, u32 consumer) const {
#pragma unroll
        for (u32 block = 0; block < C::kBlocksM; ++block) {
            const u32 row = (consumer * C::kBlocksM + block) * 64;
            if (row >= item.rows) break;
#pragma unroll
            for (u32 box = 0; box < C::kTileN / 64; ++box) {
                if (box * 64 >= item.cols) break;
                ptx::tensor_store_3d(&p.y, smem.out(consumer) + (block * (C::kTileN / 64) + box) * 8192, item.col + box * 64,
                                     item.row + row, item.out_outer);
            }
        }
    }

    __device__ __forceinline__ void send(const WorkItem& item, u32 consumer) const {
        const u64 slot = p.data[item.dest] + (epoch & 1) * p.half_stride + static_cast<u64>(item.slot) * C::kOutBytes;
        const u64 dst = slot + consumer * C::kOutBytesPerConsumer;
        if (p.send_gap_ns == 0) {
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
        ptx::store_release_sys(signal_word(p.pad[item.dest], item.raise), epoch);
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            bool send_item = false;
            if constexpr (C::kReduceScatter) send_item = item.sink == static_cast<u32>(Sink::kSend);
            // After a failed wait nothing more is sent: a peer may be gone, or already in a new communicator.
            const bool live = !send_item || !poisoned(p);
#pragma unroll
            for (u32 c = 0; c < C::kConsumers; ++c) {
                ptx::mbarrier_wait(smem.out_full(c), phase);
                if (!send_item) {
                    store(item, c);
                } else if (live) {
                    send(item, c);
                }
                ptx::bulk_commit();
            }
            ptx::bulk_wait_read<0>();
#pragma unroll
            for (u32 c = 0; c < C::kConsumers; ++c) ptx::mbarrier_arrive(smem.out_empty(c));
            phase ^= 1;
            if (send_item && live) {
                // The whole write, not only the read of the buffer: the signal follows it.
                ptx::bulk_wait<0>();
                raise(item);
            }
            stamp<C>(p, i, &ItemStamps::sent);
        }
        ptx::bulk_wait<0>();
    }
};

}  // namespace flux
