// The persistent kernel of every GPU from compute capability 8.0 on. Of every CTA's warps eight are
// consumers, two producers, one is the signaller and one the mover.

#pragma once
#include "common/close.cuh"
#include "common/copy.cuh"
#include "common/mover.cuh"
#include "common/trace.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "sm80/config.cuh"
#include "sm80/consumer.cuh"
#include "sm80/producer.cuh"
#include "sm80/signaller.cuh"

namespace flux {

template <class C>
__device__ __forceinline__ void fused_gemm(const Params& p) {
    extern __shared__ unsigned char dynamic_shared[];
    const Shared<C> smem{(ptx::shared_address(dynamic_shared) + 1023) & ~1023u};
    const u32 warp = ptx::from_lane(threadIdx.x / 32, 0);
    stamp_cta(p, &WorkerStamps::entered);
    // Every CTA reads it before its ticket, so before the last CTA advances it.
    const u32 epoch = ptx::load_relaxed_gpu(&p.control->epoch);
    const Walk walk{blockIdx.x, gridDim.x, p.item_count};
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < C::kStages; ++s) {
            ptx::mbarrier_init(smem.full(s), 32 * C::kProducerWarps);
            ptx::mbarrier_init(smem.empty(s), C::kConsumerWarps);
        }
        ptx::mbarrier_init(smem.stored(), C::kConsumerWarps);
        ptx::mbarrier_init(smem.announced(), 1);
        ptx::mbarrier_init(smem.rows_ready(), 1);
        ptx::mbarrier_init(smem.copied(), Copier<C>::kArrivals);
        ptx::store_release_cta_shared(smem.arrived(), 0);
        ptx::store_release_cta_shared(smem.multiplied(), 0);
        ptx::store_release_cta_shared(smem.epoch(), epoch);
    }
    __syncthreads();

    if (warp < C::kConsumerWarps) {
        Consumer<C>{p, smem}.run(walk);
        // Here, not behind all roles: what follows their end takes registers of accumulators.
        if (traces(p) && threadIdx.x % 32 == 0) ptx::reduce_max_relaxed(&p.worker_stamps[blockIdx.x].left, ptx::global_timer_ns());
    } else if (warp < C::kSignallerWarp) {
        Producer<C>{p, smem, epoch}.run(walk);
        // The signals that one producer has seen, the other need not wait for, and the signaller of
        // an AllGather-GEMM waits for no peer. The last tile may still be multiplied and stored.
        if (!C::kReduceScatter && warp == C::kConsumerWarps) close_call(p, epoch, poisoned(p));
    } else if (warp == C::kSignallerWarp) {
        Signaller<C>{p, smem, epoch}.run(walk);
        // The other roles of a GEMM-ReduceScatter wait for no peer.
        if (C::kReduceScatter) close_call(p, epoch, poisoned(p));
    } else {
        if (!C::kReduceScatter && p.transfer_count != 0) {
            const Mover<C> mover{p, epoch, threadIdx.x % 32, 0};
            mover.ask_ahead(blockIdx.x, gridDim.x);
            mover.run(blockIdx.x, gridDim.x, transfer_of_lane(p, 0));
        }
        if (blockIdx.x == 0) announce_call(p, epoch);
        if constexpr (C::kSendsPartials) {
            if (p.copy_count != 0) Copier<C>{p, smem, epoch, threadIdx.x % 32}.beside_gemm();
        }
    }
}

}  // namespace flux
