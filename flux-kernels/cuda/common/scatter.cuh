// Scatters staged rows of a tile to the ranks that own them: one, or with a mask all of its ranks.

#pragma once
#include "common/shards.cuh"
#include "common/walk.cuh"
#include "ptx/memory.cuh"

namespace flux {

// Scatters a consumer's part row by row, to the own rank too. Rows are short, and a bulk copy of a
// short row takes about as long as of a long one. Not called after a failed wait: a peer may be
// gone, or in a new communicator.
template <class C>
struct Scatter {
    static constexpr u32 kPerRow = C::kCols / 8;
    static constexpr u32 kVectors = C::kRows * kPerRow;  // of 16 bytes

    const Params& p;
    const Shared<C>& smem;
    const WorkItem& item;
    const u32 first_row, first_col;
    const u64 place;  // of this rank's slot at each owner

    __device__ __forceinline__ Scatter(const Params& p, const Shared<C>& smem, u32 epoch, const WorkItem& item, u32 consumer)
        : p(p),
          smem(smem),
          item(item),
          first_row(C::kSplitColumns ? 0 : consumer * C::kRows),
          first_col(C::kSplitColumns ? consumer * C::kCols : 0),
          place((epoch & 1) * p.half_stride + static_cast<u64>(p.rank) * p.m_shard * p.source_row_bytes) {}

    __device__ __forceinline__ void store(u32 vector) const {
        const u32 row = first_row + vector / kPerRow, col = first_col + vector % kPerRow * 8;
        if (row >= item.rows || col >= item.cols) return;
        const RowOwner owner(p, item.row + row);
        const u64 at = place + static_cast<u64>(owner.row) * p.source_row_bytes + (item.col + col) * u64{2};
        const uint4 eight = ptx::load_shared_16(smem.out_row(row) + col * 2);
        if (p.scatter_mask == 0) {
            ptx::store_global_16(p.data[owner.rank] + at, eight);
            return;
        }
#pragma unroll 1
        for (u32 left = p.scatter_mask; left != 0; left &= left - 1) ptx::store_global_16(p.data[__ffs(left) - 1] + at, eight);
    }
};

}  // namespace flux
