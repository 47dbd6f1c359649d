// The partial tiles that other ranks have sent: where they lie, and how they come into shared memory, piece by piece.
#pragma once
#include "core/config.cuh"
#include "ptx/bulk.cuh"

namespace flux {

// The slot of an item's partial tile, in a half of the own data region.
template <class C>
__device__ __forceinline__ u64 partial_slot(const Params& p, u64 half, const WorkItem& item, u32 source) {
    return half + static_cast<u64>(item.partial_slot + source * p.slots_per_source) * C::kOutBytes;
}

// A piece of the tile in a slot, each consumer's part kPieceBytesPerConsumer bytes behind the one before; the barrier expects both.
template <class C>
__device__ __forceinline__ void load_piece(u64 slot, u32 piece, u32 to, u32 barrier) {
    for (u32 c = 0; c < C::kConsumers; ++c) {
        const u64 from = slot + c * C::kOutBytesPerConsumer + piece * C::kPieceBytesPerConsumer;
        ptx::bulk_load(to + c * C::kPieceBytesPerConsumer, from, C::piece_bytes_per_consumer(piece), barrier);
    }
}

}  // namespace flux
