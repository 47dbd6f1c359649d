// The producers: two warps that keep the ring of stages full by asynchronous copies, and await
// peers' rows.
//
// A stage holds kTileM rows of A, then kTileN rows of B, of 128 bytes each. The 16-byte chunks of a
// row change places by the row's number, so that eight rows of a chunk meet different banks.

#pragma once
#include "common/shards.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "common/weights.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "sm80/config.cuh"

namespace flux {

// This lane's part of an operand's rows of one item: a chunk of every eighth row.
struct Rows {
    u64 chunk;   // address of the lane's chunk of the item's first row, at step 0
    u64 stride;  // bytes between rows
    u32 last;    // last row that exists
    u32 most;    // bytes of a chunk that exist at most: none without rows
    u64 up = 0;  // of gated weights: bytes from a gate's row to its up's

    // Of `count` rows from `address` on.
    __device__ __forceinline__ static Rows of(u64 address, u64 stride, u32 count) {
        return {address + threadIdx.x % 8 * 16, stride, count == 0 ? 0 : count - 1, count == 0 ? 0u : 16u};
    }

    // Bytes from the first strip's rows to those of a strip of eight. Gated weights come as strips
    // of gates and of their ups in turn.
    template <bool Gated>
    __device__ __forceinline__ u64 strip_offset(u32 strip) const {
        return Gated ? strip / 2 * 8 * stride + strip % 2 * up : strip * 8 * stride;
    }

    // Copies `Count` rows of a step along k, in strips of eight. Rows that do not exist repeat the
    // last one: what they add to is never stored. Of no rows nothing is read.
    template <u32 Count, bool Whole, bool Gated = false>
    __device__ __forceinline__ void load(u32 dst, u32 step, u32 bytes) const {
        const u32 row = threadIdx.x % 64 / 8;
        const u32 to = dst + row * 128 + (threadIdx.x % 8 ^ row) * 16;
        const u64 src = chunk + step * u64{128};
        // Copied, or the offsets of all strips would be kept in registers through the item.
        const u64 from = ptx::copied_here(src + row * stride);
        const u32 end = ptx::copied_here(last);
        bytes &= most;
#pragma unroll
        for (u32 strip = 0; strip < Count / 8; ++strip) {
            if constexpr (Whole) {
                ptx::async_copy_16(to + strip * 1024, from + strip_offset<Gated>(strip), bytes);
            } else if constexpr (Gated) {
                // Strips are whole: the columns of w are a multiple of 16.
                ptx::async_copy_16(to + strip * 1024, from + strip_offset<Gated>(least(strip, end / 8)), bytes);
            } else {
                ptx::async_copy_16(to + strip * 1024, src + least(strip * 8 + row, end) * stride, bytes);
            }
        }
    }
};

template <class C>
struct Producer {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    RingState<C::kStages> ring;
    Rows a{}, b{};
    bool whole = false;  // whether the item's tile is

    __device__ __forceinline__ void run(const Walk& walk) {
        // The await list of the last item that had one: many tiles share a list, and its signals
        // stay raised.
        u32 seen_first = kNone, seen_count = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            const bool passes = C::kScatters && item.sink == static_cast<u32>(Sink::kReduceRows);
            // Only a time line has what the producer passes by.
            if (passes && !traces(p)) return;
            mark(i, &ItemStamps::opened);
            if (passes) {
                mark(i, &ItemStamps::rows_there);
                mark(i, &ItemStamps::loaded);
                continue;
            }
            a = Rows::of(a_address(item), a_stride(item), item.rows);
            if constexpr (C::kWeightsKn) {
                // This thread's chunk of the first row, and the item's columns.
                b = {weights().w + (item.col + threadIdx.x % 64 / 8 * 16 + threadIdx.x % 2 * 8) * u64{C::Operand::kBytes}, 0, item.cols, 0};
            } else if constexpr (C::kGated) {
                const u64 gate_bytes = p.gate_step * weights().w_row_bytes;
                b = Rows::of(weights().w + item.col / 2 * gate_bytes, gate_bytes, item.cols);
                b.up = p.up_offset * weights().w_row_bytes;
            } else {
                const Weight& weight = WeightOf<C>(p, item.col).operands();
                b = Rows::of(weight.w + item.col * weight.w_row_bytes, weight.w_row_bytes, item.cols);
            }
            whole = item.rows == C::kTileM && item.cols == C::kTileN;
            u32 step = item.k_first;
            const u32 end = step + item.k_steps;
            if constexpr (!C::kReduceScatter) {
                if (item.await_count != 0 && (item.await_first != seen_first || item.await_count != seen_count)) {
                    step = load_as_they_come(item, step, end);
                    seen_first = item.await_first;
                    seen_count = item.await_count;
                }
            }
            mark(i, &ItemStamps::rows_there);
            for (; step < end; ++step) load(step);
            mark(i, &ItemStamps::loaded);
        }
    }

private:
    // Those that come alone.
    __device__ __forceinline__ const Weight& weights() const { return p.weights[0]; }

    __device__ __forceinline__ u64 a_address(const WorkItem& item) const {
        if (item.a_source == static_cast<u32>(RowSource::kGather)) {
            return half_of(p, p.data[p.rank], epoch) + item.a_outer * p.shard_slot_bytes + item.row * p.row_bytes;
        }
        return p.x + (first_row_of_shard(p, item.a_outer) + item.row) * p.x_row_bytes;
    }

    __device__ __forceinline__ u64 a_stride(const WorkItem& item) const {
        return item.a_source == static_cast<u32>(RowSource::kGather) ? p.row_bytes : p.x_row_bytes;
    }

    // Bytes of this lane's chunk that exist at a step; the last step may have fewer chunks.
    __device__ __forceinline__ u32 chunk_bytes(u32 step) const { return step * C::kTileK + threadIdx.x % 8 * C::Operand::kPerVector < p.k_local ? 16 : 0; }

    __device__ __forceinline__ void load_a(u32 stage, u32 step) const {
        const u32 bytes = chunk_bytes(step);
        if (whole) {
            a.load<C::kTileM, true>(smem.a(stage), step, bytes);
        } else {
            a.load<C::kTileM, false>(smem.a(stage), step, bytes);
        }
    }

    __device__ __forceinline__ void load_b(u32 stage, u32 step) const {
        if constexpr (C::kWeightsKn) {
            load_weights_kn(stage, step);
            return;
        }
        const u32 bytes = chunk_bytes(step);
        if (whole) {
            b.load<C::kTileN, true, C::kGated>(smem.b(stage), step, bytes);
        } else {
            b.load<C::kTileN, false, C::kGated>(smem.b(stage), step, bytes);
        }
    }

    // Copies a step of weights of [k, n], with zeros for rows and columns that do not exist. A warp
    // copies whole lines of four rows.
    __device__ __forceinline__ void load_weights_kn(u32 stage, u32 step) const {
        const u32 chunk = threadIdx.x % 2, row = threadIdx.x / 2 % 4, strip = threadIdx.x % 64 / 8;
        const u32 to = smem.b(stage) + strip * C::kWeightStripBytes + row * 32, first = step * C::kTileK + row;
        const u64 from = ptx::copied_here(b.chunk + first * weights().w_row_bytes);
        const u32 cols = ptx::copied_here(b.last);
#pragma unroll
        for (u32 col = 0; col < C::kTileN; col += 128) {
            const bool there = col + strip * 16 + chunk * 8 < cols;
#pragma unroll
            for (u32 rows = 0; rows < C::kTileK; rows += 4) {
                const bool exists = there && first + rows < p.k_local;
                ptx::async_copy_16(to + col / 16 * C::kWeightStripBytes + rows * 32 + (chunk ^ rows / 4 % 2) * 16,
                                   exists ? from + rows * weights().w_row_bytes + col * C::Operand::kBytes : weights().w, exists ? 16 : 0);
            }
        }
    }

    __device__ __forceinline__ void load(u32 step) {
        ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        load_b(ring.stage, step);
        load_a(ring.stage, step);
        ptx::async_copies_arrive(smem.full(ring.stage));
        ring.advance();
    }

    // Groups of awaits of an item, each before one step along k, as its lanes await them.
    struct Awaits {
        u32 next, end, group;
        u32 step;  // of the next group, where there is one

        __device__ __forceinline__ void look(const Params& p) {
            if (next < end) step = p.awaits[next].k_step;
        }

        // Whether a group is due before `at`.
        __device__ __forceinline__ bool due(u32 at) const { return next < end && step <= at; }

        __device__ __forceinline__ void pass(const Params& p) {
            next += group;
            look(p);
        }
    };

    // Whether the signals of the next group are raised; polls each once.
    __device__ __forceinline__ bool raised(const Awaits& awaits) const {
        bool all = true;
        for (u32 n = threadIdx.x % 32; n < awaits.group; n += 32) {
            all = all && ptx::load_acquire_sys(await_target(p, epoch, awaits.next + n).word) == epoch;
        }
        // What one lane has acquired, all have.
        all = __all_sync(0xFFFFFFFFu, all);
        __syncwarp();
        return all;
    }

    // After a failed wait the rows are garbage within bounds: the tile is computed and the call
    // reported as failed.
    __device__ __forceinline__ void await(Awaits& awaits) const {
        for (u32 n = threadIdx.x % 32; n < awaits.group; n += 32) wait_for(p, epoch, await_target(p, epoch, awaits.next + n));
        __syncwarp();
        pass(awaits);
    }

    // Passes a group whose signals all lanes have acquired.
    __device__ __forceinline__ void pass(Awaits& awaits) const {
        awaits.pass(p);
        if constexpr (C::kScalesSums || C::kScalesBlocks) {
            if (threadIdx.x % 32 == 0) ptx::store_release_cta_shared(smem.epoch(), epoch);
        }
    }

    // Loads steps whose rows of A have not arrived: first the weights of as many stages as the ring
    // holds, which need no signal, then the rows.
    __device__ __forceinline__ u32 load_awaited(Awaits& awaits, u32 step, u32 end) {
        const u32 ahead = least(end - step, C::kStages);
        RingState<C::kStages> start = ring;
        for (u32 s = step; s < step + ahead; ++s) {
            ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
            load_b(ring.stage, s);
            ring.advance();
        }
        for (u32 s = step; s < step + ahead; ++s) {
            while (awaits.due(s)) await(awaits);
            load_a(start.stage, s);
            ptx::async_copies_arrive(smem.full(start.stage));
            start.advance();
        }
        return step + ahead;
    }

    // Loads in order of arrival. Returns the step from which on all rows have arrived.
    __device__ __forceinline__ u32 load_as_they_come(const WorkItem& item, u32 step, u32 end) {
        Awaits awaits{item.await_first, item.await_first + item.await_count, item.await_group, 0};
        awaits.look(p);
        while (step < end && awaits.next < awaits.end) {
            if (!awaits.due(step)) {
                load(step++);
            } else if (raised(awaits)) {
                pass(awaits);
            } else {
                step = load_awaited(awaits, step, end);
            }
        }
        return step;
    }

    // One lane stamps for both warps.
    __device__ __forceinline__ void mark(u32 item, u64 ItemStamps::* phase) const {
        if (threadIdx.x % 64 == 0) stamp(p, item, phase);
    }
};

}  // namespace flux
