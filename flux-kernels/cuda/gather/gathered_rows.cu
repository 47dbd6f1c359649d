// Copies the gathered rows of a finished call. A CTA has one row.

#include "common/shards.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"

extern "C" __global__ void __launch_bounds__(512) flux_gathered_rows(const __grid_constant__ flux::GatheredRowsParams p) {
    using namespace flux;
    ptx::await_launch_ahead();
    ptx::let_next_launch_begin();
    const RowOwner owner(p, blockIdx.x);
    u64 from = p.x + owner.row * p.x_row_bytes;
    if (owner.rank != p.rank) {
        // The call has advanced the epoch. A graph replays with either half: the host cannot choose.
        const u32 half = (ptx::load_relaxed_gpu(reinterpret_cast<const u32*>(p.epoch)) - 1) % 2;
        const u64 place = owner.rank - (owner.rank > p.rank ? 1 : 0);
        const u64 row = p.flattened ? u64{blockIdx.x} : place * p.m_shard + owner.row;
        from = p.buffer + half * p.half_stride + row * p.row_bytes;
    }
    const uint4* row = reinterpret_cast<const uint4*>(from);
    const u64 out = p.out + blockIdx.x * p.out_row_bytes;
    for (u64 i = threadIdx.x; i < p.row_bytes / 16; i += blockDim.x) ptx::store_global_16(out + i * 16, ptx::load_finished_16(&row[i]));
}
