// When each phase of each item ended, where a kernel is instantiated to record it
// (`Config::kTrace`); otherwise nothing is compiled.
//
// Every stamp has one writer. Times are %globaltimer's: differences on one GPU mean something,
// those between GPUs do not.
#pragma once
#include "core/config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// By one thread: the one that runs the role whose phase has ended.
template <class C>
__device__ __forceinline__ void stamp(const Params& p, u32 item, u64 ItemStamps::* phase) {
    if constexpr (C::kTrace) p.item_stamps[item].*phase = ptx::global_timer_ns();
}

// By one thread of the CTA, as above.
template <class C>
__device__ __forceinline__ void stamp_worker(const Params& p, u64 WorkerStamps::* phase) {
    if constexpr (C::kTrace) p.worker_stamps[blockIdx.x].*phase = ptx::global_timer_ns();
}

// By all threads of the CTA.
template <class C>
__device__ __forceinline__ void stamp_cta(const Params& p, u64 WorkerStamps::* phase) {
    if constexpr (C::kTrace) {
        if (threadIdx.x != 0) return;
        // A barrier of the CTA holds back what touches memory, which reading the clock does not.
        ptx::fence_acq_rel_cta();
        stamp_worker<C>(p, phase);
        p.worker_stamps[blockIdx.x].multiprocessor = ptx::multiprocessor();
    }
}

}  // namespace flux
