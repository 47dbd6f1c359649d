// Scales of 8-bit operands: a sum is multiplied by that of its row of x times that of its column.

#pragma once
#include "common/scales.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "sm80/config.cuh"
#include "sm80/output.cuh"

namespace flux {

// Multiplies an item's sums by scales that all steps along k have in common.
template <class C>
__device__ __forceinline__ void scale_sums(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, Accumulators<C>& acc) {
    const Part<C> part;
    const RowScales<C> rows(p, smem, epoch, item, part.row());
    const Weight& weight = WeightOf<C>(p, item.col).operands();
    float of_row[2 * C::kBlocks];
#pragma unroll
    for (u32 n = 0; n < 2 * C::kBlocks; ++n) of_row[n] = rows.load(n * 8 + part.lane / 4);
#pragma unroll
    for (u32 j = 0; j < C::kCols / 8; ++j) {
#pragma unroll
        for (u32 i = 0; i < 2; ++i) {
            const u32 col = part.col() + j * 8 + part.lane % 4 * 2 + i;
            // Columns that do not exist have none.
            if (col >= item.cols) continue;
            const float of_col = __uint_as_float(ptx::load_constant_4(weight.scale + row_of_w<C>(p, item.col + col) * weight.scale_row_bytes));
#pragma unroll
            for (u32 n = 0; n < 2 * C::kBlocks; ++n) acc[n / 2][j * 4 + n % 2 * 2 + i] *= of_col * of_row[n];
        }
    }
}

// Adds a step's sums as they are.
template <class C>
struct PlainSteps {
    template <class Item>
    __device__ __forceinline__ PlainSteps(const Params&, const Shared<C>&, Item) {}
    __device__ __forceinline__ void load() {}

    // Of pairs of n8 blocks from number `first` on.
    template <u32 N>
    __device__ __forceinline__ void add(u32 first, const float (&sums)[C::kBlocks][N], Accumulators<C>& acc) const {
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 at = 0; at < N; ++at) acc[block][first * 8 + at] += sums[block][at];
        }
    }
};

// Adds them with the scales of the step, which come while it is multiplied. Of the warp's rows of x
// a lane has row `lane + 32 q` in register q. The tile's columns are of one block of w, or with
// gates of a block of gates and one of ups.
//
// Rows that do not exist repeat the last one, as in a stage. Of an item without rows w's scales
// serve.
template <class C>
struct ScaledSteps {
    static constexpr u32 kRows = ceil_div(C::kRows, 32), kColumns = C::kGated ? 2 : 1;
    static_assert(kRows <= 2, "one distance between a lane's rows");

    const Shared<C>& smem;
    u64 at_x;      // of the step and this lane's first row
    u64 next = 0;  // bytes to its second row
    u64 at_w;      // of the step and the tile's columns
    u64 up = 0;    // bytes from gates to ups
    float x[kRows], w[kColumns];

    template <class Item>
    __device__ __forceinline__ ScaledSteps(const Params& p, const Shared<C>& smem, Item item) : smem(smem) {
        const Weight& weight = WeightOf<C>(p, item().col).operands();
        const u32 row = row_of_w<C>(p, item().col);
        at_w = weight.scale + row / kScaleBlock * weight.scale_row_bytes + item().k_first * 4;
        if constexpr (C::kGated) up = ((row + p.up_offset) / kScaleBlock - row / kScaleBlock) * weight.scale_row_bytes;
        const RowScales<C> rows(p, smem, static_cast<u32>(ptx::load_acquire_cta_shared(smem.epoch())), item(), 0);
        const u32 last = rows.rows - 1, first = Part<C>{}.row() + threadIdx.x % 32;
        at_x = rows.rows == 0 ? at_w : rows.at + least(first, last) * rows.row_bytes + item().k_first * 4;
        if (kRows == 2 && rows.rows != 0) next = (least(first + 32, last) - least(first, last)) * rows.row_bytes;
    }

    // The step's rows are there.
    __device__ __forceinline__ void load() {
        if constexpr (!C::kReduceScatter) smem.acquire_rows();
#pragma unroll
        for (u32 q = 0; q < kRows; ++q) x[q] = __uint_as_float(ptx::load_relaxed_sys(reinterpret_cast<const u32*>(at_x + q * next)));
#pragma unroll
        for (u32 q = 0; q < kColumns; ++q) w[q] = __uint_as_float(ptx::load_constant_4(at_w + q * up));
        at_x += 4;
        at_w += 4;
    }

    template <u32 N>
    __device__ __forceinline__ void add(u32 first, const float (&sums)[C::kBlocks][N], Accumulators<C>& acc) const {
        const u32 quad = threadIdx.x % 32 / 4;
#pragma unroll
        for (u32 n = 0; n < 2 * C::kBlocks; ++n) {
            const float row = __shfl_sync(0xFFFFFFFFu, x[n / 4], n % 4 * 8 + quad);
#pragma unroll
            for (u32 j = 0; j < N / 4; ++j) {
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    const u32 at = j * 4 + n % 2 * 2 + i;
                    acc[n / 2][first * 8 + at] += sums[n / 2][at] * (row * w[C::kGated ? j % 2 : 0]);
                }
            }
        }
    }
};

}  // namespace flux
