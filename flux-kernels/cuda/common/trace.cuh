// Time stamps of each item's phases, in calls that record them.
//
// Every stamp has one writer. Stamps are %globaltimer's: only differences on one GPU mean anything.

#pragma once
#include "common/walk.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Whether the call records them. Uniform, so that others pay one predicate.
__device__ __forceinline__ bool traces(const Params& p) { return p.item_stamps != nullptr; }

// Run by one thread of the role whose phase has ended.
__device__ __forceinline__ void stamp(const Params& p, u32 item, u64 ItemStamps::* phase) {
    if (traces(p)) p.item_stamps[item].*phase = ptx::global_timer_ns();
}

// Run by one thread of the CTA.
__device__ __forceinline__ void stamp_worker(const Params& p, u64 WorkerStamps::* phase) {
    if (traces(p)) p.worker_stamps[blockIdx.x].*phase = ptx::global_timer_ns();
}

// Run by all threads of the CTA.
__device__ __forceinline__ void stamp_cta(const Params& p, u64 WorkerStamps::* phase) {
    if (!traces(p) || threadIdx.x != 0) return;
    // Reading the clock is no memory access, which a CTA barrier would hold back.
    ptx::fence_acq_rel_cta();
    stamp_worker(p, phase);
    p.worker_stamps[blockIdx.x].multiprocessor = ptx::multiprocessor();
}

}  // namespace flux
