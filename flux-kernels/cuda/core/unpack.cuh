// The reader's side of what comes in packets before the rest of the shards: rows and columns that every tile begins with, taken out and laid into the
// gather buffer, where bulk loads find them.
//
// All CTAs share the work, a warp each, and the last of them raises the signals that the producers await. This waits for peers' movers, which wait for nobody.
#pragma once
#include "core/packets.cuh"
#include "core/trace.cuh"

namespace flux {

// Eight bytes of one arrival.
struct Unpacked {
    u64 from, to;
    u32 source, raise;
    bool own;
};

__device__ __forceinline__ Unpacked unpacked(const Params& p, u32 epoch, u32 index) {
    const u32 per_row = p.first_cols / 4, each = p.first_rows * per_row;
    const Arrival& arrival = p.arrivals[index / each];
    const u32 in_shard = index % each, row = p.first_row + in_shard / per_row, col_bytes = p.first_col * 2 + in_shard % per_row * 8;
    const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
    // What a rank would send itself it reads where it is.
    const bool own = arrival.source == p.rank;
    return {own ? p.x + row * p.x_row_bytes + col_bytes : packet_pair(p, p.rank, epoch, (arrival.source * each + in_shard) * 2),
            half + arrival.place * p.place_bytes + row * p.row_bytes + col_bytes, arrival.source, arrival.raise, own};
}

// By a warp of every CTA; after a failed wait nothing is announced.
__device__ __forceinline__ void unpack(const Params& p, u32 epoch, u32 lane) {
    constexpr u32 kBatch = 4;
    const u32 total = p.arrival_count * p.first_rows * (p.first_cols / 4);
    const u32 stride = gridDim.x * 32;
    bool ok = true;
    for (u32 first = blockIdx.x * 32 + lane; first < total && ok; first += kBatch * stride) {
        // All are asked for before the first is looked at.
        PacketPair seen[kBatch];
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 index = first + i * stride;
            if (index >= total) continue;
            const Unpacked u = unpacked(p, epoch, index);
            if (!u.own) seen[i] = PacketPair::load(u.from);
        }
#pragma unroll
        for (u32 i = 0; i < kBatch; ++i) {
            const u32 index = first + i * stride;
            if (index >= total || !ok) continue;
            const Unpacked u = unpacked(p, epoch, index);
            if (u.own) {
                ptx::store_global_8(u.to, ptx::load_global_8(u.from));
                continue;
            }
            ok = wait_pair(p, epoch, u.from, {nullptr, epoch, FaultWait::kSignal, u.source, u.raise, 0}, seen[i]);
            if (ok) ptx::store_global_8(u.to, seen[i].payload());
        }
    }
    const bool whole = __all_sync(0xFFFFFFFFu, ok);
    __syncwarp();
    u32 last = 0;
    if (lane == 0 && whole) {
        // Orders what this warp has stored before the count that lets another CTA announce it.
        ptx::fence_acq_rel_gpu();
        last = ptx::atomic_inc_wrap(&p.control->counters[0], gridDim.x - 1) == gridDim.x - 1;
    }
    if (ptx::from_lane(last, 0) == 0) return;
    // Orders the rows, acquired with the count, before their signals.
    ptx::fence_acq_rel_gpu();
    if (lane < p.arrival_count) ptx::store_relaxed_sys(signal_word(p.pad[p.rank], p.arrivals[lane].raise, epoch), epoch);
}

}  // namespace flux
