// How a swap-AB tile leaves its accumulators, which hold its transpose: the matrix stores transpose
// it back.
//
// acc[block][4 j + i] of thread `thread` of 128 is row 8 j + 2 (thread mod 4) + (i mod 2) of the
// consumer. Its column is thread / 4 mod 8, plus 8 for i >= 2, of a warp's sixteen of the block's
// 64 (PTX ISA: wgmma, matrix fragments for m64nNk16).

#pragma once
#include "common/epilogue.cuh"
#include "sm90/config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Writes rounded accumulators. `place(row, col)` is the address in shared memory of eight columns
// of a row of the consumer's part.
template <class C, class Place>
__device__ __forceinline__ void write_swapped(u32 thread, const float (&acc)[C::kBlocks][C::kAccumulators], Place place) {
    const u32 warp = thread / 32, lane = thread % 32;
    // Of four 8x8 matrices the first two are eight rows of sixteen columns, the others the next
    // eight rows.
    const u32 row = lane / 16 * 8 + lane % 8, col = warp * 16 + lane / 8 % 2 * 8;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 j = 0; j < C::kWgmmaN / 8; j += 2) {
            const float* d = &acc[block][j * 4];
            const u32 left = C::Output::pack_2(d[0], d[1]), right = C::Output::pack_2(d[2], d[3]);
            if (j + 1 < C::kWgmmaN / 8) {
                ptx::store_matrix_x4_transposed(place(j * 8 + row, block * 64 + col), left, right, C::Output::pack_2(d[4], d[5]),
                                                C::Output::pack_2(d[6], d[7]));
            } else {
                // The last eight rows, whose addresses the first sixteen lanes give.
                ptx::store_matrix_x2_transposed(place(j * 8 + lane % 8, block * 64 + col), left, right);
            }
        }
    }
}

// As `write_swapped`, of gated columns. Result 2 j + i of a block is row 8 j + 2 (thread mod 4) + i.
// Its column is thread / 4 mod 8 of a warp's eight of the block's 32.
template <class C, class Place>
__device__ __forceinline__ void write_gated_swapped(u32 thread, const float (&acc)[C::kBlocks][C::kAccumulators], Place place) {
    constexpr u32 kEights = C::kWgmmaN / 8;
    const u32 warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
        const u32 col = block * C::kBlockCols + warp * 8;
#pragma unroll
        for (u32 j = 0; j < kEights; j += 4) {
            const auto eight = [&](u32 at) { return C::Output::pack_2(result<C>(acc[block], at * 2), result<C>(acc[block], at * 2 + 1)); };
            if (j + 3 < kEights) {
                ptx::store_matrix_x4_transposed(place(j * 8 + lane, col), eight(j), eight(j + 1), eight(j + 2), eight(j + 3));
                continue;
            }
            if (j + 1 < kEights) ptx::store_matrix_x2_transposed(place(j * 8 + lane % 16, col), eight(j), eight(j + 1));
            if ((kEights - j) % 2 == 1) ptx::store_matrix_x1_transposed(place((kEights - 1) * 8 + lane % 8, col), eight(kEights - 1));
        }
    }
}

// Writes boxes, each of a block's columns of all rows, with the swizzle that the tensor store
// undoes.
template <class C>
__device__ __forceinline__ void write_boxes_swapped(const Shared<C>& smem, u32 consumer, u32 thread, const float (&acc)[C::kBlocks][C::kAccumulators]) {
    static_assert(C::kBoxCols == C::kBlockCols, "lines of a block's columns");
    constexpr u32 kChunks = C::kBoxRowBytes / 16;
    const auto place = [&](u32 row, u32 col) {
        const u32 chunk = col % C::kBoxCols / C::Output::kPerVector ^ row * C::kBoxRowBytes / 128 % kChunks;
        return smem.out(consumer) + col / C::kBoxCols * C::kBoxBytes + row * C::kBoxRowBytes + chunk * 16;
    };
    if constexpr (C::kGated) {
        write_gated_swapped<C>(thread, acc, place);
    } else {
        write_swapped<C>(thread, acc, place);
    }
}

// Writes dense rows of the whole tile, for owners that take some of them.
template <class C>
__device__ __forceinline__ void write_rows_swapped(const Shared<C>& smem, u32 consumer, u32 thread, const float (&acc)[C::kBlocks][C::kAccumulators]) {
    const u32 first_row = C::kSplitColumns ? 0 : consumer * C::kRows;
    const u32 first_col = C::kSplitColumns ? consumer * C::kCols : 0;
    write_swapped<C>(thread, acc, [&](u32 row, u32 col) { return smem.out_row(first_row + row) + (first_col + col) * C::Output::kBytes; });
}

// Writes a part of the dense rows in fp32: consecutive rows of each consumer.
template <class C>
__device__ __forceinline__ void write_part_swapped(const Shared<C>& smem, u32 consumer, u32 thread, u32 part, const float (&acc)[C::kBlocks][C::kAccumulators]) {
    constexpr u32 kEights = C::kPartRows / 8;
    const u32 warp = thread / 32, lane = thread % 32;
    const u32 row = (C::kSplitColumns ? 0 : consumer * C::kPartRows) + lane % 4 * 2;
    const u32 col = (C::kSplitColumns ? consumer * C::kCols : 0) + warp * 16 + lane / 4;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 j = part * kEights; j < least((part + 1) * kEights, C::kWgmmaN / 8); ++j) {
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 to = smem.out_row(row + (j - part * kEights) * 8 + i % 2) + (col + block * 64 + i / 2 * 8) * 4;
                ptx::store_shared_4(to, ptx::copied_bits(acc[block][j * 4 + i]));
            }
        }
    }
}

}  // namespace flux
