// A mover: one thread of every CTA that pushes pieces of the caller's shard into gather buffers, in the order of the program's transfers; the CTA
// that delivers the last pieces of a chunk raises its signals. Neighbouring transfers of the same rows to several ranks are made together: what is
// loaded once goes to all of them. It waits for nobody, so the waiting producers of the launch can rely on it; all CTAs share the work, so no
// multiprocessor is lost to it.
#pragma once
#include "core/config.cuh"
#include "core/wait.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

template <class C>
struct Mover {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;

    struct Piece {
        u64 src;
        u64 offset;  // in a place
        u32 bytes;
    };

    // A span is what lies densely both here and there: a chunk of whole rows where the caller's rows are as dense as the gather buffer's, else
    // what is moved of one row.
    struct Spans {
        u64 bytes;
        u32 count, pieces_each;
    };

    __device__ __forceinline__ Spans spans(const Transfer& t) const {
        const u64 part = t.cols * u64{2};
        const bool dense = part == p.row_bytes && p.x_row_bytes == p.row_bytes;
        const u64 bytes = dense ? part * t.rows : part;
        return {bytes, dense ? 1 : t.rows, static_cast<u32>((bytes + C::kPieceBytes - 1) / C::kPieceBytes)};
    }

    __device__ __forceinline__ Piece piece(const Transfer& t, const Spans& s, u32 i) const {
        const u64 row = t.row + i / s.pieces_each;
        const u64 in_span = static_cast<u64>(i % s.pieces_each) * C::kPieceBytes;
        const u64 left = s.bytes - in_span;
        const u64 in_row = t.col * u64{2} + in_span;
        return {p.x + row * p.x_row_bytes + in_row, row * p.row_bytes + in_row, left < C::kPieceBytes ? static_cast<u32>(left) : C::kPieceBytes};
    }

    __device__ __forceinline__ u64 place(const Transfer& t) const {
        return p.data[t.dest] + (epoch & 1) * p.half_stride + t.place * p.place_bytes;
    }

    __device__ __forceinline__ void load(const Piece& q, u32 ring) const {
        ptx::mbarrier_arrive_expect_tx(smem.moved(ring), q.bytes);
        ptx::bulk_load(smem.mover(ring), q.src, q.bytes, smem.moved(ring));
    }

    // How many transfers from `n` on move the same rows.
    __device__ __forceinline__ u32 together(u32 n, const Transfer& t) const {
        u32 count = 1;
        for (; n + count < p.transfer_count; ++count) {
            const Transfer& other = p.transfers[n + count];
            if (other.row != t.row || other.col != t.col || other.rows != t.rows || other.cols != t.cols) break;
        }
        return count;
    }

    // `index` of `movers` CTAs.
    __device__ __forceinline__ void run(u32 index, u32 movers) const {
        constexpr u32 kAhead = C::kMoverRing / 2;  // loads in flight; as many stores may still be reading
        u32 ring = 0;                              // pieces begun in this call, over all transfers
        for (u32 n = 0; n < p.transfer_count;) {
            // After a failed wait nothing more is sent: a peer may be gone, or already in a new communicator.
            if (poisoned(p)) break;
            const Transfer t = p.transfers[n];
            const u32 copies = together(n, t);
            const Spans s = spans(t);
            const u32 total = s.count * s.pieces_each;
            const u32 mine = total > index ? (total - index - 1) / movers + 1 : 0;
            for (u32 j = 0; j < mine && j < kAhead; ++j) load(piece(t, s, index + j * movers), ring + j);
            for (u32 j = 0; j < mine; ++j) {
                ptx::mbarrier_wait(smem.moved(ring + j), ((ring + j) / C::kMoverRing) & 1);
                const Piece q = piece(t, s, index + j * movers);
                for (u32 copy = 0; copy < copies; ++copy) {
                    ptx::bulk_store(place(p.transfers[n + copy]) + q.offset, smem.mover(ring + j), q.bytes);
                }
                ptx::bulk_commit();
                if (j + kAhead < mine) {
                    // The buffer about to be loaded was stored kRing - kAhead pieces ago: that store has read it.
                    ptx::bulk_wait_read<C::kMoverRing - kAhead - 1>();
                    load(piece(t, s, index + (j + kAhead) * movers), ring + j + kAhead);
                }
                // The first reader is in a hurry; for the others the link is kept free of bursts, which slow the GEMM's own loads.
                if (t.step > 1 && p.push_gap_ns != 0) ptx::sleep_ns(p.push_gap_ns);
            }
            ring += mine;
            ptx::bulk_wait<0>();
            raise(n, copies, movers);
            n += copies;
        }
    }

    __device__ __forceinline__ void raise(u32 n, u32 copies, u32 movers) const {
        // Orders this CTA's pieces, at the peers, before the count that lets another CTA announce them.
        ptx::fence_acq_rel_sys();
        if (ptx::atomic_inc_wrap(&p.control->counters[n], movers - 1) != movers - 1) return;
        for (u32 copy = 0; copy < copies; ++copy) {
            const Transfer& t = p.transfers[n + copy];
            // Orders the chunk's rows before its signal.
            ptx::store_release_sys(signal_word(p.pad[t.dest], t.raise), epoch);
        }
    }
};

}  // namespace flux
