// Slots of peers' partial tiles: their layout, and how they are loaded and stored in pieces.
//
// A slot holds both consumers' parts, one after the other: vector v of thread t at (v * threads +
// t) * 16. Of a shard with fewer rows than a tile it holds only the threads of warps that have
// rows, 16 each (`slot_bytes` of flux-core/src/layout).

#pragma once
#include "sm90/config.cuh"
#include "ptx/bulk.cuh"

namespace flux {

// Global staging memory of this CTA, where a partial tile in fp32 waits, or a part of another. A
// paced send from shared memory would hold up the consumers.
template <class C>
__device__ __forceinline__ u64 global_staging(const Params& p) {
    return p.global_staging + static_cast<u64>(blockIdx.x) * C::kGlobalStagingBytes;
}

template <class C>
struct Slot {
    // Only where a warp's rows are of one block: a second block's would interleave with the
    // first's.
    static constexpr bool kMayBeShort = !C::kSwapAB && C::kBlocks == 1;
    static constexpr u32 kVectorBytes = 128 * 16;  // in a staging buffer

    const Params& p;

    __device__ __forceinline__ bool is_short() const { return kMayBeShort && p.m_shard < C::kTileM; }

    // Threads of a consumer in a short slot.
    __device__ __forceinline__ u32 threads(u32 consumer) const {
        const u32 warps = ceil_div(p.m_shard, 16), before = C::kSplitColumns ? 0 : 4 * consumer;
        return 32 * (warps <= before ? 0 : least(warps - before, 4));
    }

    __device__ __forceinline__ u32 bytes() const { return is_short() ? (threads(0) + threads(1)) * C::kVectors * 16 : C::kSlotBytes; }

    // Bytes of a vector of all of a consumer's threads.
    __device__ __forceinline__ u32 vector_bytes(u32 consumer) const { return is_short() ? threads(consumer) * 16 : kVectorBytes; }

    // Offset of a consumer's part.
    __device__ __forceinline__ u32 part(u32 consumer) const {
        return consumer * (is_short() ? threads(0) * C::kVectors * 16 : C::kSlotBytesPerConsumer);
    }

    // Bytes of a piece of both consumers.
    __device__ __forceinline__ u32 piece_bytes(u32 piece) const {
        return is_short() ? (threads(0) + threads(1)) * C::piece_vectors(piece) * 16 : C::kConsumers * C::piece_bytes_per_consumer(piece);
    }

    // Address of an item's partial tile from `source`, in a half of the own data region.
    __device__ __forceinline__ u64 partial(u64 half, const WorkItem& item, u32 source) const {
        return half + static_cast<u64>(item.partial_slot + source * p.slots_per_source) * bytes();
    }

    // Loads a piece; each consumer's part lies kPieceBytesPerConsumer behind the one before, and
    // the barrier expects both.
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

    // Stores a consumer's part from its staging buffer to a slot.
    __device__ __forceinline__ void store(u64 slot, u32 staging, u32 consumer, u32 gap_ns) const {
        const u64 to = slot + part(consumer);
        if (is_short()) {
            store_short(to, staging, threads(consumer) * 16, gap_ns);
        } else {
            store_paced(to, staging, C::kOutBytesPerConsumer, gap_ns);
        }
    }

    // Stores bytes in pieces of kSentBytes with gaps of `gap_ns` between them, or at once without
    // gaps.
    __device__ __forceinline__ static void store_paced(u64 to, u32 from, u32 bytes, u32 gap_ns) {
        if (gap_ns == 0) {
            ptx::bulk_store(to, from, bytes);
            return;
        }
        for (u32 offset = 0; offset < bytes; offset += kSentBytes) {
            ptx::bulk_store(to + offset, from + offset, least(bytes - offset, kSentBytes));
            ptx::bulk_commit();
            ptx::sleep_ns(gap_ns);
        }
    }

private:
    // Stores `row` bytes of each vector.
    __device__ __forceinline__ static void store_short(u64 to, u32 staging, u32 row, u32 gap_ns) {
        if (row == 0) return;
        u32 since = 0;
#pragma unroll 1
        for (u32 v = 0; v < C::kVectors; ++v) {
            ptx::bulk_store(to + v * row, staging + v * kVectorBytes, row);
            if (gap_ns == 0 || (since += row) < kSentBytes) continue;
            since = 0;
            ptx::bulk_commit();
            ptx::sleep_ns(gap_ns);
        }
    }
};

}  // namespace flux
