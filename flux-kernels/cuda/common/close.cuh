// The end of a call: the last CTA advances the epoch.
//
// Nobody announces that a buffer half is free. A rank reuses a half in the next call but one, which
// it begins after it has heard from every peer in the next (`flux_core::signal`).

#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "common/wait.cuh"

namespace flux {

// Run by one warp of every CTA when no role of the CTA waits for peers any more. The CTA may still
// load, multiply, store and send: the end of the kernel orders that.
//
// A CTA that knows that the call has `failed` takes no ticket, so the epoch stands still and the
// communicator has to be rebuilt.
__device__ __forceinline__ void close_call(const Params& p, u32 epoch, bool failed) {
    const u32 lane = threadIdx.x % 32;
    u32 last = 0;
    // Every CTA has read the epoch before its ticket.
    if (lane == 0 && !failed) last = ptx::atomic_inc_wrap(&p.control->ticket, gridDim.x - 1) == gridDim.x - 1;
    if (ptx::from_lane(last, 0) == 0) return;
    // The shuffle moves only the value: this orders the other lanes' accesses after the ticket that
    // lane 0 has acquired.
    __syncwarp();
    bool ok = true;
    // Tells the host that what follows on the stream, where that is a collective, begins about now.
    if (lane == 0 && p.sequential != 0) ptx::store_relaxed_sys(&p.fault->closed, epoch);
    // The rows of a collective before this launch are whole unless the host has set the abort word.
    const u32 abort = lane == p.rank && p.sequential != 0 ? ptx::load_relaxed_sys(&p.fault->abort_word) : 0;
    if (lane < p.world && lane != p.rank) {
        // Both loads are issued together; only a wait makes the second one necessary again.
        const u32 other = op_hash_of(p, epoch, lane);
        ok = peer_works(p, epoch, lane);
        if (ok && other != p.op_hash) ok = same_op(p, epoch, lane) && peer_works(p, epoch, lane);
    }
    if (abort != 0) ok = fail_by_host(p, epoch, abort);
    if (lane == p.rank && p.await_pushed) ok = wait_for(p, epoch, {&p.control->pushed, FaultWait::kPushed, p.rank, kNone});
    // The end of this kernel orders the next reader.
    if (__all_sync(0xFFFFFFFFu, ok) && lane == 0) ptx::store_relaxed_sys(&p.control->epoch, epoch + 1);
}

}  // namespace flux
