// Scales of 8-bit operands: a sum is multiplied by that of its row of x times that of its column.
//
// A thread's sums lie along wgmma's m at few positions, whose scales it has in registers. Along n
// they lie at many, whose scales a warp has once: position `lane + 32 q` in register q of a lane.

#pragma once
#include "common/scales.cuh"
#include "sm90/config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Positions of a thread along m, and registers of a lane along n.
template <class C>
constexpr u32 kScalesOfM = 2 * C::kBlocks;
template <class C>
constexpr u32 kScalesOfN = ceil_div(C::kWgmmaN, 32);

// This thread's `at`-th position along m, and its `q`-th along n, in the consumer's part of a tile.
__device__ __forceinline__ u32 scale_of_m(u32 thread, u32 at) { return at / 2 * 64 + thread / 32 * 16 + at % 2 * 8 + thread % 32 / 4; }
__device__ __forceinline__ u32 scale_of_n(u32 thread, u32 q) { return thread % 32 + 32 * q; }

// Of column 8 j + 2 (thread mod 4) + i along n.
template <u32 N>
__device__ __forceinline__ float from_scales_of_n(const float (&scales)[N], u32 thread, u32 j, u32 i) {
    return __shfl_sync(0xFFFFFFFFu, scales[j / 4], j % 4 * 8 + thread % 4 * 2 + i);
}

// Multiplies an item's sums by scales that all steps along k have in common.
template <class C>
__device__ __forceinline__ void scale_sums(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, u32 consumer, u32 thread,
                                           float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows, first_col = C::kSplitColumns ? consumer * C::kCols : 0;
    const RowScales<C> rows(p, smem, epoch, item, first_row);
    const Weight& weight = WeightOf<C>(p, item.col).operands();
    const u32 cols = item.cols > first_col ? item.cols - first_col : 0;
    const auto of_col = [&](u32 col) {
        if (col >= cols) return 0.0f;
        return __uint_as_float(ptx::load_constant_4(weight.scale + row_of_w<C>(p, item.col + first_col + col) * weight.scale_row_bytes));
    };
    float of_m[kScalesOfM<C>], of_n[kScalesOfN<C>];
#pragma unroll
    for (u32 q = 0; q < kScalesOfN<C>; ++q) {
        const u32 at = scale_of_n(thread, q);
        of_n[q] = C::kSwapAB ? rows.load(at) : of_col(at);
    }
#pragma unroll
    for (u32 q = 0; q < kScalesOfM<C>; ++q) {
        const u32 at = scale_of_m(thread, q);
        of_m[q] = C::kSwapAB ? of_col(at) : rows.load(at);
    }
#pragma unroll
    for (u32 j = 0; j < C::kWgmmaN / 8; ++j) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const float n = from_scales_of_n(of_n, thread, j, i);
#pragma unroll
            for (u32 m = 0; m < kScalesOfM<C>; ++m) acc[m / 2][j * 4 + m % 2 * 2 + i] *= n * of_m[m];
        }
    }
}

// Adds a block's sums of a step as they are.
template <class C>
struct PlainSteps {
    __device__ __forceinline__ PlainSteps(const Params&, const Shared<C>&, u32, const WorkItem&, u32, u32) {}
    template <u32 Set>
    __device__ __forceinline__ void load(u32) {}
    template <u32 Set>
    __device__ __forceinline__ void add(u32, const float (&sums)[C::kAccumulators], float (&acc)[C::kAccumulators]) const {
#pragma unroll
        for (u32 at = 0; at < C::kAccumulators; ++at) acc[at] += sums[at];
    }
};

// Scales of steps along k: those of this thread's rows of x, and that of the tile's columns. These
// are of one block of w, or with gates of a block of gates and one of ups.
template <class C>
struct StepScales {
    static constexpr u32 kRows = C::kSwapAB ? kScalesOfN<C> : 2, kColumns = C::kGated ? 2 : 1;

    const u32 thread;
    RowScales<C> rows;  // of the step, from this thread's first row on: their addresses take no time between products
    u64 w, up = 0;      // the same of w, and bytes from gates to ups

    __device__ __forceinline__ StepScales(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, u32 consumer, u32 thread)
        : thread(thread), rows(p, smem, epoch, item, (C::kSplitColumns ? 0 : consumer * C::kRows) + (C::kSwapAB ? scale_of_n(thread, 0) : scale_of_m(thread, 0))) {
        const Weight& weight = WeightOf<C>(p, item.col).operands();
        const u32 row = row_of_w<C>(p, item.col);
        rows.at += item.k_first * 4;
        w = weight.scale + row / kScaleBlock * weight.scale_row_bytes + item.k_first * 4;
        if constexpr (C::kGated) up = ((row + p.up_offset) / kScaleBlock - row / kScaleBlock) * weight.scale_row_bytes;
    }

    __device__ __forceinline__ void load_rows(u32 block, float (&x)[kRows]) const {
#pragma unroll
        for (u32 q = 0; q < kRows; ++q) x[q] = rows.load(C::kSwapAB ? 32 * q : block * 64 + q * 8);
    }

    __device__ __forceinline__ void load_columns(float (&of_w)[kColumns]) const {
#pragma unroll
        for (u32 q = 0; q < kColumns; ++q) of_w[q] = __uint_as_float(ptx::load_constant_4(w + q * up));
    }

    __device__ __forceinline__ void advance() {
        rows.at += 4;
        w += 4;
    }

    __device__ __forceinline__ void add(const float (&x)[kRows], const float (&of_w)[kColumns], const float (&sums)[C::kAccumulators],
                                        float (&acc)[C::kAccumulators]) const {
#pragma unroll
        for (u32 j = 0; j < C::kWgmmaN / 8; ++j) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const float row = C::kSwapAB ? from_scales_of_n(x, thread, j, i % 2) : x[C::kSwapAB ? 0 : i / 2];
                const float col = of_w[C::kGated ? (C::kSwapAB ? i / 2 : j % 2) : 0];
                acc[j * 4 + i] += sums[j * 4 + i] * (row * col);
            }
        }
    }
};

// Adds a block's sums with scales that come while the block is multiplied. Steps in flight have
// scales of their own, of set 0 or 1.
template <class C>
struct ScaledSteps {
    StepScales<C> scales;
    float x[C::kStepsInFlight][StepScales<C>::kRows], of_w[C::kStepsInFlight][StepScales<C>::kColumns];

    template <class... Args>
    __device__ __forceinline__ ScaledSteps(const Args&... args) : scales(args...) {}

    // By all threads, for each block of a step in turn, when its products are issued: a load that is
    // on its way holds up the issue of products.
    template <u32 Set>
    __device__ __forceinline__ void load(u32 block) {
        if (block == 0 || !C::kSwapAB) scales.load_rows(block, x[Set]);
        if (block == 0) scales.load_columns(of_w[Set]);
        if (block + 1 == C::kBlocks) scales.advance();
    }

    template <u32 Set>
    __device__ __forceinline__ void add(u32, const float (&sums)[C::kAccumulators], float (&acc)[C::kAccumulators]) const {
        scales.add(x[Set], of_w[Set], sums, acc);
    }
};

// Adds them with scales that have the time of a whole step to come. Of consumers with several
// blocks: one block's sums are added as soon as its products are done, and its scales would be
// awaited.
template <class C>
struct ScaledStepsAhead {
    static_assert(!C::kSwapAB);

    StepScales<C> scales;  // of the step that is asked for
    u32 left;              // steps behind that one
    const u32 zero;        // which no compiler knows
    float x[C::kBlocks][StepScales<C>::kRows], of_w[StepScales<C>::kColumns];            // of the step that is added
    float next_x[C::kBlocks][StepScales<C>::kRows], next_of_w[StepScales<C>::kColumns];  // of the one behind it, on their way

    __device__ __forceinline__ ScaledStepsAhead(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, u32 consumer, u32 thread)
        : scales(p, smem, epoch, item, consumer, thread), left(item.k_steps - 1), zero(p.world >> 31) {
        load_next();
    }

    template <u32>
    __device__ __forceinline__ void load(u32) {}

    template <u32>
    __device__ __forceinline__ void add(u32 block, const float (&sums)[C::kAccumulators], float (&acc)[C::kAccumulators]) {
        if (block == 0) {
            take(sums[0]);
            load_next();
        }
        scales.add(x[block], of_w, sums, acc);
    }

private:
    // Behind the last step its scales come again.
    __device__ __forceinline__ void load_next() {
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) scales.load_rows(block, next_x[block]);
        scales.load_columns(next_of_w);
        if (left == 0) return;
        --left;
        scales.advance();
    }

    // Takes what has come, and not before a step's sum is there. A value that is awaited holds up
    // the issue of products, and compilers await it as early as they can.
    __device__ __forceinline__ void take(float sum) {
        const u32 nothing = __float_as_uint(sum) & zero;
        const auto behind = [&](float value) { return __uint_as_float(__float_as_uint(value) ^ nothing); };
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 q = 0; q < StepScales<C>::kRows; ++q) x[block][q] = behind(next_x[block][q]);
        }
#pragma unroll
        for (u32 q = 0; q < StepScales<C>::kColumns; ++q) of_w[q] = behind(next_of_w[q]);
    }
};

// How a consumer adds the promoted sums of its steps.
template <class C, bool ScalesBlocks, bool Ahead>
struct StepsOf {
    using Type = PlainSteps<C>;
};
template <class C>
struct StepsOf<C, true, false> {
    using Type = ScaledSteps<C>;
};
template <class C>
struct StepsOf<C, true, true> {
    using Type = ScaledStepsAhead<C>;
};

}  // namespace flux
