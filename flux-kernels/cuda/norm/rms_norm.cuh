// RMSNorm of finished rows (Zhang and Sennrich, arXiv 1910.07467): out = y / sqrt(mean(y^2) + eps)
// * gain, in fp32, rounded once. A CTA has one row.

#pragma once
#include "abi.cuh"
#include "ptx/element.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

template <class Element>
__device__ __forceinline__ void widen_8(const uint4& eight, float (&v)[8]) {
    Element::unpack_2(eight.x, v[0], v[1]);
    Element::unpack_2(eight.y, v[2], v[3]);
    Element::unpack_2(eight.z, v[4], v[5]);
    Element::unpack_2(eight.w, v[6], v[7]);
}

template <class Element>
__device__ __forceinline__ uint4 narrow_8(const float (&v)[8]) {
    return {Element::pack_2(v[0], v[1]), Element::pack_2(v[2], v[3]), Element::pack_2(v[4], v[5]), Element::pack_2(v[6], v[7])};
}

// The sum over the CTA's threads, in an order that follows from their number alone.
__device__ __forceinline__ float sum_of_cta(float v) {
    __shared__ float of_warp[32];
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, distance);
    return v;
}

// What elements are multiplied by, of a row whose squares the threads have summed in part.
__device__ __forceinline__ float rms_scale(const RmsNormParams& p, float part) {
    return rsqrtf(sum_of_cta(part) / static_cast<float>(p.cols) + p.eps);
}

// The second pass finds the row in L1.
template <class Element>
__device__ __forceinline__ void rms_norm(const RmsNormParams& p) {
    const uint4* y = reinterpret_cast<const uint4*>(p.y + blockIdx.x * p.y_row_bytes);
    const uint4* gain = reinterpret_cast<const uint4*>(p.gain);
    const u64 out = p.out + blockIdx.x * p.out_row_bytes;
    float v[8], sum = 0.0f;
    ptx::await_launch_ahead();
    ptx::let_next_launch_begin();
    for (u32 i = threadIdx.x; i < p.cols / Element::kPerVector; i += blockDim.x) {
        widen_8<Element>(ptx::load_finished_16(&y[i]), v);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
    }
    const float scale = rms_scale(p, sum);
    for (u32 i = threadIdx.x; i < p.cols / Element::kPerVector; i += blockDim.x) {
        float g[8];
        widen_8<Element>(ptx::load_finished_16(&y[i]), v);
        widen_8<Element>(ptx::load_constant_16(&gain[i]), g);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) v[e] = v[e] * scale * g[e];
        ptx::store_global_16(out + i * u64{16}, narrow_8<Element>(v));
    }
}

}  // namespace flux
