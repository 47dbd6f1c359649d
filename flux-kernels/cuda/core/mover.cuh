// A mover: one thread of every CTA that pushes pieces of the caller's shard into the peers' gather buffers, in the order of the program's
// transfers; the CTA that delivers the last pieces of a chunk raises its signal. It waits for nobody, so the waiting producers of the launch
// can rely on it; all CTAs share the work, so no multiprocessor is lost to it.
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
        u64 src, dst;
        u32 bytes;
    };

    // A span is what lies densely both here and there: a chunk where the caller's rows are as dense as the gather buffer's, else a row.
    __device__ __forceinline__ u32 pieces_per_span(const Transfer& t) const {
        const u64 span = p.x_row_bytes == p.row_bytes ? p.row_bytes * t.rows : p.row_bytes;
        return static_cast<u32>((span + C::kPieceBytes - 1) / C::kPieceBytes);
    }

    __device__ __forceinline__ Piece piece(const Transfer& t, u32 per_span, u32 i) const {
        const u64 span = p.x_row_bytes == p.row_bytes ? p.row_bytes * t.rows : p.row_bytes;
        const u64 row = t.row + i / per_span;
        const u64 offset = static_cast<u64>(i % per_span) * C::kPieceBytes;
        const u64 left = span - offset;
        const u64 place = p.data[t.dest] + (epoch & 1) * p.half_stride + t.place * p.place_bytes;
        return {p.x + row * p.x_row_bytes + offset, place + row * p.row_bytes + offset,
                left < C::kPieceBytes ? static_cast<u32>(left) : C::kPieceBytes};
    }

    __device__ __forceinline__ void load(const Piece& q, u32 ring) const {
        ptx::mbarrier_arrive_expect_tx(smem.moved(ring), q.bytes);
        ptx::bulk_load(smem.mover(ring), q.src, q.bytes, smem.moved(ring));
    }

    // `index` of `movers` CTAs.
    __device__ __forceinline__ void run(u32 index, u32 movers) const {
        constexpr u32 kAhead = C::kMoverRing / 2;  // loads in flight; as many stores may still be reading
        u32 ring = 0;                              // pieces begun in this call, over all transfers
        for (u32 n = 0; n < p.transfer_count; ++n) {
            // After a failed wait nothing more is sent: a peer may be gone, or already in a new communicator.
            if (poisoned(p)) break;
            const Transfer t = p.transfers[n];
            const u32 per_span = pieces_per_span(t);
            const u32 total = p.x_row_bytes == p.row_bytes ? per_span : per_span * t.rows;
            const u32 mine = total > index ? (total - index - 1) / movers + 1 : 0;
            for (u32 j = 0; j < mine && j < kAhead; ++j) load(piece(t, per_span, index + j * movers), ring + j);
            for (u32 j = 0; j < mine; ++j) {
                ptx::mbarrier_wait(smem.moved(ring + j), ((ring + j) / C::kMoverRing) & 1);
                const Piece q = piece(t, per_span, index + j * movers);
                ptx::bulk_store(q.dst, smem.mover(ring + j), q.bytes);
                ptx::bulk_commit();
                if (j + kAhead < mine) {
                    // The buffer about to be loaded was stored kRing - kAhead pieces ago: that store has read it.
                    ptx::bulk_wait_read<C::kMoverRing - kAhead - 1>();
                    load(piece(t, per_span, index + (j + kAhead) * movers), ring + j + kAhead);
                }
                // The first reader is in a hurry; for the others the link is kept free of bursts, which slow the GEMM's own loads.
                if (t.step > 1 && p.push_gap_ns != 0) ptx::sleep_ns(p.push_gap_ns);
            }
            ring += mine;
            ptx::bulk_wait<0>();
            raise(t, n, movers);
        }
    }

    __device__ __forceinline__ void raise(const Transfer& t, u32 n, u32 movers) const {
        // Orders this CTA's pieces, at the peer, before the count that lets another CTA announce them.
        ptx::fence_acq_rel_sys();
        if (ptx::atomic_inc_wrap(&p.control->counters[n], movers - 1) != movers - 1) return;
        // Orders the chunk's rows before its signal.
        ptx::store_release_sys(signal_word(p.pad[t.dest], t.raise), epoch);
    }
};

}  // namespace flux
