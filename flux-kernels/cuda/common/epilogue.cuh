// The epilogue of an output's fp32 value, before its one rounding: y = act(v + bias + residual), or
// of gated columns y = act(gate + bias) * (up + bias).
//
// It runs where a sum is complete (a stored tile, an own tile after the peers' partials, reduced
// rows), never on a partial. Params say whether there is a bias or a residual, and which
// activation. A sum over ranks has none.

#pragma once
#include "common/weights.cuh"
#include "program.cuh"
#include "ptx/element.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Whether the item's sum is complete and goes to the caller's y.
template <class C>
__device__ __forceinline__ bool finishes(const WorkItem& item) {
    return item.sink == static_cast<u32>(Sink::kStore) || (C::kSendsPartials && item.sink == static_cast<u32>(Sink::kReduce));
}

constexpr float kLargestFloat = 3.402823466e38f;

// v / (1 + exp(negated)): v times the logistic function of -negated, without cancellation.
//
// expf is within 1 ulp and the division within 2 (CUDA C++ Programming Guide, "Mathematical
// Functions"). A denominator beyond 2^126 counts as infinite, which is off by less than 2^-126 |v|.
__device__ __forceinline__ float gate(float v, float negated) {
    return __fdividef(v, 1.0f + expf(negated));
}

// Of gated columns a thread has a gate and its up, eight columns apart. So many gates follow each
// other, before their ups: of a swap-AB tile pairs of rows, else both rows' pairs of columns.
template <class C>
constexpr u32 kAdjacentGates = C::kSwapAB ? 2 : 4;

template <class C>
constexpr __device__ bool is_gate(u32 at) { return at / kAdjacentGates<C> % 2 == 0; }

// Replaces a thread's accumulators, or of gated columns its gates, by `f` of them.
template <class C, class F>
__device__ __forceinline__ void replace_each(float (&acc)[C::kBlocks][C::kAccumulators], F f) {
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 at = 0; at < C::kAccumulators; ++at) {
            if (!C::kGated || is_gate<C>(at)) acc[block][at] = f(acc[block][at]);
        }
    }
}

// Applies the call's activation to a thread's accumulators, or of gated columns to its gates.
//
// GELU in its tanh form is 0.5 v (1 + tanh(h)) with h = sqrt(2 / pi) (v + 0.044715 v^3): Hendrycks
// and Gimpel, "Gaussian error linear units", arXiv 1606.08415. Its equal v / (1 + exp(-2 h)) is
// within 7 * 2^-24 |v| (flux-kernels/src/epilogue.rs derives it). SiLU is v / (1 + exp(-v)): Elfwing,
// Uchibe, Doya, "Sigmoid-weighted linear units", arXiv 1702.03118. Both are one polynomial in the
// exponent, so that the unrolled code has it once.
template <class C>
__device__ __forceinline__ void activate(const Params& p, float (&acc)[C::kBlocks][C::kAccumulators]) {
    static_assert(kCountOf<Activation> == 4, "an activation without a formula");
    const Activation activation = static_cast<Activation>(p.activation);
    if (activation == Activation::kNone) return;
    if (activation == Activation::kRelu) {
        // Not fmaxf, which would turn a NaN into zero.
        replace_each<C>(acc, [](float v) { return v < 0.0f ? 0.0f : v; });
        return;
    }
    const bool is_gelu = activation == Activation::kGelu;
    const float cubic = is_gelu ? -kGeluCubic : 0.0f, linear = is_gelu ? -kGeluLinear : -1.0f;
    // A finite square, as zero times infinity is none of SiLU's.
    replace_each<C>(acc, [&](float v) { return gate(v, v * fmaf(fminf(v * v, kLargestFloat), cubic, linear)); });
}

// Of `bias` the elements of columns `col`, which is even and within the operand, and `col + 1`.
template <class Element>
__device__ __forceinline__ float2 bias_pair(u64 bias, u32 col) {
    float2 pair;
    Element::unpack_2(ptx::load_constant_4(bias + static_cast<u64>(col) * Element::kBytes), pair.x, pair.y);
    return pair;
}

// Adds the bias to the accumulators of thread `thread` of 128, as wgmma leaves them: acc[block][4 j
// + i] is column 8 j + 2 (thread mod 4) + (i mod 2). Its row for i < 2 differs from that for i >=
// 2.
template <class C>
__device__ __forceinline__ void add_bias(const Params& p, const WorkItem& item, u32 consumer, u32 thread,
                                         float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first = C::kSplitColumns ? consumer * C::kCols : 0;
    const u64 all = WeightOf<C>(p, item.col).operands().bias;
#pragma unroll
    for (u32 j = 0; j < C::kCols / 8; ++j) {
        // Columns are a multiple of 8; memory may end behind the last.
        if (first + j * 8 >= item.cols) break;
        const float2 bias = bias_pair<typename C::Output>(all, item.col + first + j * 8 + thread % 4 * 2);
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
    const u64 all = WeightOf<C>(p, item.col).operands().bias;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u32 eight = first + block * 64 + thread / 32 * 16 + half * 8;
            if (eight >= item.cols) continue;
            const float2 pair = bias_pair<typename C::Output>(all, item.col + eight + within / 2 * 2);
            const float bias = within % 2 == 0 ? pair.x : pair.y;
#pragma unroll
            for (u32 j = 0; j < C::kWgmmaN / 8; ++j) {
                acc[block][j * 4 + half * 2] += bias;
                acc[block][j * 4 + half * 2 + 1] += bias;
            }
        }
    }
}

// The address of the bias of gate `col` of a tile's column, and the bytes from a gate's to the next
// and to its up's. Tiles hold eight gates, their eight ups, and so on.
template <class Element>
struct GatedBias {
    u64 at;
    u32 step, up;

    __device__ __forceinline__ GatedBias(const Params& p, u32 col)
        : at(p.weights[0].bias + static_cast<u64>(col / 16 * 8 + col % 8) * p.gate_step * Element::kBytes),
          step(p.gate_step * Element::kBytes),
          up(p.up_offset * Element::kBytes) {}

    // To the next sixteen columns. Copied, or the compiler would keep all addresses.
    __device__ __forceinline__ void advance() { at = ptx::copied_here(at) + 8 * step; }
};

// As `add_bias`, of gates and ups.
template <class C>
__device__ __forceinline__ void add_gated_bias(const Params& p, const WorkItem& item, u32 consumer, u32 thread,
                                               float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first = C::kSplitColumns ? consumer * C::kCols : 0;
    GatedBias<typename C::Output> bias(p, item.col + first + thread % 4 * 2);
#pragma unroll
    for (u32 j = 0; j < C::kCols / 8; j += 2, bias.advance()) {
        if (first + j * 8 >= item.cols) break;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u64 at = bias.at + half * bias.up;
            float lo, hi;
            C::Output::unpack_2(ptx::load_constant_2(at) | ptx::load_constant_2(at + bias.step) << 16, lo, hi);
#pragma unroll
            for (u32 n = 0; n < C::kBlocks * 2; ++n) {
                float* d = &acc[n / 2][(j + half) * 4 + n % 2 * 2];
                d[0] += lo;
                d[1] += hi;
                // Added before the next loads, which the compiler would make first.
                ptx::pin_register(d[0]);
                ptx::pin_register(d[1]);
            }
        }
    }
}

// As `add_bias_swapped`, of gates and ups: a thread has a column of each.
template <class C>
__device__ __forceinline__ void add_gated_bias_swapped(const Params& p, const WorkItem& item, u32 consumer, u32 thread,
                                                       float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first = (C::kSplitColumns ? consumer * C::kCols : 0) + thread / 32 * 16;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
        if (first + block * 64 >= item.cols) break;
        const GatedBias<typename C::Output> bias(p, item.col + first + block * 64 + thread % 32 / 4);
        float gate, up, unused;
        C::Output::unpack_2(ptx::load_constant_2(bias.at), gate, unused);
        C::Output::unpack_2(ptx::load_constant_2(bias.at + bias.up), up, unused);
#pragma unroll
        for (u32 at = 0; at < C::kAccumulators; ++at) acc[block][at] += at % 4 < 2 ? gate : up;
    }
}

// A vector of row `row` of y, as items count them, from the residual; zeros for a row that it
// does not have. Not loaded as a constant: the residual may be y itself.
template <class Element>
__device__ __forceinline__ uint4 residual_vector(const Params& p, u32 row, u32 col) {
    const u32 at = row - p.residual_first;
    if (at >= p.residual_rows) return {};
    return ptx::load_global_16(p.residual + at * p.residual_row_bytes + col * u64{Element::kBytes});
}

// Brings the residual of an item into L2 while the tile is multiplied. By a warp.
template <class Element>
__device__ __forceinline__ void prefetch_residual(const Params& p, const WorkItem& item, u32 lane) {
    const u32 lines = ceil_div(item.cols * Element::kBytes, 128);
    for (u32 n = lane; n < item.rows * lines; n += 32) {
        const u32 row = item.row + n / lines - p.residual_first;
        if (row < p.residual_rows) ptx::prefetch_line(p.residual + row * p.residual_row_bytes + item.col * u64{Element::kBytes} + n % lines * 128);
    }
}

// Adds the residual to the accumulators of thread `thread` of 128, or of a warp. `first_row` is the
// first of the consumer's rows in the tile. Accumulators are pairs of two columns, or of a swap-AB
// tile of two rows, whose words are transposed.
//
// Row by row, from an address that moves on: the compiler would keep all rows' addresses. Large
// tiles have registers for few loads at once.
template <class C>
__device__ __forceinline__ void add_residual(const Params& p, const WorkItem& item, u32 consumer, u32 thread, u32 first_row,
                                             float (&acc)[C::kBlocks][C::kAccumulators]) {
    // Of a thread: rows, and words of each.
    constexpr u32 kRows = C::kSwapAB ? C::kAccumulators / 4 : 2 * C::kBlocks, kWords = C::kBlocks * C::kAccumulators / 2 / kRows;
    constexpr u32 kLoads = kRows * kWords, kTogether = least(C::kResidualLoads, kLoads);
    const u32 warp = thread / 32;
    const u32 col = (C::kSplitColumns ? consumer * C::kCols : 0) + thread % 4 * 2 + (C::kSwapAB ? warp * 16 : 0);
    u32 row = item.row + first_row + thread % 32 / 4 + (C::kSwapAB ? 0 : warp * 16) - p.residual_first;
    // Rows before the residual's first have a negative number.
    u64 at = p.residual + static_cast<i64>(static_cast<i32>(row)) * static_cast<i64>(p.residual_row_bytes) + (item.col + col) * u64{C::Output::kBytes};
    const i32 cols = static_cast<i32>(item.cols) - static_cast<i32>(col);
#pragma unroll
    for (u32 n = 0; n < kLoads; n += kTogether) {
        u32 words[kTogether];
#pragma unroll
        for (u32 t = 0; t < kTogether; ++t) {
            if (n + t >= kLoads) break;
            const u32 r = (n + t) / kWords, w = (n + t) % kWords, cols_on = C::kSwapAB ? w / 2 * 64 + w % 2 * 8 : w * 8;
            words[t] = row < p.residual_rows && static_cast<i32>(cols_on) < cols ? ptx::load_global_4(at + cols_on * C::Output::kBytes) : 0;
            if (w + 1 < kWords) continue;
            const u32 on = C::kSwapAB || r % 2 == 0 ? 8 : C::kBlockRows - 8;
            row = ptx::copied_here(row) + on;
            at = ptx::copied_here(at) + on * p.residual_row_bytes;
        }
#pragma unroll
        for (u32 t = 0; t < kTogether; ++t) {
            if (n + t >= kLoads) break;
            const u32 r = (n + t) / kWords, w = (n + t) % kWords;
            float* d = C::kSwapAB ? &acc[w / 2][r * 4 + w % 2 * 2] : &acc[r / 2][w * 4 + r % 2 * 2];
            float lo, hi;
            C::Output::unpack_2(C::kSwapAB ? ptx::transpose_matrix(words[t]) : words[t], lo, hi);
            d[0] += lo;
            d[1] += hi;
            // Added before the next loads, which the compiler would make first.
            ptx::pin_register(d[0]);
            ptx::pin_register(d[1]);
        }
    }
}

// Element `at` of a thread's results in a block. Of gated columns results are half as many as
// accumulators. They are made where they are stored: large tiles have no registers for both.
template <class C>
__device__ __forceinline__ float result(const float (&acc)[C::kAccumulators], u32 at) {
    if constexpr (C::kGated) {
        const u32 gate = at / kAdjacentGates<C> * 2 * kAdjacentGates<C> + at % kAdjacentGates<C>;
        return acc[gate] * acc[gate + kAdjacentGates<C>];
    } else {
        return acc[at];
    }
}

// Applies the epilogue to one thread's accumulators of item `i`, but for ups: `result` multiplies
// gates with them. The item's columns are loaded only here: kept through the mainloop they would cost a
// register of every tile.
template <class C>
__device__ __forceinline__ void finish_tile(const Params& p, u32 i, u32 consumer, u32 thread, u32 first_row,
                                            float (&acc)[C::kBlocks][C::kAccumulators]) {
    if (p.weights[0].bias != 0) {
        if constexpr (C::kGated && C::kSwapAB) {
            add_gated_bias_swapped<C>(p, load_item(p, i), consumer, thread, acc);
        } else if constexpr (C::kGated) {
            add_gated_bias<C>(p, load_item(p, i), consumer, thread, acc);
        } else if constexpr (C::kSwapAB) {
            add_bias_swapped<C>(p, load_item(p, i), consumer, thread, acc);
        } else {
            add_bias<C>(p, load_item(p, i), consumer, thread, acc);
        }
    }
    if constexpr (C::kReduceScatter) {
        if (p.residual != 0) add_residual<C>(p, p.items[i], consumer, thread, first_row, acc);
    }
    if constexpr (!C::kReduceScatter) activate<C>(p, acc);
}

}  // namespace flux
