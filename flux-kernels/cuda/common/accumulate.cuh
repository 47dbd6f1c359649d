// Adding vectors of 16 bytes to fp32 sums.

#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Adds eight values of the output's type, to the pairs of sums that `pair_at(0)`, 2, 4 and 6 point to.
template <class C, class PairAt>
__device__ __forceinline__ void add_eight(const uint4& eight, PairAt pair_at) {
    const u32 pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float lo, hi;
        C::Output::unpack_2(pairs[i], lo, hi);
        float* const sums = pair_at(2 * i);
        sums[0] += lo;
        sums[1] += hi;
    }
}

// The same to sums that follow each other.
template <class C>
__device__ __forceinline__ void add_eight(const uint4& eight, float* sums) {
    add_eight<C>(eight, [&](u32 i) { return sums + i; });
}

// Adds four values in fp32.
__device__ __forceinline__ void add_four(const uint4& four, float* sums) {
    sums[0] += __uint_as_float(four.x);
    sums[1] += __uint_as_float(four.y);
    sums[2] += __uint_as_float(four.z);
    sums[3] += __uint_as_float(four.w);
}

}  // namespace flux
