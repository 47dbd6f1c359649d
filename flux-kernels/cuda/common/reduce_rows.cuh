// The reduction of scattered rows: every rank's partial sums lie at the owner as [W, its rows, n],
// in the op's type or in fp32. They are added in rank order, in fp32, and rounded once.
//
// In two exchanges of a GEMM-AllReduce an owner has the rows of its shard, and stores the sums among
// the results of every peer, too.

#pragma once
#include "common/accumulate.cuh"
#include "common/epilogue.cuh"
#include "common/raise.cuh"
#include "common/shards.cuh"
#include "common/wait.cuh"
#include "common/walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// A rank's partial sums of a vector of outputs, as they were sent.
template <class C>
struct SentVector {
    static constexpr u32 kWords = C::kPartialBytes / C::Output::kBytes;
    uint4 words[kWords] = {};

    __device__ __forceinline__ void load(u64 at) {
#pragma unroll
        for (u32 i = 0; i < kWords; ++i) words[i] = ptx::load_global_16(at + i * 16);
    }

    __device__ __forceinline__ void add_to(float (&sum)[8]) const {
        if constexpr (C::kPartialsF32) {
            const u32 bits[8] = {words[0].x, words[0].y, words[0].z, words[0].w, words[1].x, words[1].y, words[1].z, words[1].w};
#pragma unroll
            for (u32 i = 0; i < 8; ++i) sum[i] += __uint_as_float(bits[i]);
        } else {
            add_eight<C>(words[0], sum);
        }
    }
};

// The place of a thread's vector of outputs.
template <class Element>
struct RowPlace {
    u64 row;
    u32 col;
    bool there;

    __device__ __forceinline__ RowPlace(const WorkItem& item, u32 v)
        : row(item.row + v / (item.cols / Element::kPerVector)),
          col(item.col + v % (item.cols / Element::kPerVector) * Element::kPerVector),
          there(v < item.rows * (item.cols / Element::kPerVector)) {}
};

// Whether the sums of a reduction also go to every peer.
__device__ __forceinline__ bool is_shared_sum(const WorkItem& item) { return item.raise != kNone; }

// Where sums are stored: the first row, of all, and the results of peers in their data regions, or
// 0 where the sums are the caller's alone.
struct SumPlace {
    u64 first_row, results;

    __device__ __forceinline__ SumPlace(const Params& p, u32 epoch, const WorkItem& item, bool live)
        : first_row(is_shared_sum(item) ? first_row_of_shard(p, p.rank) : 0),
          results(is_shared_sum(item) && live ? (epoch & 1) * p.half_stride + p.results_offset : 0) {}
};

// Adds the bias and the residual, rounds, and stores to the caller's y and the peers' results.
template <class C>
__device__ __forceinline__ void store_sum(const Params& p, const SumPlace& to, const RowPlace<typename C::Output>& at, const uint4& residual, float (&sum)[8]) {
    if (p.weights[0].bias != 0) {
#pragma unroll
        for (u32 i = 0; i < 8; i += 2) {
            const float2 bias = bias_pair<typename C::Output>(p.weights[0].bias, at.col + i);
            sum[i] += bias.x;
            sum[i + 1] += bias.y;
        }
    }
    if (p.residual != 0) add_eight<C>(residual, sum);
    const uint4 eight = {C::Output::pack_2(sum[0], sum[1]), C::Output::pack_2(sum[2], sum[3]),
                         C::Output::pack_2(sum[4], sum[5]), C::Output::pack_2(sum[6], sum[7])};
    const u64 row = to.first_row + at.row;
    ptx::store_global_16(p.weights[0].y + row * p.weights[0].y_row_bytes + at.col * u64{C::Output::kBytes}, eight);
    if (to.results == 0) return;
    const u64 result = to.results + row * p.result_row_bytes + at.col * u64{C::Output::kBytes};
#pragma unroll 1
    for (u32 step = 1; step < p.world; ++step) ptx::store_global_16(p.data[(p.rank + step) % p.world] + result, eight);
}

// Reduces an item's rows. By the threads of both consumers, `thread` of 128 * kConsumers, after the
// signals were awaited; `live` if no wait has failed. Loads of eight ranks, in fp32 of four, and of
// two places are issued together, to overlap their round trips.
template <class C>
__device__ __forceinline__ void reduce_rows(const Params& p, u32 epoch, const WorkItem& item, u32 thread, bool live) {
    constexpr u32 kThreads = 128 * C::kConsumers, kPlaces = 2, kSources = 16 / C::kPartialBytes;
    const u64 source_bytes = static_cast<u64>(p.m_shard) * p.source_row_bytes;
    const u64 half = p.scatter_buffer + (epoch & 1) * p.half_stride;
    const SumPlace to(p, epoch, item, live);
    // Offset from the buffer of peers' rows to the one of this rank's.
    const u64 to_own = p.data[p.rank] - p.scatter_buffer;
    for (u32 v = thread; v < item.rows * (item.cols / C::Output::kPerVector); v += kPlaces * kThreads) {
        const RowPlace<typename C::Output> places[kPlaces] = {{item, v}, {item, v + kThreads}};
        u64 at[kPlaces];
#pragma unroll
        for (u32 n = 0; n < kPlaces; ++n) at[n] = half + places[n].row * p.source_row_bytes + places[n].col * u64{C::kPartialBytes};
        float sums[kPlaces][8] = {};
        uint4 residual[kPlaces] = {};
        if (p.residual != 0) {
#pragma unroll
            for (u32 n = 0; n < kPlaces; ++n) {
                if (places[n].there) residual[n] = residual_vector<typename C::Output>(p, static_cast<u32>(places[n].row), places[n].col);
            }
        }
#pragma unroll 1
        for (u32 first = 0; first < p.world; first += kSources) {
            SentVector<C> sent[kSources][kPlaces];
#pragma unroll
            for (u32 s = 0; s < kSources; ++s) {
#pragma unroll
                for (u32 n = 0; n < kPlaces; ++n) {
                    if (places[n].there && first + s < p.world) sent[s][n].load(at[n] + (first + s == p.rank ? to_own : 0));
                    at[n] += source_bytes;
                }
            }
#pragma unroll
            for (u32 s = 0; s < kSources; ++s) {
                if (first + s >= p.world) break;
#pragma unroll
                for (u32 n = 0; n < kPlaces; ++n) sent[s][n].add_to(sums[n]);
            }
        }
#pragma unroll
        for (u32 n = 0; n < kPlaces; ++n) {
            if (places[n].there) store_sum<C>(p, to, places[n], residual[n], sums[n]);
        }
    }
}

// Raises the signal of shared sums at every peer. By all threads that have stored them, `thread` of
// 128 * kConsumers, at named barrier `kBarrier`.
template <class C, u32 kBarrier>
__device__ __forceinline__ void raise_shared_sum(const Params& p, u32 epoch, const WorkItem& item, u32 thread, bool live) {
    if (!is_shared_sum(item) || !live) return;
    // Gathers the threads' sums before the signal.
    ptx::named_barrier_sync<kBarrier, 128 * C::kConsumers>();
    raise_at_peers(p, epoch, item, thread);
}

// The signals that a lane awaits for a reduction.
struct RowAwaits {
    u32 first, count;
    Await mine;  // of the first 32

    // Of item `i`; several dependent loads.
    __device__ __forceinline__ static RowAwaits of(const Params& p, u32 i) {
        const u32 lane = threadIdx.x % 32;
        RowAwaits f{p.items[i].late_first, p.items[i].late_count, {}};
        if (lane < f.count) f.mine = p.awaits[f.first + lane];
        return f;
    }
};

// Waits for the signals of the CTA's reductions, from item `i` on, whose awaits are `ahead`, and
// then releases the consumers. By a warp, whose lanes share the signals. It begins after the CTA's
// own tiles: earlier, polls of all CTAs would hold up loads.
template <class C>
__device__ __forceinline__ void await_rows_to_reduce(const Params& p, const Shared<C>& smem, u32 epoch, const Walk& walk, u32 i, RowAwaits ahead) {
    const u32 lane = threadIdx.x % 32;
    for (;;) {
        // After a failed wait the sums are garbage within bounds: the call is reported as failed.
        for (u32 n = lane; n < ahead.count; n += 32) wait_for(p, epoch, await_target(p, epoch, n == lane ? ahead.mine : p.awaits[ahead.first + n]));
        if ((i += walk.stride) >= walk.count) break;
        ahead = RowAwaits::of(p, i);
    }
    // Orders what the other lanes have acquired before the arrival that releases the consumers.
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem.rows_ready());
}

}  // namespace flux
