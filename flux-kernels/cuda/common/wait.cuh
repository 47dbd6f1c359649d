// Waits for other ranks. Each ends by the epoch, by the poison of another wait of this rank, by the
// host's abort word, or by the deadline.

#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux {

struct WaitTarget {
    const u32* word;
    FaultWait wait;
    u32 peer;
    u32 signal;
};

// Time that a failed kernel stays, so that peers finish reading what this rank's streams may then
// overwrite. Reading gigabytes takes less, and so does a time slice of a GPU that processes share.
constexpr u64 kGraceNs = 50000000;

// The op-sequence hash that `peer` has written to this rank's pad for this call. 0 before, and
// where kernels compare none; no hash on a pad is 0.
__device__ __forceinline__ u32 op_hash_of(const Params& p, u32 epoch, u32 peer) {
    if (p.op_hash == 0) return 0;
    const u64 calling = ptx::load_relaxed_sys_64(calling_words(p.pad[p.rank], peer, epoch));
    return static_cast<u32>(calling) == epoch ? static_cast<u32>(calling >> 32) : 0;
}

// Writes to the pads of all peers which call this rank is in. Run by one warp of the launch. Not
// after a failure: the epoch stands still, so a queued call would announce its op for the failed
// one.
__device__ __forceinline__ void announce_call(const Params& p, u32 epoch) {
    const u32 peer = threadIdx.x % 32;
    if (p.op_hash == 0 || peer >= p.world || peer == p.rank || ptx::load_relaxed_gpu(&p.control->poison) != 0) return;
    ptx::store_relaxed_sys_64(calling_words(p.pad[peer], p.rank, epoch), static_cast<u64>(p.op_hash) << 32 | epoch);
}

// Leaves the record of this rank's first failed wait; later waits find the poison. `rank` is the
// rank whose failure it is.
//
// Peers are told before this kernel ends, because later work of this rank's streams may then
// overwrite rows that a straggler still reads: it must not close its call (`peer_works`).
__device__ __forceinline__ void record_fault(const Params& p, u32 epoch, const WaitTarget& t, FaultCode code, u32 rank, u32 seen, u32 abort) {
    if (ptx::atomic_cas(&p.control->poison, 0, 1) != 0) return;
    const bool disagreed = code == FaultCode::kDisagreed;
    const u32 reason = abort != 0 ? abort : disagreed ? kInAnotherOp : kTimedOut;
#pragma unroll 1
    for (u32 peer = 0; peer < p.world; ++peer) {
        if (peer != p.rank) ptx::store_relaxed_sys(broken_word(p.pad[peer], p.rank), reason);
    }
    ptx::fence_acq_rel_sys();
    volatile Fault* f = p.fault;
    f->code = static_cast<u32>(code);
    f->wait = static_cast<u32>(t.wait);
    f->rank = rank;
    f->peer = t.peer;
    f->signal = t.signal;
    f->expected = disagreed ? p.op_hash : epoch;
    f->seen = seen;
    f->epoch = epoch;
    f->abort = abort;
    // Orders the fields before the state that announces them to the host.
    ptx::store_release_sys(const_cast<u32*>(&p.fault->state), 1);
    // A sleep may end at any time before twice its length.
    for (const u64 start = ptx::global_timer_ns(); ptx::global_timer_ns() - start < kGraceNs;) ptx::sleep_ns(100000);
}

// Whether the peer has not given up. A peer that has may have overwritten what this rank read.
__device__ __forceinline__ bool peer_works(const Params& p, u32 epoch, u32 peer) {
    const u32* word = broken_word(p.pad[p.rank], peer);
    const u32 reason = ptx::load_relaxed_sys(word);
    if (reason != 0) record_fault(p, epoch, {word, FaultWait::kSignal, peer, kNone}, FaultCode::kAborted, peer, reason, reason);
    return reason == 0;
}

// Fails the call for the host's reason `abort`; returns false.
__device__ __forceinline__ bool fail_by_host(const Params& p, u32 epoch, u32 abort) {
    record_fault(p, epoch, {&p.fault->abort_word, FaultWait::kCall, p.rank, kNone}, FaultCode::kAborted, p.rank, 0, abort);
    return false;
}

// The deadline of one wait, from its construction.
struct Deadline {
    u64 start = ptx::global_timer_ns();
    u32 polls = 0;

    // Called after a poll that found `seen`: whether to poll again.
    __device__ __forceinline__ bool again(const Params& p, u32 epoch, const WaitTarget& t, u32 seen) {
        // Polls of many threads would hold up the loads of others.
        ptx::sleep_ns(20);
        // Clock, poison and the peer's hash; the abort word more rarely, as it lies behind PCIe.
        if (++polls % 64 != 0) return true;
        if (ptx::load_relaxed_gpu(&p.control->poison) != 0) return false;
        // The signal may be missing because the peer is in another op, or has found that this rank
        // is. Other reasons do not end this wait: its deadline does.
        u32 other = p.op_hash, reason = 0;
        if (t.peer != p.rank) {
            other = op_hash_of(p, epoch, t.peer);
            if (other != p.op_hash) reason = ptx::load_relaxed_sys(broken_word(p.pad[p.rank], t.peer));
        }
        const bool disagrees = other != 0 && other != p.op_hash;
        const u32 abort = reason == kInAnotherOp ? reason : polls % 4096 == 0 ? ptx::load_relaxed_sys(&p.fault->abort_word) : 0;
        if (!disagrees && abort == 0 && ptx::global_timer_ns() - start <= p.deadline_ns) return true;
        record_fault(p, epoch, t, disagrees ? FaultCode::kDisagreed : abort != 0 ? FaultCode::kAborted : FaultCode::kTimeout, reason == kInAnotherOp ? t.peer : p.rank,
                     disagrees ? other : seen, abort);
        return false;
    }
};

// Polls until the word is the call's number; false when the wait has failed. Acquires what the
// word's writer released.
__device__ __forceinline__ bool wait_slow(const Params& p, u32 epoch, const WaitTarget& t) {
    for (Deadline deadline;;) {
        const u32 seen = ptx::load_acquire_sys(t.word);
        if (seen == epoch) return true;
        if (!deadline.again(p, epoch, t, seen)) return false;
    }
}

// Whether the peer's call is of the same op. Its hash is there when its signals are, or soon after.
__device__ __forceinline__ bool same_op(const Params& p, u32 epoch, u32 peer) {
    for (Deadline deadline;;) {
        if (op_hash_of(p, epoch, peer) == p.op_hash) return true;
        if (!deadline.again(p, epoch, {nullptr, FaultWait::kCall, peer, 0}, 0)) return false;
    }
}

__device__ __forceinline__ bool wait_for(const Params& p, u32 epoch, const WaitTarget& t) {
    return ptx::load_acquire_sys(t.word) == epoch || wait_slow(p, epoch, t);
}

__device__ __forceinline__ WaitTarget await_target(const Params& p, u32 epoch, const Await& a) {
    return {signal_word(p.pad[p.rank], a.signal, epoch), FaultWait::kSignal, a.peer, a.signal};
}

__device__ __forceinline__ WaitTarget await_target(const Params& p, u32 epoch, u32 index) {
    return await_target(p, epoch, p.awaits[index]);
}

// Whether an item awaits peers' partial tiles after its mainloop, besides split-K partials. The
// rows that a reduction awaits are not counted.
__device__ __forceinline__ bool awaits_partials(const WorkItem& item) {
    return item.late_count > item.parts && item.sink != static_cast<u32>(Sink::kReduceRows);
}

// Waits for the `n`-th signal that an item awaits after its mainloop.
__device__ __forceinline__ bool await_late(const Params& p, u32 epoch, const WorkItem& item, u32 n) {
    return wait_for(p, epoch, await_target(p, epoch, item.late_first + n));
}

__device__ __forceinline__ bool poisoned(const Params& p) {
    return ptx::load_relaxed_gpu(&p.control->poison) != 0;
}

// Waits for awaits in their order, by a whole warp that polls 32 at once. `begin` is called before
// the deadline runs, and `publish(n)` when the first n have arrived. After a failed wait all are
// published: the sums are garbage within bounds, and the call is reported as failed.
template <class Begin, class Publish>
__device__ __forceinline__ void await_in_order(const Params& p, u32 epoch, u32 first, u32 count, Begin begin, Publish publish) {
    const u32 lane = threadIdx.x % 32;
    for (u32 arrived = 0; arrived < count;) {
        const u32 polled = count - arrived < 32 ? count - arrived : 32;
        const WaitTarget target = await_target(p, epoch, first + arrived + (lane < polled ? lane : 0));
        if (arrived == 0) begin();
        for (Deadline deadline;;) {
            const u32 seen = ptx::load_acquire_sys(target.word);
            const u32 missing = __ballot_sync(0xFFFFFFFFu, lane < polled && seen != epoch);
            if ((missing & 1) == 0) {
                arrived += missing == 0 ? polled : __ffs(missing) - 1;
                break;
            }
            // The first lane keeps the deadline of the first missing one.
            if (__any_sync(0xFFFFFFFFu, lane == 0 && !deadline.again(p, epoch, target, seen))) {
                arrived = count;
                break;
            }
        }
        publish(arrived);
    }
}

}  // namespace flux
