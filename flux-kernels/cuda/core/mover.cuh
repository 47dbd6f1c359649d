// A mover: two warps of every CTA that push pieces of the caller's shard into gather buffers, in the order of the program's transfers; the CTA that
// delivers the last pieces of a chunk raises its signals. Neighbouring transfers of the same rows to several ranks are made together: what is loaded
// once goes to all of them. The bytes go through registers: bulk copies would queue behind the operands' in the CTA's one copy unit. A mover waits
// for nobody, so the waiting producers of the launch can rely on it; all CTAs share the work, so no multiprocessor is lost to it.
#pragma once
#include "core/config.cuh"
#include "core/wait.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

template <class C>
struct Mover {
    static constexpr u32 kThreads = 64;
    static constexpr u32 kVectors = C::kPieceBytes / 16 / kThreads;  // of a piece, in one thread

    const Params& p;
    const u32 epoch;
    const u32 thread;

    // A span is what lies densely both here and there: a chunk of whole rows where the caller's rows are as dense as the gather buffer's, else
    // what is moved of one row.
    struct Spans {
        u32 bytes, count, pieces_each;
    };

    // Transfers of the same rows, and this CTA's share of their pieces.
    struct Group {
        u32 first, copies, mine;
        u32 row, col_bytes, step;
        Spans spans;
    };

    struct Piece {
        u64 src;
        u64 offset;  // in a place
        u32 bytes;
    };

    __device__ __forceinline__ Spans spans(const Transfer& t) const {
        const u32 part = t.cols * 2;
        const u64 whole = static_cast<u64>(part) * t.rows;
        const bool dense = part == p.row_bytes && p.x_row_bytes == p.row_bytes && whole < (u64{1} << 31);
        const u32 bytes = dense ? static_cast<u32>(whole) : part;
        return {bytes, dense ? 1 : t.rows, (bytes + C::kPieceBytes - 1) / C::kPieceBytes};
    }

    __device__ __forceinline__ Group group(u32 first, u32 index, u32 movers) const {
        const Transfer t = p.transfers[first];
        Group g = {first, 1, 0, t.row, t.col * 2, t.step, spans(t)};
        for (; first + g.copies < p.transfer_count; ++g.copies) {
            const Transfer& other = p.transfers[first + g.copies];
            if (other.row != t.row || other.col != t.col || other.rows != t.rows || other.cols != t.cols) break;
        }
        const u32 total = g.spans.count * g.spans.pieces_each;
        if (total > index) g.mine = (total - index - 1) / movers + 1;
        return g;
    }

    __device__ __forceinline__ Piece piece(const Group& g, u32 i) const {
        const u64 row = g.row + i / g.spans.pieces_each;
        const u32 in_span = i % g.spans.pieces_each * C::kPieceBytes;
        const u32 left = g.spans.bytes - in_span;
        const u32 in_row = g.col_bytes + in_span;
        return {p.x + row * p.x_row_bytes + in_row, row * p.row_bytes + in_row, left < C::kPieceBytes ? left : C::kPieceBytes};
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
            const Transfer& t = p.transfers[g.first + copy];
            const u64 dst = p.data[t.dest] + (epoch & 1) * p.half_stride + t.place * p.place_bytes + q.offset;
#pragma unroll
            for (u32 i = 0; i < kVectors; ++i) {
                const u32 at = (i * kThreads + thread) * 16;
                if (at < q.bytes) ptx::store_global_16(dst + at, v[i]);
            }
        }
    }

    // `index` of `movers` CTAs.
    __device__ __forceinline__ void run(u32 index, u32 movers) const {
        if (p.transfer_count == 0) return;
        uint4 v[kVectors];
        Group g = group(0, index, movers);
        if (g.mine != 0) load(piece(g, index), v);
        for (;;) {
            // After a failed wait nothing more is sent: a peer may be gone, or already in a new communicator.
            const bool live = !poisoned(p);
            for (u32 j = 0; j < g.mine; ++j) {
                if (live) store(g, piece(g, index + j * movers), v);
                if (j + 1 < g.mine) load(piece(g, index + (j + 1) * movers), v);
                // The first reader is in a hurry; for the others the link is kept free of bursts, which slow the GEMM's own loads.
                if (g.step > 1 && p.push_gap_ns != 0) ptx::sleep_ns(p.push_gap_ns);
            }
            const u32 done = g.first, copies = g.copies, next = done + copies;
            const bool more = next < p.transfer_count;
            if (more) {
                // On their way while the stores are waited for.
                g = group(next, index, movers);
                if (g.mine != 0) load(piece(g, index), v);
            }
            ptx::named_barrier_sync<3, kThreads>();
            if (thread == 0 && live) raise(done, copies, movers);
            if (!more) return;
        }
    }

    __device__ __forceinline__ void raise(u32 first, u32 copies, u32 movers) const {
        // Orders this CTA's pieces, at the peers, before the count that lets another CTA announce them.
        ptx::fence_acq_rel_sys();
        if (ptx::atomic_inc_wrap(&p.control->counters[first], movers - 1) != movers - 1) return;
        for (u32 copy = 0; copy < copies; ++copy) {
            const Transfer& t = p.transfers[first + copy];
            // Orders the chunk's rows before its signal.
            ptx::store_release_sys(signal_word(p.pad[t.dest], t.raise), epoch);
        }
    }
};

}  // namespace flux
