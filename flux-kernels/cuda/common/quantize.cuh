// Numbers as E4M3 with a scale: x / scale in fp32, rounded to nearest even. The bits are those of
// the CPU: divisions round to nearest.

#pragma once
#include "abi.cuh"
#include "ptx/e4m3.cuh"

namespace flux {

// The largest of a group of lanes, a power of two.
template <u32 Lanes>
__device__ __forceinline__ float most_of_lanes(float v, u32 mask) {
#pragma unroll
    for (u32 distance = Lanes / 2; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(mask, v, distance));
    return v;
}

__device__ __forceinline__ float most_of_8(const float (&v)[8]) {
    float most = 0.0f;
#pragma unroll
    for (u32 e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
    return most;
}

__device__ __forceinline__ float scale_of(float most) {
    return fmaxf(__fdiv_rn(most, kE4m3Most), kLeastScale);
}

__device__ __forceinline__ float reciprocal_of(float scale) {
    return __fdiv_rn(1.0f, fmaxf(scale, kLeastScale));
}

// Saturates what is finite; infinities become NaN.
__device__ __forceinline__ float scaled(float v, float reciprocal) {
    return fabsf(v) < __int_as_float(0x7F800000) ? v * reciprocal : __int_as_float(0x7FFFFFFF);
}

__device__ __forceinline__ uint2 codes_of_8(const float (&v)[8], float reciprocal) {
    float s[8];
#pragma unroll
    for (u32 e = 0; e < 8; ++e) s[e] = scaled(v[e], reciprocal);
    return {ptx::pack_e4m3_4(s[0], s[1], s[2], s[3]), ptx::pack_e4m3_4(s[4], s[5], s[6], s[7])};
}

}  // namespace flux
