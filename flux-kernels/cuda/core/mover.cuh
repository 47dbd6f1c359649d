// A mover: a CTA that pushes pieces of the caller's shard into the peers' gather buffers, in the order of the program's transfers, and raises
// the chunk's signal once all movers have delivered theirs. It waits for nobody, so the waiting workers of the launch can rely on it.
#pragma once
#include "core/config.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "core/wait.cuh"

namespace flux {

struct Mover {
    static constexpr u32 kPieceBytes = 16384;
    static constexpr u32 kRing = 8;      // pieces in shared memory
    static constexpr u32 kAhead = 4;     // loads in flight; as many stores are being read
    static constexpr u32 kSharedBytes = kRing * kPieceBytes + kRing * 8;

    const Params& p;
    const u32 base;  // shared memory
    const u32 epoch;
    const u32 index;  // which mover

    struct Piece {
        u64 src, dst;
        u32 bytes;
    };

    __device__ __forceinline__ u32 buffer(u32 i) const { return base + (i % kRing) * kPieceBytes; }
    __device__ __forceinline__ u32 full(u32 i) const { return base + kRing * kPieceBytes + (i % kRing) * 8; }

    // Pieces of a row, or of the whole chunk where the caller's rows are as dense as the gather buffer's.
    __device__ __forceinline__ Piece piece(const Transfer& t, u32 i) const {
        const bool dense = p.x_row_bytes == p.row_bytes;
        const u64 span = dense ? p.row_bytes * t.rows : p.row_bytes;
        const u32 per_span = static_cast<u32>((span + kPieceBytes - 1) / kPieceBytes);
        const u64 row = t.row + i / per_span;
        const u64 offset = static_cast<u64>(i % per_span) * kPieceBytes;
        const u64 left = span - offset;
        const u64 dst = p.data[t.dest] + (epoch & 1) * p.half_stride + t.place * p.place_bytes;
        return {p.x + row * p.x_row_bytes + offset, dst + row * p.row_bytes + offset,
                left < kPieceBytes ? static_cast<u32>(left) : kPieceBytes};
    }

    __device__ __forceinline__ u32 pieces(const Transfer& t) const {
        const bool dense = p.x_row_bytes == p.row_bytes;
        const u64 span = dense ? p.row_bytes * t.rows : p.row_bytes;
        return static_cast<u32>((span + kPieceBytes - 1) / kPieceBytes) * (dense ? 1 : t.rows);
    }

    __device__ __forceinline__ void load(const Transfer& t, u32 i, u32 ring) const {
        const Piece q = piece(t, i);
        ptx::mbarrier_arrive_expect_tx(full(ring), q.bytes);
        ptx::bulk_load(buffer(ring), q.src, q.bytes, full(ring));
    }

    __device__ __forceinline__ void run() {
        for (u32 i = 0; i < kRing; ++i) ptx::mbarrier_init(full(i), 1);
        ptx::fence_mbarrier_init();
        u32 ring = 0;  // pieces begun in this call, over all transfers
        for (u32 n = 0; n < p.transfer_count; ++n) {
            const Transfer t = p.transfers[n];
            const u32 total = pieces(t);
            const u32 mine = total > index ? (total - index - 1) / p.movers + 1 : 0;
            for (u32 j = 0; j < mine && j < kAhead; ++j) load(t, index + j * p.movers, ring + j);
            for (u32 j = 0; j < mine; ++j) {
                ptx::mbarrier_wait(full(ring + j), ((ring + j) / kRing) & 1);
                const Piece q = piece(t, index + j * p.movers);
                ptx::bulk_store(q.dst, buffer(ring + j), q.bytes);
                ptx::bulk_commit();
                if (j + kAhead < mine) {
                    // The buffer about to be loaded was stored kRing - kAhead pieces ago: that store has read it.
                    ptx::bulk_wait_read<kRing - kAhead - 1>();
                    load(t, index + (j + kAhead) * p.movers, ring + j + kAhead);
                }
            }
            ring += mine;
            ptx::bulk_wait<0>();
            raise(t, n);
        }
    }

    __device__ __forceinline__ void raise(const Transfer& t, u32 n) const {
        if (p.movers > 1) {
            // Orders this mover's pieces, at the peer, before the count that lets another mover announce them.
            ptx::fence_acq_rel_sys();
            if (ptx::atomic_inc_wrap(&p.control->counters[n], p.movers - 1) != p.movers - 1) return;
        }
        // Orders the chunk's rows before its signal.
        ptx::store_release_sys(signal_word(p.pad[t.dest], t.raise), epoch);
    }
};

}  // namespace flux
