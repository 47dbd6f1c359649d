// The partial tiles that other ranks have sent: where they lie, and how they come into shared
// memory, piece by piece.
//
// A slot holds both consumers' parts, one after the other, each as it lies in a room: vector v of
// thread t at (v * threads + t) * 16. Of a shard with fewer rows than a tile only those threads are
// there whose warps have rows, 16 of them each (`slot_bytes` of flux-core/src/layout.rs): what
// carries a slot need not carry rows that do not exist.
#pragma once
#include "core/config.cuh"
#include "ptx/bulk.cuh"

namespace flux {

template <class C>
struct Slot {
    // Where a warp's rows are of one block: those of two would leave the second's in the midst of
    // the first's vectors.
    static constexpr bool kMayBeShort = !C::kSwapAB && C::kBlocks == 1;
    static constexpr u32 kVectorBytes = 128 * 16;  // in a room

    const Params& p;

    __device__ __forceinline__ bool is_short() const { return kMayBeShort && p.m_shard < C::kTileM; }

    // Of a short one: the threads of a consumer that are there.
    __device__ __forceinline__ u32 threads(u32 consumer) const {
        const u32 warps = ceil_div(p.m_shard, 16), before = C::kSplitColumns ? 0 : 4 * consumer;
        return 32 * (warps <= before ? 0 : least(warps - before, 4));
    }

    __device__ __forceinline__ u32 bytes() const { return is_short() ? (threads(0) + threads(1)) * C::kVectors * 16 : C::kOutBytes; }

    // Where a consumer's part begins.
    __device__ __forceinline__ u32 part(u32 consumer) const {
        return consumer * (is_short() ? threads(0) * C::kVectors * 16 : C::kOutBytesPerConsumer);
    }

    // Of both consumers' parts.
    __device__ __forceinline__ u32 piece_bytes(u32 piece) const {
        return is_short() ? (threads(0) + threads(1)) * C::piece_vectors(piece) * 16 : C::kConsumers * C::piece_bytes_per_consumer(piece);
    }

    // The slot of an item's partial tile, in a half of the own data region.
    __device__ __forceinline__ u64 partial(u64 half, const WorkItem& item, u32 source) const {
        return half + static_cast<u64>(item.partial_slot + source * p.slots_per_source) * bytes();
    }

    // A piece of the tile in a slot, each consumer's part kPieceBytesPerConsumer bytes behind the
    // one before; the barrier expects both.
    __device__ __forceinline__ void load_piece(u64 slot, u32 piece, u32 to, u32 barrier) const {
        for (u32 c = 0; c < C::kConsumers; ++c) {
            const u64 from = slot + part(c);
            const u32 there = to + c * C::kPieceBytesPerConsumer;
            if (!is_short()) {
                ptx::bulk_load(there, from + piece * C::kPieceBytesPerConsumer, C::piece_bytes_per_consumer(piece), barrier);
                continue;
            }
            const u32 row = threads(c) * 16;
            if (row == 0) break;
#pragma unroll 1
            for (u32 v = 0; v < C::piece_vectors(piece); ++v) {
                ptx::bulk_load(there + v * kVectorBytes, from + (piece * C::kPieceVectors + v) * row, row, barrier);
            }
        }
    }

    // A consumer's part from its room to a slot; in pieces of kPieceBytes with gaps of so many
    // nanoseconds behind each, or without gaps.
    __device__ __forceinline__ void store(u64 slot, u32 staging, u32 consumer, u32 gap_ns) const {
        const u64 to = slot + part(consumer);
        if (is_short()) {
            store_short(to, staging, threads(consumer) * 16, gap_ns);
            return;
        }
        if (gap_ns == 0) {
            ptx::bulk_store(to, staging, C::kOutBytesPerConsumer);
            return;
        }
        for (u32 offset = 0; offset < C::kOutBytesPerConsumer; offset += C::kPieceBytes) {
            ptx::bulk_store(to + offset, staging + offset, least(C::kOutBytesPerConsumer - offset, C::kPieceBytes));
            ptx::bulk_commit();
            ptx::sleep_ns(gap_ns);
        }
    }

private:
    // Of so many bytes of each vector.
    __device__ __forceinline__ static void store_short(u64 to, u32 staging, u32 row, u32 gap_ns) {
        if (row == 0) return;
        u32 since = 0;
#pragma unroll 1
        for (u32 v = 0; v < C::kVectors; ++v) {
            ptx::bulk_store(to + v * row, staging + v * kVectorBytes, row);
            if (gap_ns == 0 || (since += row) < C::kPieceBytes) continue;
            since = 0;
            ptx::bulk_commit();
            ptx::sleep_ns(gap_ns);
        }
    }
};

}  // namespace flux
