// What a kernel is instantiated with, and its shared memory.

#pragma once
#include "common/walk.cuh"
#include "ptx/element.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

// `Numbers` of the variant's translation unit: flux-kernels/src/variant/hopper.rs computes and
// explains them.
template <class Numbers>
struct Config : Numbers {
    // Vectors of a thread's part of a piece; the last piece may be shorter.
    static constexpr __device__ u32 piece_vectors(u32 piece) { return least(Numbers::kPieceVectors, Numbers::kVectors - piece * Numbers::kPieceVectors); }
    static constexpr __device__ u32 piece_bytes_per_consumer(u32 piece) { return piece_vectors(piece) * 128 * 16; }
    static constexpr __device__ u32 split_k_piece_vectors(u32 piece) {
        return least(Numbers::kSplitKPieceVectors, Numbers::kSplitKVectors - piece * Numbers::kSplitKPieceVectors);
    }
};

// Addresses in the CTA's shared window.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + C::kBytesA; }
    // The staging buffer of a consumer's part of a tile.
    __device__ __forceinline__ u32 out(u32 consumer) const { return base + C::kOutOffset + (C::kStagingBuffers == 1 ? 0 : consumer) * C::kOutBytesPerConsumer; }
    // A consumer's part of a piece that is added during the mainloop.
    __device__ __forceinline__ u32 in_mainloop_piece(u32 place, u32 consumer) const {
        return base + C::kOutOffset + (place * C::kConsumers + consumer) * C::kPieceBytesPerConsumer;
    }
    // A row of the whole tile or of a part of it, where rows go to several owners.
    __device__ __forceinline__ u32 out_row(u32 row) const { return base + C::kOutOffset + row * C::kOutRowBytes; }
    // Completed when a stage is filled, by one arrival and its bytes.
    __device__ __forceinline__ u32 full(u32 stage) const { return base + C::kBarrierOffset + stage * 8; }
    // Completed when every consumer has read a stage.
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(C::kStages + stage); }
    // Completed when a consumer's 128 threads have written its part of an item.
    __device__ __forceinline__ u32 out_full(u32 consumer) const { return full(2 * C::kStages + consumer); }
    // Completed when the rows that a reduction reads have arrived.
    __device__ __forceinline__ u32 rows_ready() const { return full(2 * C::kStages + 2 * C::kConsumers); }
    // Completed when a part is back from global staging memory.
    __device__ __forceinline__ u32 staged_part_back() const { return full(2 * C::kStages + 2 * C::kConsumers + 1); }
    // Completed when a piece for the mainloop has arrived, of both consumers.
    __device__ __forceinline__ u32 in_mainloop_full(u32 piece) const { return full(2 * C::kStages + 2 * C::kConsumers + 2 + piece); }
    // Completed when every consumer has added it.
    __device__ __forceinline__ u32 in_mainloop_empty(u32 piece) const { return full(2 * C::kStages + 2 * C::kConsumers + 4 + piece); }
    // Completed when the signals of all copies of a CTA were seen.
    __device__ __forceinline__ u32 copied() const { return full(2 * C::kStages + 2 * C::kConsumers + 6); }
    // How far rows of A, or partial tiles, have arrived (`progress`), by the signal poller.
    __device__ __forceinline__ u32 arrived() const { return base + C::kArrivedOffset; }
    // Acquires the signals of gathered rows, which the poller has acquired before it stored the
    // word.
    __device__ __forceinline__ void acquire_rows() const { ptx::load_acquire_cta_shared(arrived()); }
    // Whether a consumer has dropped rows that it was to scatter. It shares `arrived`'s word:
    // programs that scatter await no partial tiles.
    __device__ __forceinline__ u32 dropped_rows() const { return arrived(); }
    // Items that the producer has opened, up to the last that awaits partial tiles or reduces rows.
    __device__ __forceinline__ u32 opened() const { return base + C::kOpenedOffset; }
    // Completed when a consumer may write its part of an item: its staging buffer is free.
    __device__ __forceinline__ u32 out_empty(u32 consumer) const { return full(2 * C::kStages + C::kConsumers + consumer); }
};

}  // namespace flux
