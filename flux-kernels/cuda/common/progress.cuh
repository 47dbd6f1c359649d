// How far data has arrived, as a number that grows.

#pragma once
#include "types.cuh"

namespace flux {

// Rows of A before step `step` of the CTA's `number`-th item, or `step` of what the item adds.
// Later is larger.
__device__ __forceinline__ u64 progress(u32 number, u32 step) {
    return static_cast<u64>(number) << 32 | step;
}

}  // namespace flux
