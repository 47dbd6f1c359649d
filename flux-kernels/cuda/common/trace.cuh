// Time stamps of each item's phases, compiled only into traced kernels (`Config::kTrace`).
//
// Every stamp has one writer. Stamps are %globaltimer's: only differences on one GPU mean anything.

#pragma once
#include "common/walk.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Run by one thread of the role whose phase has ended.
template <class C>
__device__ __forceinline__ void stamp(const Params& p, u32 item, u64 ItemStamps::* phase) {
    if constexpr (C::kTrace) p.item_stamps[item].*phase = ptx::global_timer_ns();
}

// Run by one thread of the CTA.
template <class C>
__device__ __forceinline__ void stamp_worker(const Params& p, u64 WorkerStamps::* phase) {
    if constexpr (C::kTrace) p.worker_stamps[blockIdx.x].*phase = ptx::global_timer_ns();
}

// Run by all threads of the CTA.
template <class C>
__device__ __forceinline__ void stamp_cta(const Params& p, u64 WorkerStamps::* phase) {
    if constexpr (C::kTrace) {
        if (threadIdx.x != 0) return;
        // Reading the clock is no memory access, which a CTA barrier would hold back.
        ptx::fence_acq_rel_cta();
        stamp_worker<C>(p, phase);
        p.worker_stamps[blockIdx.x].multiprocessor = ptx::multiprocessor();
    }
}

}  // namespace flux
