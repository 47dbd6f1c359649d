// Rows as E4M3 with scales, normalised before where there is a gain: out = x / scale in fp32,
// rounded to nearest even. A CTA has one row. The bits are those of the CPU: divisions and roots
// round to nearest, and the order of sums follows from a thread's number alone.

#pragma once
#include "abi.cuh"
#include "norm/rms_norm.cuh"
#include "ptx/e4m3.cuh"

namespace flux {

// The largest of a group of lanes, a power of two.
template <u32 Lanes>
__device__ __forceinline__ float most_of_lanes(float v, u32 mask) {
#pragma unroll
    for (u32 distance = Lanes / 2; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(mask, v, distance));
    return v;
}

__device__ __forceinline__ float most_of_cta(float v) {
    __shared__ float of_warp[32];
    v = most_of_lanes<32>(v, 0xFFFFFFFFu);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0.0f;
    return most_of_lanes<32>(v, 0xFFFFFFFFu);
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

// Later passes find the row in L1.
template <class Element>
__device__ __forceinline__ void quantize(const QuantizeParams& p) {
    constexpr u32 kVectorsOfBlock = 16;
    const uint4* x = reinterpret_cast<const uint4*>(p.x + blockIdx.x * p.x_row_bytes);
    const uint4* gain = reinterpret_cast<const uint4*>(p.gain);
    const u64 out = p.out + blockIdx.x * p.out_row_bytes;
    const u32 vectors = p.cols / Element::kPerVector;
    float v[8], norm = 1.0f;
    ptx::await_launch_ahead();
    ptx::let_next_launch_begin();
    if (gain != nullptr) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
            widen_8<Element>(ptx::load_finished_16(&x[i]), v);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
        }
        norm = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_cta(sum), static_cast<float>(p.cols)), p.eps)));
    }
    // Elements of a vector, and the largest magnitude among them.
    const auto load = [&](u32 i) {
        widen_8<Element>(ptx::load_finished_16(&x[i]), v);
        if (gain != nullptr) {
            float g[8];
            widen_8<Element>(ptx::load_constant_16(&gain[i]), g);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) v[e] = v[e] * norm * g[e];
        }
        float most = 0.0f;
#pragma unroll
        for (u32 e = 0; e < 8; ++e) most = fmaxf(most, fabsf(v[e]));
        return most;
    };
    const bool of_row = p.group == p.cols, of_block = !of_row && p.group > 0;
    const auto store_scale = [&](u32 group, float scale) {
        *reinterpret_cast<float*>(p.scale + blockIdx.x * p.scale_row_bytes + group * p.scale_group_bytes) = scale;
    };
    float reciprocal = 1.0f;
    if (p.group == 0) {
        reciprocal = reciprocal_of(*reinterpret_cast<const float*>(p.scale));
    } else if (of_row) {
        float most = 0.0f;
        for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) most = fmaxf(most, load(i));
        const float scale = scale_of(most_of_cta(most));
        reciprocal = reciprocal_of(scale);
        if (threadIdx.x == 0) store_scale(0, scale);
    }
    for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
        const float most = load(i);
        if (of_block) {
            // A block's vectors are those of half a warp, and rows are whole blocks.
            const float scale = scale_of(most_of_lanes<kVectorsOfBlock>(most, 0xFFFFu << (threadIdx.x & 16)));
            reciprocal = reciprocal_of(scale);
            if (i % kVectorsOfBlock == 0) store_scale(i / kVectorsOfBlock, scale);
        }
#pragma unroll
        for (u32 e = 0; e < 8; ++e) v[e] = scaled(v[e], reciprocal);
        const uint2 codes = {ptx::pack_e4m3_4(v[0], v[1], v[2], v[3]), ptx::pack_e4m3_4(v[4], v[5], v[6], v[7])};
        *reinterpret_cast<uint2*>(out + i * u64{8}) = codes;
    }
    // Zeros fill the last cache line behind codes: 31 at most, and a CTA has 32 threads or more.
    const u32 groups = of_row ? 1 : vectors / kVectorsOfBlock;
    if (const u32 at = groups + threadIdx.x; at < p.scales_of_row) store_scale(at, 0.0f);
}

}  // namespace flux
