// Rows that are their own signals: a word is the sentinel until its writer has stored it.
//
// The reader polls the words themselves and puts the sentinel back for the next writer
// (docs/architecture.md, "Rows that are their own signals").

#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux {

// A vector as its reader gets it: no word is the sentinel. That and the word before it are NaNs of
// every type of partial sums, and all other words stay as they are.
__device__ __forceinline__ uint4 without_sentinel(uint4 v) {
    return {min(v.x, kSentinel - 1), min(v.y, kSentinel - 1), min(v.z, kSentinel - 1), min(v.w, kSentinel - 1)};
}

// Whether all words were stored. PTX promises no vector access that is atomic.
__device__ __forceinline__ bool is_stored(const uint4& v) {
    return max(max(v.x, v.y), max(v.z, v.w)) != kSentinel;
}

__device__ __forceinline__ void restore_sentinel(u64 at) {
    ptx::store_relaxed_sys_16(at, {kSentinel, kSentinel, kSentinel, kSentinel});
}

// Whether rows are. The portable kernel has no registers to poll them beside its addresses.
template <class C>
__device__ __forceinline__ bool has_own_signals(const Params& p) {
    return C::kPollsRows && p.own_signals != 0;
}

// Stores a vector for another rank's reduction or copy.
template <class C>
__device__ __forceinline__ void store_row_vector(const Params& p, u64 at, const uint4& v) {
    if (has_own_signals<C>(p)) {
        ptx::store_relaxed_sys_16(at, without_sentinel(v));
    } else {
        ptx::store_global_16(at, v);
    }
}

// Loads a vector that another rank stored so; one that is its own `signal` may have yet to come.
__device__ __forceinline__ uint4 load_row_vector(bool signal, u64 at) {
    return signal ? ptx::load_relaxed_sys_16(at) : ptx::load_global_16(at);
}

// Orders the sentinels that this rank restored in earlier calls before the rows that this thread
// stores. By every thread that stores some, once, before the first.
template <class C>
__device__ __forceinline__ void order_restored(const Params& p) {
    if (has_own_signals<C>(p)) ptx::fence_acq_rel_sys();
}

// The other side: orders the sentinels that peers restored before the rows that they have stored,
// and this thread has seen, before what this rank stores in later calls. By every thread that
// polls rows, behind its last poll.
__device__ __forceinline__ void order_seen() { ptx::fence_acq_rel_sys(); }

}  // namespace flux
