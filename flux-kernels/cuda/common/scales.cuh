// Where the scales of 8-bit operands lie: of rows of x, and of rows of w.

#pragma once
#include "common/weights.cuh"
#include "ptx/memory.cuh"

namespace flux {

// The scales of an item's rows of x from its `first_row` on.
template <class C>
struct RowScales {
    u64 at;    // of the first
    u64 row_bytes;
    u32 rows;  // that exist

    // Gathered rows have arrived, and carry their scales.
    template <class Smem>
    __device__ __forceinline__ RowScales(const Params& p, const Smem& smem, u32 epoch, const WorkItem& item, u32 first_row)
        : row_bytes(p.scale_x_row_bytes), rows(item.rows > first_row ? item.rows - first_row : 0) {
        const u32 short_shards = item.a_outer > p.full_shards ? item.a_outer - p.full_shards : 0;
        at = p.scale_x + (static_cast<u64>(item.a_outer) * p.m_shard - short_shards + item.row + first_row) * row_bytes;
        if constexpr (!C::kReduceScatter) {
            if (p.gathered_scales == 0 || item.a_source != static_cast<u32>(RowSource::kGather)) return;
            // Orders the rows' signals before the loads.
            smem.acquire_rows();
            const u64 half = half_of(p, p.data[p.rank], epoch);
            row_bytes = p.row_bytes;
            at = half + item.a_outer * p.shard_slot_bytes + (item.row + first_row) * row_bytes + p.gathered_scales;
        }
    }

    // Through L1: a cache line has the scales of many steps, and all warps ask for them. No line of
    // a gathered row is older than the row, as none is read before its signal is acquired. Rows
    // that do not exist have none.
    __device__ __forceinline__ float load(u32 row) const {
        if (row >= rows) return 0.0f;
        return __uint_as_float(ptx::load_global_4(at + row * row_bytes));
    }
};

// The row of w, as its weight counts them from column 0 of the items, of a tile's column.
template <class C>
__device__ __forceinline__ u32 row_of_w(const Params& p, u32 col) {
    if constexpr (!C::kGated) return col;
    return (col / 16 * 8 + col % 8) * p.gate_step + (col % 16 < 8 ? 0 : p.up_offset);
}

}  // namespace flux
