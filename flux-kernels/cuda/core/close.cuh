// The end of a call: the last CTA advances the epoch. That a half is free again nobody says: a rank
// begins the next call but one, which uses it again, when it has heard from every peer in the next,
// which no peer has begun before it ended this one (`flux_core::signal`).
#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "core/wait.cuh"

namespace flux {

// By one warp of every CTA, when no role of the CTA waits for peers any more. What it still loads,
// multiplies, stores and sends is none of the close's business: y is the caller's, and the half a
// later call's, when the kernel has ended. A CTA that knows that the call has `failed` takes no
// ticket, so that there is no last one: after a failure the epoch stands still, and the
// communicator has to be rebuilt.
__device__ __forceinline__ void close_call(const Params& p, u32 epoch, bool failed) {
    const u32 lane = threadIdx.x % 32;
    u32 last = 0;
    // Every CTA has read the epoch before its ticket.
    if (lane == 0 && !failed) last = ptx::atomic_inc_wrap(&p.control->ticket, gridDim.x - 1) == gridDim.x - 1;
    if (ptx::from_lane(last, 0) == 0) return;
    // A shuffle moves the value alone: this orders the other lanes' accesses after what lane 0 has
    // acquired with the ticket.
    __syncwarp();
    bool ok = true;
    // A collective that the host aborted left its rows torn: the host sets this word first.
    const u32 abort = lane == p.rank && p.after_collective != 0 ? ptx::load_relaxed_sys(&p.fault->abort_word) : 0;
    if (lane < p.world && lane != p.rank) {
        // Asked for together. Who has to wait for the one looks at the other again.
        const u32 other = op_hash_of(p, epoch, lane);
        ok = peer_works(p, epoch, lane);
        if (ok && other != p.op_hash) ok = same_op(p, epoch, lane) && peer_works(p, epoch, lane);
    }
    if (abort != 0) ok = give_up(p, epoch, abort);
    if (lane == p.rank && p.await_pushed) ok = wait_for(p, epoch, {&p.control->pushed, FaultWait::kPushed, p.rank, kNone});
    // Its next reader is ordered by the end of this kernel.
    if (__all_sync(0xFFFFFFFFu, ok) && lane == 0) ptx::store_relaxed_sys(&p.control->epoch, epoch + 1);
}

}  // namespace flux
