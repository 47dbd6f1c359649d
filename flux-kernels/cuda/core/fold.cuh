// The sum over ranks of rows that were scattered: every rank's rounded partial sums lie row by row at the owner, [W, m_shard, n], and are added in
// rank order, in fp32, and rounded once.
#pragma once
#include "core/config.cuh"
#include "core/epilogue.cuh"
#include "core/packets.cuh"
#include "core/wait.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// By the threads of both consumers, `thread` of 128 * kConsumers, once what they read has been awaited.
template <class C>
__device__ __forceinline__ void fold(const Params& p, u32 epoch, const WorkItem& item, u32 thread) {
    const u64 source_bytes = static_cast<u64>(p.m_shard) * p.source_row_bytes;
    const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
    const u32 per_row = item.cols / 8;
    for (u32 v = thread; v < item.rows * per_row; v += 128 * C::kConsumers) {
        const u64 row = item.row + v / per_row;
        const u64 col_bytes = (item.col + v % per_row * 8) * u64{2};
        const u64 src = half + row * p.source_row_bytes + col_bytes;
        float sum[8] = {};
#pragma unroll 4
        for (u32 source = 0; source < p.world; ++source) {
            const uint4 four = ptx::load_global_16(src + source * source_bytes);
            const u32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float lo, hi;
                ptx::unpack_2<C::kBf16>(pairs[i], lo, hi);
                sum[2 * i] += lo;
                sum[2 * i + 1] += hi;
            }
        }
        if (p.bias != 0) {
#pragma unroll
            for (u32 i = 0; i < 8; i += 2) {
                const float2 bias = bias_pair<C::kBf16>(p, item.col + v % per_row * 8 + i);
                sum[i] += bias.x;
                sum[i + 1] += bias.y;
            }
        }
        ptx::store_global_16(p.y_address + row * p.y_row_bytes + col_bytes,
                             {ptx::pack_2<C::kBf16>(sum[0], sum[1]), ptx::pack_2<C::kBf16>(sum[2], sum[3]),
                              ptx::pack_2<C::kBf16>(sum[4], sum[5]), ptx::pack_2<C::kBf16>(sum[6], sum[7])});
    }
}

// Where the packets of source `source` lie that hold four columns of a row of the own shard: rows as they were scattered, in packets.
__device__ __forceinline__ u64 scattered_pair(const Params& p, u32 owner, u32 epoch, u32 source, u32 row, u32 col) {
    return packet_pair(p, owner, epoch, (source * p.m_shard + row) * (p.source_row_bytes / 4) + col / 2);
}

// Who is missing where packets of a fold do not come. A fold's entries of the await list are ordered by source.
__device__ __forceinline__ WaitTarget scattered_by(const Params& p, u32 epoch, const WorkItem& item, u32 source) {
    const Await a = p.awaits[item.late_first + source * (item.late_count / p.world)];
    return {nullptr, epoch, FaultWait::kSignal, a.peer, a.signal, 0};
}

// The same sums of rows that came in packets, four columns at a time: most have come when the first have, and what has not is awaited here.
template <class C>
__device__ __forceinline__ void fold_packets(const Params& p, u32 epoch, const WorkItem& item, u32 thread) {
    constexpr u32 kBatch = 4;
    const u32 per_row = item.cols / 4;
    for (u32 v = thread; v < item.rows * per_row; v += 128 * C::kConsumers) {
        const u32 row = item.row + v / per_row, col = item.col + v % per_row * 4;
        float sum[4] = {};
        for (u32 first = 0; first < p.world; first += kBatch) {
            PacketPair seen[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                if (first + i < p.world) seen[i] = PacketPair::load(scattered_pair(p, p.rank, epoch, first + i, row, col));
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 source = first + i;
                if (source >= p.world) break;
                // After a failed wait the sum is garbage, but in bounds: the call is reported as failed.
                if (seen[i].reached(epoch) != epoch) {
                    wait_pair(p, epoch, scattered_pair(p, p.rank, epoch, source, row, col), scattered_by(p, epoch, item, source), seen[i]);
                }
                const uint2 payload = seen[i].payload();
                float lo, hi;
                ptx::unpack_2<C::kBf16>(payload.x, lo, hi);
                sum[0] += lo;
                sum[1] += hi;
                ptx::unpack_2<C::kBf16>(payload.y, lo, hi);
                sum[2] += lo;
                sum[3] += hi;
            }
        }
        if (p.bias != 0) {
#pragma unroll
            for (u32 i = 0; i < 4; i += 2) {
                const float2 bias = bias_pair<C::kBf16>(p, col + i);
                sum[i] += bias.x;
                sum[i + 1] += bias.y;
            }
        }
        ptx::store_global_8(p.y_address + row * p.y_row_bytes + col * u64{2},
                            {ptx::pack_2<C::kBf16>(sum[0], sum[1]), ptx::pack_2<C::kBf16>(sum[2], sum[3])});
    }
}

// Waits for what the CTA's folds read, from item `i` on, then lets its consumers go on; by a warp, whose lanes share the signals. Begun once the CTA's
// own tiles are sent: earlier, the polls of all CTAs would hold up loads, and what they wait for is seldom there.
template <class C>
__device__ __forceinline__ void await_folds(const Params& p, const Shared<C>& smem, u32 epoch, const Walk& walk, u32 i) {
    const u32 lane = threadIdx.x % 32;
    for (; i < walk.count; i += walk.stride) {
        const WorkItem item = load_item(p, i);
        // After a failed wait the sums are garbage, but in bounds: the call is reported as failed.
        if (p.packets == 0) {
            for (u32 n = lane; n < item.late_count; n += 32) await_late(p, epoch, item, n);
            continue;
        }
        // Looking for all packets would hold up the loads of CTAs that are not done, so for one in the last row of each source.
        for (u32 source = lane; source < p.world; source += 32) {
            const u64 at = scattered_pair(p, p.rank, epoch, source, item.row + item.rows - 1, item.col + item.cols - 4);
            PacketPair seen = PacketPair::load(at);
            wait_pair(p, epoch, at, scattered_by(p, epoch, item, source), seen);
        }
    }
    __syncwarp();
    if (lane != 0) return;
    // Orders what the other lanes have acquired before what the consumers read.
    ptx::fence_acq_rel_sys();
    ptx::mbarrier_arrive(smem.fold_ready());
}

}  // namespace flux
