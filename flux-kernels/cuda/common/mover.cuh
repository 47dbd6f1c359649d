// The mover: a warp of every CTA that pushes pieces of the caller's shard into peers' gather
// buffers, in the order of the program's transfers. The CTA that delivers a chunk's last piece
// raises its signals.
//
// Adjacent transfers of the same rows are made together: each piece is loaded once and stored to
// all. The bytes go through registers, because bulk copies would queue behind the operands' in the
// CTA's one copy unit. A mover waits for nobody, so waiting producers can rely on it. All CTAs
// share the work, so no multiprocessor is lost. Three warps push what every tile waits for, to
// overlap the round trips.

#pragma once
#include "common/walk.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// The transfers from `first` on, one for each lane of a warp.
__device__ __forceinline__ Transfer transfer_of_lane(const Params& p, u32 first) {
    const u32 at = first + threadIdx.x % 32;
    return p.transfers[at < p.transfer_count ? at : first];
}

template <class C>
struct Mover {
    static constexpr u32 kThreads = 32;
    static constexpr u32 kWarps = C::kMoverWarps;
    static constexpr u32 kVectors = kPushedBytes / (kThreads * 16);  // vectors of a piece in one thread

    const Params& p;
    const u32 epoch;
    const u32 thread;
    const u32 part;  // of kWarps where the signal poller's and the storer's warps help; else 0

    // What is dense both here and there: a chunk of whole rows, or the moved columns of one row.
    struct Spans {
        u32 bytes, count, pieces_each;
    };

    // Transfers of the same rows, this CTA's share of their pieces, and this lane's destination.
    struct Group {
        u32 first, copies, mine;
        u32 row, col_bytes, step;
        Spans spans;
        u32 to;  // destination rank, and in the upper half the shard slot there
        u32 raise;
    };

    struct Piece {
        u64 src;
        u64 offset;  // in a shard slot
        u32 bytes;
    };

    __device__ __forceinline__ Spans spans(u32 rows, u32 cols) const {
        const u32 part = cols * C::Operand::kBytes;
        const u64 whole = static_cast<u64>(part) * rows;
        const bool dense = part == p.row_bytes && p.x_row_bytes == p.row_bytes && whole < (u64{1} << 31);
        const u32 bytes = dense ? static_cast<u32>(whole) : part;
        return {bytes, dense ? 1 : rows, (bytes + kPushedBytes - 1) / kPushedBytes};
    }

    __device__ __forceinline__ u32 share(const Spans& s, u32 index, u32 movers) const {
        const u32 total = s.count * s.pieces_each;
        return total > index ? (total - index - 1) / movers + 1 : 0;
    }

    // By a whole warp, from the records of its lanes.
    __device__ __forceinline__ Group group(u32 first, const Transfer& t, u32 index, u32 movers) const {
        const u32 row = ptx::from_lane(t.row, 0), col = ptx::from_lane(t.col, 0), rows = ptx::from_lane(t.rows, 0), cols = ptx::from_lane(t.cols, 0);
        const bool there = first + thread < p.transfer_count;
        const bool same = there && t.row == row && t.col == col && t.rows == rows && t.cols == cols;
        const u32 others = __ballot_sync(0xFFFFFFFFu, !same);
        const u32 copies = others == 0 ? 32 : __ffs(others) - 1;
        const Spans s = spans(rows, cols);
        return {first, copies, share(s, index, movers), row, col * C::Operand::kBytes, ptx::from_lane(t.step, 0), s, t.dest | t.place << 16, t.raise};
    }

    __device__ __forceinline__ Piece piece(const Group& g, u32 i) const {
        const u64 row = g.row + i / g.spans.pieces_each;
        const u32 in_span = i % g.spans.pieces_each * kPushedBytes;
        const u32 left = g.spans.bytes - in_span;
        const u32 in_row = g.col_bytes + in_span;
        return {p.x + row * p.x_row_bytes + in_row, row * p.row_bytes + in_row, left < kPushedBytes ? left : kPushedBytes};
    }

    __device__ __forceinline__ void load(const Piece& q, uint4 (&v)[kVectors]) const {
#pragma unroll
        for (u32 i = 0; i < kVectors; ++i) {
            const u32 at = (i * kThreads + thread) * 16;
            if (at < q.bytes) v[i] = ptx::load_global_16(q.src + at);
        }
    }

    __device__ __forceinline__ void store(const Group& g, const Piece& q, const uint4 (&v)[kVectors]) const {
#pragma unroll 1
        for (u32 copy = 0; copy < g.copies; ++copy) {
            const u32 to = ptx::from_lane(g.to, copy);
            const u64 dst = half_of(p, p.data[to & 0xFFFF], epoch) + slot_offset(to >> 16) + q.offset;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                const u32 at = (i * kThreads + thread) * 16;
                if (at < q.bytes) ptx::store_global_16(dst + at, v[i]);
            }
        }
    }

    // Offset of a shard slot of a gather buffer.
    __device__ __forceinline__ u64 slot_offset(u32 slot) const {
        const u32 missing = slot > p.full_slots ? slot - p.full_slots : 0;
        return slot * p.shard_slot_bytes - missing * p.row_bytes;
    }

    // Prefetches into L2 this warp's first pieces of what all tiles wait for, and the chunk
    // counters. Assumes dense rows, before the transfers are known.
    __device__ __forceinline__ void ask_ahead(u32 index, u32 movers) const {
        if (!p.push_together || p.x_row_bytes != p.row_bytes) return;
        const u64 shard = p.own_rows * p.row_bytes;
        for (u32 j = part; j < 2 * kWarps; j += kWarps) {
            const u64 at = (index + static_cast<u64>(j) * movers) * kPushedBytes + thread * kLine;
            if (thread < kPushedBytes / kLine && at < shard) ptx::prefetch_line(p.x + at);
        }
        if (thread == 0) ptx::prefetch_line(reinterpret_cast<u64>(chunk_counter(p.control, 0)));
    }

    // Pushes all transfers; `transfer` is this lane's first record.
    __device__ __forceinline__ void run(u32 index, u32 movers, Transfer transfer) const {
#pragma unroll 1
        for (u32 first = 0; first < p.transfer_count;) {
            // After a failed wait nothing more is sent: a peer may be gone, or in a new
            // communicator. Loaded beside the first piece.
            const bool poison = poisoned(p);
            const Group g = group(first, transfer, index, movers);
            // All of these warps push what every tile waits for.
            const u32 parts = first == 0 && p.push_together ? kWarps : 1;
#pragma unroll 1
            for (u32 j = part; j < g.mine; j += parts) {
                const Piece q = piece(g, index + j * movers);
                uint4 v[kVectors];
                load(q, v);
                if (__all_sync(0xFFFFFFFFu, !poison)) store(g, q, v);
                if (thread == 0 && first == 0 && j == 0) stamp_worker(p, &WorkerStamps::push_begun);
                // The first reader waits for its rows. Later ones leave time for gaps, which keep
                // bursts off the link and so off the GEMM's own loads.
                if (g.step > 1 && p.gap_ns != 0) ptx::sleep_ns(p.gap_ns);
            }
            // A warp that sees the poison raises nothing, even with no piece of its own.
            bool live = __all_sync(0xFFFFFFFFu, !poison);
            if (parts == kWarps) {
                live = ptx::named_barrier_all<4, kWarps * kThreads>(live);
                if (part != 0) return;
            } else {
                __syncwarp();
            }
            if (live) raise(first, g.copies, g.to & 0xFFFF, g.raise, movers);
            first += g.copies;
            if (first < p.transfer_count) transfer = transfer_of_lane(p, first);
        }
    }

    // Counts this CTA's pieces; the last CTA raises the signals. By a whole warp, whose lanes know
    // one destination each.
    __device__ __forceinline__ void raise(u32 first, u32 copies, u32 dest, u32 raises, u32 movers) const {
        u32 last = 0;
        if (thread == 0) {
            // Orders this CTA's pieces, at the peers, before the count that lets another CTA raise
            // the signals.
            ptx::fence_acq_rel_sys();
            stamp_worker(p, first == 0 ? &WorkerStamps::first_delivered : &WorkerStamps::last_delivered);
            last = ptx::atomic_inc_wrap_relaxed(chunk_counter(p.control, first), movers - 1) == movers - 1;
        }
        if (ptx::from_lane(last, 0) == 0) return;
        // Orders the chunk's rows, acquired with the count, before the signals: one fence, for
        // which the first reader waits.
        if (thread == 0) ptx::fence_acq_rel_sys();
        for (u32 copy = 0; copy < copies; ++copy) {
            const u32 to = ptx::from_lane(dest, copy), signal = ptx::from_lane(raises, copy);
            if (thread == 0) ptx::store_relaxed_sys(signal_word(p.pad[to], signal, epoch), epoch);
        }
    }
};

}  // namespace flux
