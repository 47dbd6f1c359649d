// Scatters staged rows of a tile to the ranks that own them: one, or with a mask all of its ranks.

#pragma once
#include "common/shards.cuh"
#include "common/walk.cuh"
#include "ptx/memory.cuh"

namespace flux {

// The row of a consumer that is the `staged`-th of a part.
template <class C>
__device__ __forceinline__ u32 row_of_part(u32 part, u32 staged) {
    if constexpr (C::kScatterParts == 1) {
        return staged;
    } else if constexpr (C::kSwapAB) {
        return part * C::kPartRows + staged;
    } else {
        return staged / 8 * 16 + part * 8 + staged % 8;
    }
}

// Scatters a part of a consumer's rows, row by row, to the own rank too. Rows are short, and a bulk
// copy of a short row takes about as long as of a long one. Not called after a failed wait: a peer
// may be gone, or in a new communicator.
template <class C>
struct Scatter {
    static constexpr u32 kCols = 16 / C::kPartialBytes;  // of a vector of 16 bytes
    static constexpr u32 kPerRow = C::kCols / kCols;
    static constexpr u32 kVectors = C::kPartRows * kPerRow;

    const Params& p;
    const Shared<C>& smem;
    const WorkItem& item;
    const u32 part, first_row, first_staged, first_col;
    const u64 place;  // of this rank's slot at each owner

    __device__ __forceinline__ Scatter(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, u32 consumer, u32 part)
        : p(p),
          smem(smem),
          item(item),
          part(part),
          first_row(C::kSplitColumns ? 0 : consumer * C::kRows),
          first_staged(C::kSplitColumns ? 0 : consumer * C::kPartRows),
          first_col(C::kSplitColumns ? consumer * C::kCols : 0),
          place((epoch & 1) * p.half_stride + static_cast<u64>(p.rank) * p.m_shard * p.source_row_bytes) {}

    __device__ __forceinline__ void store(u32 vector) const {
        const u32 staged = vector / kPerRow, of_consumer = row_of_part<C>(part, staged);
        const u32 row = first_row + of_consumer, col = first_col + vector % kPerRow * kCols;
        // The last part may have fewer rows.
        if (C::kRows % C::kPartRows != 0 && of_consumer >= C::kRows) return;
        if (row >= item.rows || col >= item.cols) return;
        const RowOwner owner(p, item.row + row);
        const u64 at = place + static_cast<u64>(owner.row) * p.source_row_bytes + (item.col + col) * u64{C::kPartialBytes};
        const uint4 values = ptx::load_shared_16(smem.out_row(first_staged + staged) + col * C::kPartialBytes);
        if (p.scatter_mask == 0) {
            ptx::store_global_16(p.data[owner.rank] + at, values);
            return;
        }
#pragma unroll 1
        for (u32 left = p.scatter_mask; left != 0; left &= left - 1) ptx::store_global_16(p.data[__ffs(left) - 1] + at, values);
    }
};

}  // namespace flux
