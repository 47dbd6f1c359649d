// The sum over ranks of rows that were scattered: every rank's rounded partial sums lie row by row
// at the owner, [W, m_shard, n], and are added in rank order, in fp32, and rounded once.
#pragma once
#include "core/config.cuh"
#include "core/epilogue.cuh"
#include "core/wait.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

template <class C>
__device__ __forceinline__ void add_vector(const uint4& four, float (&sum)[8]) {
    const u32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float lo, hi;
        ptx::unpack_2<C::kBf16>(pairs[i], lo, hi);
        sum[2 * i] += lo;
        sum[2 * i + 1] += hi;
    }
}

// Where a thread's eight columns of a fold lie.
struct RowPlace {
    u64 row;
    u32 col;
    bool there;

    __device__ __forceinline__ RowPlace(const WorkItem& item, u32 v)
        : row(item.row + v / (item.cols / 8)), col(item.col + v % (item.cols / 8) * 8), there(v < item.rows * (item.cols / 8)) {}
};

// With the bias, rounded, into the caller's y.
template <class C>
__device__ __forceinline__ void store_sum(const Params& p, const RowPlace& at, float (&sum)[8]) {
    if (p.bias != 0) {
#pragma unroll
        for (u32 i = 0; i < 8; i += 2) {
            const float2 bias = bias_pair<C::kBf16>(p, at.col + i);
            sum[i] += bias.x;
            sum[i + 1] += bias.y;
        }
    }
    ptx::store_global_16(p.y_address + at.row * p.y_row_bytes + at.col * u64{2},
                         {ptx::pack_2<C::kBf16>(sum[0], sum[1]), ptx::pack_2<C::kBf16>(sum[2], sum[3]),
                          ptx::pack_2<C::kBf16>(sum[4], sum[5]), ptx::pack_2<C::kBf16>(sum[6], sum[7])});
}

// By the threads of both consumers, `thread` of 128 * kConsumers, once what they read has been
// awaited. Each loads what up to eight ranks have sent for two places before it adds any of it: one
// after the other each would take its way to memory.
template <class C>
__device__ __forceinline__ void reduce_rows(const Params& p, u32 epoch, const WorkItem& item, u32 thread) {
    constexpr u32 kThreads = 128 * C::kConsumers, kPlaces = 2, kSources = 8;
    const u64 source_bytes = static_cast<u64>(p.m_shard) * p.source_row_bytes;
    const u64 half = p.scatter_buffer + (epoch & 1) * p.half_stride;
    // From what others have scattered to what this rank has.
    const u64 to_own = p.data[p.rank] - p.scatter_buffer;
    for (u32 v = thread; v < item.rows * (item.cols / 8); v += kPlaces * kThreads) {
        const RowPlace places[kPlaces] = {{item, v}, {item, v + kThreads}};
        u64 at[kPlaces];
#pragma unroll
        for (u32 n = 0; n < kPlaces; ++n) at[n] = half + places[n].row * p.source_row_bytes + places[n].col * u64{2};
        float sums[kPlaces][8] = {};
#pragma unroll 1
        for (u32 first = 0; first < p.world; first += kSources) {
            uint4 sent[kSources][kPlaces] = {};
#pragma unroll
            for (u32 s = 0; s < kSources; ++s) {
#pragma unroll
                for (u32 n = 0; n < kPlaces; ++n) {
                    if (places[n].there && first + s < p.world) sent[s][n] = ptx::load_global_16(at[n] + (first + s == p.rank ? to_own : 0));
                    at[n] += source_bytes;
                }
            }
#pragma unroll
            for (u32 s = 0; s < kSources; ++s) {
                if (first + s >= p.world) break;
#pragma unroll
                for (u32 n = 0; n < kPlaces; ++n) add_vector<C>(sent[s][n], sums[n]);
            }
        }
#pragma unroll
        for (u32 n = 0; n < kPlaces; ++n) {
            if (places[n].there) store_sum<C>(p, places[n], sums[n]);
        }
    }
}

// What a lane awaits of a CTA's fold.
struct RowAwaits {
    u32 first, count;
    Await mine;  // of the first 32

    // Of item `i`. Several ways to memory, one after the other.
    __device__ __forceinline__ static RowAwaits of(const Params& p, u32 i) {
        const u32 lane = threadIdx.x % 32;
        RowAwaits f{p.items[i].late_first, p.items[i].late_count, {}};
        if (lane < f.count) f.mine = p.awaits[f.first + lane];
        return f;
    }
};

// Waits for what the CTA's folds read, from item `i` on, of which `ahead` is known, then lets its
// consumers go on; by a warp, whose lanes share the signals. Begun once the CTA's own tiles are
// sent, or loaded where they are sent by turns: earlier, the polls of all CTAs would hold up loads,
// and what they wait for is seldom there.
template <class C>
__device__ __forceinline__ void await_rows_to_reduce(const Params& p, const Shared<C>& smem, u32 epoch, const Walk& walk, u32 i, RowAwaits ahead) {
    const u32 lane = threadIdx.x % 32;
    for (;;) {
        // After a failed wait the sums are garbage, but in bounds: the call is reported as failed.
        for (u32 n = lane; n < ahead.count; n += 32) wait_for(p, epoch, await_target(p, epoch, n == lane ? ahead.mine : p.awaits[ahead.first + n]));
        if ((i += walk.stride) >= walk.count) break;
        ahead = RowAwaits::of(p, i);
    }
    // Orders what the other lanes have acquired before the arrival, which releases it to the
    // consumers.
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem.rows_ready());
}

}  // namespace flux
