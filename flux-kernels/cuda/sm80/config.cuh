// What the portable kernel is instantiated with, and its shared memory.

#pragma once
#include "common/walk.cuh"
#include "ptx/element.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

// `Numbers` of the variant's translation unit: flux-kernels/src/variant/portable.rs computes and
// explains them.
template <class Numbers>
using Config = Numbers;

// Addresses in the CTA's shared window.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + C::kBytesA; }
    // Completed when the producer's copies have filled a stage.
    __device__ __forceinline__ u32 full(u32 stage) const { return base + C::kBarrierOffset + stage * 8; }
    // Completed when every consumer warp has read a stage.
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(C::kStages + stage); }
    // Completed when every consumer warp has stored what an item announces.
    __device__ __forceinline__ u32 stored() const { return full(2 * C::kStages); }
    // Completed when the signaller has seen it.
    __device__ __forceinline__ u32 announced() const { return full(2 * C::kStages + 1); }
    // Completed when the rows that a reduction reads have arrived.
    __device__ __forceinline__ u32 rows_ready() const { return full(2 * C::kStages + 2); }
    // Completed when the signals of all copies of a CTA were seen.
    __device__ __forceinline__ u32 copied() const { return full(2 * C::kStages + 3); }
    // How far what items add has arrived (`progress`), by the signaller.
    __device__ __forceinline__ u32 arrived() const { return base + C::kArrivedOffset; }
    // Items that the CTA has multiplied, where the last one adds split-K partials.
    __device__ __forceinline__ u32 multiplied() const { return arrived() + 8; }
    // The call's epoch, for the consumers. A producer stores it anew when it has acquired the
    // signals of rows that carry scales.
    __device__ __forceinline__ u32 epoch() const { return arrived() + 16; }
    // Acquires what the producer has.
    __device__ __forceinline__ void acquire_rows() const { ptx::load_acquire_cta_shared(epoch()); }
};

}  // namespace flux
