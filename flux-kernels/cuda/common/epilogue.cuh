// The epilogue of an output's fp32 value, before its one rounding: y = act(v + bias).
//
// It runs where a sum is complete (a stored tile, an own tile after the peers' partials, reduced
// rows), never on a partial. Params say whether there is a bias; the activation is the kernel's.

#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// v / (1 + exp(negated)): v times the logistic function of -negated, without cancellation.
//
// expf is within 1 ulp and the division within 2 (CUDA C++ Programming Guide, "Mathematical
// Functions"). A denominator beyond 2^126 counts as infinite, which is off by less than 2^-126 |v|.
__device__ __forceinline__ float gate(float v, float negated) {
    return __fdividef(v, 1.0f + expf(negated));
}

// GELU in its tanh form, 0.5 v (1 + tanh(h)) with h = sqrt(2 / pi) (v + 0.044715 v^3): Hendrycks
// and Gimpel, "Gaussian error linear units", arXiv 1606.08415. Its equal v / (1 + exp(-2 h)) is
// within 7 * 2^-24 |v| (flux-kernels/src/epilogue.rs derives it).
template <Activation A>
__device__ __forceinline__ float activate(float v) {
    if constexpr (A == Activation::kGelu) {
        return gate(v, v * fmaf(v * v, -kGeluCubic, -kGeluLinear));
    } else if constexpr (A == Activation::kSilu) {
        // Elfwing, Uchibe, Doya, "Sigmoid-weighted linear units", arXiv 1702.03118.
        return gate(v, -v);
    } else if constexpr (A == Activation::kRelu) {
        // Not fmaxf, which would turn a NaN into zero.
        return v < 0.0f ? 0.0f : v;
    } else {
        static_assert(A == Activation::kNone, "an activation without a formula");
        return v;
    }
}

// The bias of output columns `col`, which is even and within the operand, and `col + 1`.
template <bool Bf16>
__device__ __forceinline__ float2 bias_pair(const Params& p, u32 col) {
    float2 pair;
    ptx::unpack_2<Bf16>(ptx::load_constant_4(p.bias + static_cast<u64>(col) * 2), pair.x, pair.y);
    return pair;
}

// Adds the bias to the accumulators of thread `thread` of 128, as wgmma leaves them: acc[block][4 j
// + i] is column 8 j + 2 (thread mod 4) + (i mod 2). Its row for i < 2 differs from that for i >=
// 2.
template <class C>
__device__ __forceinline__ void add_bias(const Params& p, const WorkItem& item, u32 consumer, u32 thread,
                                         float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first = C::kSplitColumns ? consumer * C::kCols : 0;
#pragma unroll
    for (u32 j = 0; j < C::kCols / 8; ++j) {
        // Columns are a multiple of 8; memory may end behind the last.
        if (first + j * 8 >= item.cols) break;
        const float2 bias = bias_pair<C::kBf16>(p, item.col + first + j * 8 + thread % 4 * 2);
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 row = 0; row < 2; ++row) {
                acc[block][j * 4 + row * 2] += bias.x;
                acc[block][j * 4 + row * 2 + 1] += bias.y;
            }
        }
    }
}

// The same of a swap-AB tile: acc[block][4 j + i] is column thread / 4 mod 8 of the warp's sixteen
// of the block, plus 8 for i >= 2. It has several rows.
template <class C>
__device__ __forceinline__ void add_bias_swapped(const Params& p, const WorkItem& item, u32 consumer, u32 thread,
                                                float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first = C::kSplitColumns ? consumer * C::kCols : 0, within = thread % 32 / 4;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 eight = first + block * 64 + thread / 32 * 16 + half * 8;
            if (eight >= item.cols) continue;
            const float2 pair = bias_pair<C::kBf16>(p, item.col + eight + within / 2 * 2);
            const float bias = within % 2 == 0 ? pair.x : pair.y;
#pragma unroll
            for (u32 j = 0; j < C::kWgmmaN / 8; ++j) {
                acc[block][j * 4 + half * 2] += bias;
                acc[block][j * 4 + half * 2 + 1] += bias;
            }
        }
    }
}

// Applies the epilogue to one thread's accumulators of item `i`. The item's columns are loaded only
// here: kept through the mainloop they would cost a register of every tile.
template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, u32 i, u32 consumer, u32 thread,
                                            float (&acc)[C::kBlocks][C::kAccumulators]) {
    if (p.bias != 0) {
        if constexpr (C::kSwapAB) {
            add_bias_swapped<C>(p, load_item(p, i), consumer, thread, acc);
        } else {
            add_bias<C>(p, load_item(p, i), consumer, thread, acc);
        }
    }
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 at = 0; at < C::kAccumulators; ++at) acc[block][at] = activate<C::kActivation>(acc[block][at]);
    }
}

}  // namespace flux
