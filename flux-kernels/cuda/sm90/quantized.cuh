// How a tile leaves as E4M3: from the staging buffers, where it lies rounded, to the caller's y. So
// codes and scales are those of y in its 16-bit type.

#pragma once
#include "common/quantize.cuh"
#include "common/shards.cuh"
#include "common/weights.cuh"
#include "sm90/config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

template <class C>
struct QuantizedTile {
    // Vectors of a block of columns with a scale. As many lanes, from a multiple of it on, have one
    // block.
    static constexpr u32 kVectorsOfBlock = kScaleBlock / C::Output::kPerVector;
    // Whether a block is of both consumers, which then share all rows of both.
    static constexpr bool kJoins = C::kQuantizesBlocks && C::kOutCols % kScaleBlock != 0;
    static constexpr u32 kSharing = kJoins ? C::kConsumers : 1;
    static constexpr u32 kVectors = kSharing * C::kOutCols / C::Output::kPerVector;
    static_assert(!kJoins || C::kSplitColumns && C::kStagingBuffers == C::kConsumers, "both parts are staged");
    static_assert(!C::kQuantizesBlocks || kVectors % kVectorsOfBlock == 0, "lanes of a block have one row");

    const Params& p;
    const Shared<C>& smem;
    const u32 consumer, thread;

    // Stores the consumer's rows, which are staged and seen by its threads, or where consumers join
    // by all of theirs.
    __device__ __forceinline__ void store(const WorkItem& item) const {
        const Weight& weight = WeightOf<C>(p, item.col).operands();
        const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows, first_col = C::kSplitColumns && !kJoins ? consumer * C::kOutCols : 0;
        const u32 cols = item.cols / C::kColsPerOut;
        const u64 y = weight.y + (first_row_of_shard(p, item.out_outer) + item.row) * weight.y_row_bytes;
        float reciprocal = C::kQuantizesBlocks ? 0.0f : reciprocal_of(__uint_as_float(ptx::load_constant_4(p.y_scale)));
        // Not unrolled: it is bound by its stores.
#pragma unroll 1
        for (u32 v = (kJoins ? consumer * 128 : 0) + thread; v < C::kRows * kVectors; v += kSharing * 128) {
            const u32 row = first_row + v / kVectors, col = first_col + v % kVectors * C::Output::kPerVector;
            // The lanes of a block go on together: rows are whole blocks.
            if (row >= item.rows || col >= cols) continue;
            float eight[8];
            widen_8<typename C::Output>(ptx::load_shared_16(staged(v / kVectors, v % kVectors * C::Output::kPerVector)), eight);
            const u64 to = y + row * weight.y_row_bytes;
            const u32 y_col = item.col / C::kColsPerOut + col;
            if constexpr (C::kQuantizesBlocks) {
                const float scale = scale_of(most_of_lanes<kVectorsOfBlock>(most_of_8(eight), 0xFFFFu << (thread & 16)));
                reciprocal = reciprocal_of(scale);
                if (thread % kVectorsOfBlock == 0) ptx::store_global_4(to + weight.y_scales + y_col / kScaleBlock * 4, __float_as_uint(scale));
            }
            ptx::store_global_8(to + y_col, codes_of_8(eight, reciprocal));
        }
    }

private:
    // The address of eight columns of a row of the consumer's part, or of both parts. Boxes are
    // those of `write_boxes` and `write_boxes_swapped`.
    __device__ __forceinline__ u32 staged(u32 row, u32 col) const {
        constexpr u32 kChunks = C::kBoxRowBytes / 16;
        const u32 part = kJoins ? col / C::kOutCols : consumer;
        const u32 in_part = kJoins ? col % C::kOutCols : col, in_box = C::kSwapAB ? row : row % C::kBlockRows;
        const u32 box = (C::kSwapAB ? 0 : row / C::kBlockRows * C::kBoxes) + in_part / C::kBoxCols;
        const u32 chunk = in_part % C::kBoxCols / C::Output::kPerVector ^ in_box * C::kBoxRowBytes / 128 % kChunks;
        return smem.out(part) + box * C::kBoxBytes + in_box * C::kBoxRowBytes + chunk * 16;
    }
};

}  // namespace flux
