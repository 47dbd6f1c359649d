// Waits for other ranks. Every one ends: by the epoch, by the poison of another wait of this rank,
// by the host's abort word, or by the deadline.
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

// Time for what peers still read of a call when they look for the last time at whether this rank
// works: loads that are on their way, and all that folds add, which may begin when a call is closed
// whose last tiles leave by turns. Many times what reading gigabytes takes, and what a GPU that
// several processes share gives to each at a time.
constexpr u64 kGraceNs = 50000000;

// The op, or op-sequence hash, that the peer announced for this call on this rank's pad; 0 before.
// It is never 0 itself, unlike the words of a fresh pad.
__device__ __forceinline__ u32 op_hash_of(const Params& p, u32 epoch, u32 peer) {
    if (p.op_hash == 0) return 0;
    const u64 says = ptx::load_relaxed_sys_64(calling_words(p.pad[p.rank], peer, epoch));
    return static_cast<u32>(says) == epoch ? static_cast<u32>(says >> 32) : 0;
}

// Says on the pads of all peers which call this rank is in. By one warp of the launch, and not
// after a failure: the epoch stands still then, so what is queued behind the call that failed would
// say what it is in that call's place.
__device__ __forceinline__ void announce_call(const Params& p, u32 epoch) {
    const u32 peer = threadIdx.x % 32;
    if (p.op_hash == 0 || peer >= p.world || peer == p.rank || ptx::load_relaxed_gpu(&p.control->poison) != 0) return;
    ptx::store_relaxed_sys_64(calling_words(p.pad[peer], p.rank, epoch), static_cast<u64>(p.op_hash) << 32 | epoch);
}

// Leaves the record of the first wait of this rank that failed; the others find the poison. `rank`
// is whose failure it is.
//
// Peers are told before this kernel can end. What this rank's streams were given for later calls
// goes on then, copies of rows among it, to where a peer that is late may still read: its call must
// not be closed (`peer_works`).
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

// Whether the peer has not given up, as far as it has said. One that has may have overwritten what
// this rank has read in the call.
__device__ __forceinline__ bool peer_works(const Params& p, u32 epoch, u32 peer) {
    const u32* word = broken_word(p.pad[p.rank], peer);
    const u32 reason = ptx::load_relaxed_sys(word);
    if (reason != 0) record_fault(p, epoch, {word, FaultWait::kSignal, peer, kNone}, FaultCode::kAborted, peer, reason, reason);
    return reason == 0;
}

// Fails the call because the host has ended this rank's waits, for this reason; false.
__device__ __forceinline__ bool give_up(const Params& p, u32 epoch, u32 abort) {
    record_fault(p, epoch, {&p.fault->abort_word, FaultWait::kCall, p.rank, kNone}, FaultCode::kAborted, p.rank, 0, abort);
    return false;
}

// One wait's deadline, from when it begins.
struct Deadline {
    u64 start = ptx::global_timer_ns();
    u32 looks = 0;

    // After a look at what is not there yet, but `seen` instead: whether to look again.
    __device__ __forceinline__ bool again(const Params& p, u32 epoch, const WaitTarget& t, u32 seen) {
        // Looks of many threads would hold up the loads of those that work.
        ptx::sleep_ns(20);
        // The clock, the poison, the peer's op and, more rarely because it lies behind PCIe, the
        // abort word.
        if (++looks % 64 != 0) return true;
        if (ptx::load_relaxed_gpu(&p.control->poison) != 0) return false;
        // What does not come may be another op's.
        const u32 other = t.peer == p.rank ? 0 : op_hash_of(p, epoch, t.peer);
        const bool disagrees = other != 0 && other != p.op_hash;
        // Nor does it where the peer has found that before it said its own. Other reasons are no
        // business of this wait's: it lasts as long as its deadline says.
        const u32 reason = other == p.op_hash || t.peer == p.rank ? 0 : ptx::load_relaxed_sys(broken_word(p.pad[p.rank], t.peer));
        const u32 abort = reason == kInAnotherOp ? reason : looks % 4096 == 0 ? ptx::load_relaxed_sys(&p.fault->abort_word) : 0;
        if (!disagrees && abort == 0 && ptx::global_timer_ns() - start <= p.deadline_ns) return true;
        record_fault(p, epoch, t, disagrees ? FaultCode::kDisagreed : abort != 0 ? FaultCode::kAborted : FaultCode::kTimeout, reason == kInAnotherOp ? t.peer : p.rank,
                     disagrees ? other : seen, abort);
        return false;
    }
};

// Looks until the word is the call's number; false when the wait was given up. Acquires what the
// word's writer released.
__device__ __forceinline__ bool wait_slow(const Params& p, u32 epoch, const WaitTarget& t) {
    for (Deadline deadline;;) {
        const u32 seen = ptx::load_acquire_sys(t.word);
        if (seen == epoch) return true;
        if (!deadline.again(p, epoch, t, seen)) return false;
    }
}

// Whether the peer's call is of the same op. It has said so by the time that this rank has heard
// from it, or very soon.
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

// Whether an item awaits partial tiles that it adds after it has multiplied, besides accumulators
// of other ranges of k. What a fold awaits is its consumers' own business.
__device__ __forceinline__ bool awaits_partials(const WorkItem& item) {
    return item.late_count > item.parts && item.sink != static_cast<u32>(Sink::kReduceRows);
}

// One of the signals that an item awaits after it has multiplied.
__device__ __forceinline__ bool await_late(const Params& p, u32 epoch, const WorkItem& item, u32 n) {
    return wait_for(p, epoch, await_target(p, epoch, item.late_first + n));
}

__device__ __forceinline__ bool poisoned(const Params& p) {
    return ptx::load_relaxed_gpu(&p.control->poison) != 0;
}

}  // namespace flux
