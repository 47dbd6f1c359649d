// The persistent kernel: the warps of every CTA are a producer, a storer, a mover, a watcher, and two consumers of four warps each.
#pragma once
#include "core/close.cuh"
#include "core/config.cuh"
#include "core/consumer.cuh"
#include "core/mover.cuh"
#include "core/producer.cuh"
#include "core/trace.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "core/storer.cuh"
#include "core/watcher.cuh"

namespace flux {

template <class C>
__device__ __forceinline__ void fused_gemm(const Params& p) {
    extern __shared__ unsigned char dynamic_shared[];
    const Shared<C> smem{(ptx::shared_address(dynamic_shared) + 1023) & ~1023u};
    const u32 warpgroup = ptx::from_lane(threadIdx.x / 128, 0);
    const u32 warp = ptx::from_lane(threadIdx.x / 32, 0);
    stamp_cta<C>(p, &WorkerStamps::entered);
    // Read by every CTA before its ticket, so before the last one advances it.
    const u32 epoch = ptx::load_relaxed_gpu(&p.control->epoch);

    if (threadIdx.x == 0) {
        for (u32 s = 0; s < C::kStages; ++s) {
            ptx::mbarrier_init(smem.full(s), 1);
            ptx::mbarrier_init(smem.empty(s), C::kConsumers);
        }
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_init(smem.out_full(c), 128);
            ptx::mbarrier_init(smem.out_empty(c), 1);
        }
        ptx::mbarrier_init(smem.fold_ready(), 1);
        ptx::mbarrier_init(smem.part_back(), 1);
        for (u32 piece = 0; piece < C::kEarlyPieces; ++piece) {
            ptx::mbarrier_init(smem.early_full(piece), 1);
            ptx::mbarrier_init(smem.early_empty(piece), C::kConsumers);
        }
        ptx::store_release_cta_shared(smem.rows(), 0);
        ptx::fence_mbarrier_init();
        ptx::prefetch_tensor_map(&p.a_caller);
        ptx::prefetch_tensor_map(&p.b);
        ptx::prefetch_tensor_map(&p.y);
    }
    __syncthreads();

    const Walk walk{blockIdx.x, gridDim.x, p.item_count};
    // Where a CTA's last items are folds, its consumers read the half to the end.
    const bool folds = C::kScatters && walk.first < walk.count && p.items[walk.last()].sink == static_cast<u32>(Sink::kFold);
    u32 credit = 0;
    if (warpgroup == 0) {
        ptx::release_registers<C::kProducerRegisters>();
        if (warp == 0) {
            if (ptx::elect_one()) Producer<C>{p, smem, epoch}.run(walk);
            __syncwarp();
            credit = credit_of_lane(p);
            // All that this CTA reads of the half has been read, and no role of it waits for peers any more: the last tile is still to be rounded and stored.
            if (!folds) close_call(p, epoch, credit);
        } else if (warp == 1) {
            Storer<C>{p, smem, epoch, threadIdx.x % 32}.run(walk);
        } else if constexpr (!C::kReduceScatter) {
            // Where nothing is there to begin with, the watcher's warp helps to push first.
            if (warp == 2 || p.push_together) Mover<C>{p, epoch, threadIdx.x % 32, warp - 2}.run(blockIdx.x, gridDim.x);
            if (warp == 3) {
                Watcher<C>{p, smem, epoch, threadIdx.x % 32}.run(walk);
            }
        }
        __syncwarp();
    } else {
        ptx::acquire_registers<C::kConsumerRegisters>();
        Consumer<C>{p, smem, epoch, warpgroup - 1, threadIdx.x % 128}.run(walk);
    }
    __syncthreads();
    stamp_cta<C>(p, &WorkerStamps::drained);
    if (warp == 0 && folds) close_call(p, epoch, credit);
    stamp_cta<C>(p, &WorkerStamps::left);
}

}  // namespace flux
