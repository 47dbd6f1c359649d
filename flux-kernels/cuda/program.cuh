// Addresses in pads, the control block and the data region, which `flux-core/src/layout` lays out.

#pragma once
#include "abi.cuh"

namespace flux {

// Why `rank` has given up, 0 while it has not: on every peer's pad, written by `rank`.
__device__ __forceinline__ u32* broken_word(u64 pad, u32 rank) {
    return reinterpret_cast<u32*>(pad + static_cast<u64>(rank) * kLine);
}

// The call that `rank` is in, on every peer's pad, written by `rank`: the call's number in the
// lower half, the op-sequence hash in the upper.
__device__ __forceinline__ u64* calling_words(u64 pad, u32 rank, u32 epoch) {
    return reinterpret_cast<u64*>(pad + static_cast<u64>(rank) * kLine + kCallingOffset + (epoch & 1) * 8);
}

// Signal `index`. Each half has signals of its own, as different ranks may raise one in successive
// ops: a rank a call ahead must not be taken for an awaited one.
__device__ __forceinline__ u32* signal_word(u64 pad, u32 index, u32 epoch) {
    return reinterpret_cast<u32*>(pad + (static_cast<u64>(kSignalsOffset / kLine) + 2 * static_cast<u64>(index) + (epoch & 1)) * kLine);
}

// The `index`-th chunk counter, dense behind the control block.
__device__ __forceinline__ u32* chunk_counter(Control* control, u32 index) {
    return reinterpret_cast<u32*>(control + 1) + index;
}

// The half of a rank's data region that the call uses.
__device__ __forceinline__ u64 half_of(const Params& p, u64 data, u32 epoch) { return data + (epoch & 1) * p.half_stride; }

// Partial tiles that the item adds in its mainloop; it adds the others afterwards.
__device__ __forceinline__ u32 in_mainloop_partials(const Params& p, const WorkItem& item) {
    return item.partials != 0 ? p.in_mainloop : 0;
}

}  // namespace flux
