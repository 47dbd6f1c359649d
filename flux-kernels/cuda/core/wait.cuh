// Waits for other ranks. Every one ends: by the epoch, by the poison of another wait of this rank, by the host's abort word, or by the deadline.
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

// Time for what peers still read of a call when they look for the last time at whether this rank works: loads that are on their way, and all that folds add. Many times
// what reading gigabytes takes.
constexpr u64 kMomentNs = 10000000;

// Leaves the record of the first wait of this rank that failed; the others find the poison. `rank` is whose failure it is.
//
// Peers are told before this kernel can end. What this rank's streams were given for later calls goes on then, copies of rows among it, to where a peer that is late
// may still read: its call must not be closed (`peer_works`).
__device__ __forceinline__ void record_fault(const Params& p, u32 epoch, const WaitTarget& t, FaultCode code, u32 rank, u32 seen, u32 abort) {
    if (ptx::atomic_cas(&p.control->poison, 0, 1) != 0) return;
#pragma unroll 1
    for (u32 peer = 0; peer < p.world; ++peer) {
        if (peer != p.rank) ptx::store_relaxed_sys(broken_word(p.pad[peer], p.rank), abort != 0 ? abort : kTimedOut);
    }
    ptx::fence_acq_rel_sys();
    volatile Fault* f = p.fault;
    f->code = static_cast<u32>(code);
    f->wait = static_cast<u32>(t.wait);
    f->rank = rank;
    f->peer = t.peer;
    f->signal = t.signal;
    f->expected = epoch;
    f->seen = seen;
    f->epoch = epoch;
    f->abort = abort;
    // Orders the fields before the state that announces them to the host.
    ptx::store_release_sys(const_cast<u32*>(&p.fault->state), 1);
    // A sleep may end at any time before twice its length.
    for (const u64 start = ptx::global_timer_ns(); ptx::global_timer_ns() - start < kMomentNs;) ptx::sleep_ns(100000);
}

// Whether the peer has not given up, as far as it has said. One that has may have overwritten what this rank has read in the call.
__device__ __forceinline__ bool peer_works(const Params& p, u32 epoch, u32 peer) {
    const u32* word = broken_word(p.pad[p.rank], peer);
    const u32 reason = ptx::load_relaxed_sys(word);
    if (reason != 0) record_fault(p, epoch, {word, FaultWait::kSignal, peer, kNone}, FaultCode::kAborted, peer, reason, reason);
    return reason == 0;
}

// Polls until the word is the call's number; false when the wait was given up. Acquires what the word's writer released.
__device__ __forceinline__ bool wait_slow(const Params& p, u32 epoch, const WaitTarget& t) {
    const u64 start = ptx::global_timer_ns();
    for (u32 polls = 1;; ++polls) {
        const u32 seen = ptx::load_acquire_sys(t.word);
        if (seen == epoch) return true;
        // Polls of many threads would hold up the loads of those that work.
        ptx::sleep_ns(20);
        // The clock, the poison and, more rarely because it lies behind PCIe, the abort word.
        if (polls % 64 == 0) {
            if (ptx::load_relaxed_gpu(&p.control->poison) != 0) return false;
            const u32 abort = polls % 4096 == 0 ? ptx::load_relaxed_sys(&p.fault->abort_word) : 0;
            if (abort != 0 || ptx::global_timer_ns() - start > p.deadline_ns) {
                record_fault(p, epoch, t, abort != 0 ? FaultCode::kAborted : FaultCode::kTimeout, p.rank, seen, abort);
                return false;
            }
        }
    }
}

__device__ __forceinline__ bool wait_for(const Params& p, u32 epoch, const WaitTarget& t) {
    return ptx::load_acquire_sys(t.word) == epoch || wait_slow(p, epoch, t);
}

// Entries of the await list that are polled together: one after the other, each would cost its latency.
constexpr u32 kPolls = 8;

__device__ __forceinline__ WaitTarget await_target(const Params& p, u32 epoch, const Await& a) {
    return {signal_word(p.pad[p.rank], a.signal, epoch), FaultWait::kSignal, a.peer, a.signal};
}

__device__ __forceinline__ WaitTarget await_target(const Params& p, u32 epoch, u32 index) {
    return await_target(p, epoch, p.awaits[index]);
}

// How many of up to kPolls of `count` entries from `first` on are raised, one after another, and acquired: at least one, which is awaited, or given up.
__device__ __forceinline__ u32 await_next(const Params& p, u32 epoch, u32 first, u32 count) {
    u32 seen[kPolls];
#pragma unroll
    for (u32 i = 0; i < kPolls; ++i) seen[i] = ptx::load_relaxed_sys(signal_word(p.pad[p.rank], p.awaits[first + (i < count ? i : 0)].signal, epoch));
    u32 raised = 0;
#pragma unroll
    for (u32 i = 0; i < kPolls; ++i) raised += raised == i && i < count && seen[i] == epoch ? 1 : 0;
    if (raised == 0) {
        wait_for(p, epoch, await_target(p, epoch, first));
        return 1;
    }
    ptx::fence_acq_rel_sys();
    return raised;
}

// One of the signals that an item awaits after it has multiplied.
__device__ __forceinline__ bool await_late(const Params& p, u32 epoch, const WorkItem& item, u32 n) {
    return wait_for(p, epoch, await_target(p, epoch, item.late_first + n));
}

__device__ __forceinline__ bool poisoned(const Params& p) {
    return ptx::load_relaxed_gpu(&p.control->poison) != 0;
}

}  // namespace flux
