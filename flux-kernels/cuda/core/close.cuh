// The end of a call: the last CTA to leave hands this rank's half back to the peers, awaits theirs, and advances the epoch.
#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"
#include "core/wait.cuh"

namespace flux {

// The last call that the peer of this lane's number says it has read, for `close_call`. Asked for while the CTA's last loads are on their way: nearly always
// the peers have been done with the call before for long, and the last CTA to leave need not look again.
__device__ __forceinline__ u32 credit_of_lane(const Params& p) {
    const u32 lane = threadIdx.x % 32;
    return lane < p.world && lane != p.rank ? ptx::load_relaxed_sys(consumed_word(p.pad[p.rank], lane)) : 0;
}

// By one warp of every CTA, when the CTA has read all that it reads of the half and waits for peers no more. What it still rounds, stores and sends is none of the
// close's business: y is the caller's when the kernel has ended, and what is sent is announced by signals. A CTA that knows that the call has `failed` takes no ticket,
// so that there is no last one.
__device__ __forceinline__ void close_call(const Params& p, u32 epoch, u32 credit, bool failed) {
    const u32 lane = threadIdx.x % 32;
    const bool peer = lane < p.world && lane != p.rank;
    u32 last = 0;
    if (lane == 0 && !failed) {
        // Releases this CTA's reads of the half to the last CTA, which publishes the credit for all.
        last = ptx::atomic_inc_wrap(&p.control->ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    if (!__shfl_sync(0xFFFFFFFFu, last, 0)) return;
    // A shuffle moves the value alone: this orders the other lanes' accesses after what lane 0 has acquired with the ticket.
    __syncwarp();

    bool ok = true;
    // Orders every CTA's reads of this half, acquired with the ticket, before the peers' next writes to it, and the credit before what follows it.
    ptx::fence_acq_rel_sys();
    if (peer) {
        ptx::store_relaxed_sys(consumed_word(p.pad[lane], p.rank), epoch);
        if (!epoch_reached(credit, epoch - 1)) {
            ok = wait_for(p, epoch, {consumed_word(p.pad[p.rank], lane), epoch - 1, FaultWait::kConsumed, lane, kNone});
        }
    }
    if (lane == p.rank && p.await_pushed) {
        ok = wait_for(p, epoch, {&p.control->pushed, epoch, FaultWait::kPushed, p.rank, kNone});
    }
    // After a failure the epoch stands still; the communicator has to be rebuilt. Its next reader is ordered by the end of this kernel.
    if (__all_sync(0xFFFFFFFFu, ok) && lane == 0) ptx::store_relaxed_sys(&p.control->epoch, epoch + 1);
}

}  // namespace flux
