// Where shards lie among all rows: the first full_shards have m_shard rows, the others one less.

#pragma once
#include "abi.cuh"

namespace flux {

// The rank that owns a row of all shards, and the row's number there.
struct RowOwner {
    u32 rank, row;

    template <class P>
    __device__ __forceinline__ RowOwner(const P& p, u32 of_all) {
        const u32 full = p.full_shards * p.m_shard;
        // Shards behind the full ones have one row less.
        const bool is_short = of_all >= full;
        const u32 behind = is_short ? of_all - full : of_all, rows = is_short ? p.m_shard - 1 : p.m_shard;
        rank = behind / rows + (is_short ? p.full_shards : 0);
        row = behind % rows;
    }
};

// The first of a shard's rows, of all.
__device__ __forceinline__ u64 first_row_of_shard(const Params& p, u32 shard) {
    return shard * static_cast<u64>(p.m_shard) - (shard > p.full_shards ? shard - p.full_shards : 0);
}

}  // namespace flux
