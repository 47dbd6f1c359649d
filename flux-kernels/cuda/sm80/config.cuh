// What the portable kernel is instantiated with, and the shared memory that follows from it.

#pragma once
#include "common/walk.cuh"

namespace flux {

template <u32 TileM, u32 TileN, u32 Stages, bool Bf16, bool ReduceScatter, bool PartialsF32, bool Gated, bool WeightsKn>
struct Config {
    static constexpr u32 kTileM = TileM;
    static constexpr u32 kTileN = TileN;
    static constexpr u32 kTileK = 64;  // one 128-byte swizzled row of 16-bit elements
    static constexpr u32 kStages = Stages;
    static constexpr bool kBf16 = Bf16;
    static constexpr bool kReduceScatter = ReduceScatter;
    // Partial sums leave for other ranks in fp32, not in the op's type.
    static constexpr bool kPartialsF32 = PartialsF32;
    static_assert(ReduceScatter || !PartialsF32, "nobody adds");
    static constexpr u32 kPartialBytes = PartialsF32 ? 4 : 2;
    static constexpr bool kGated = Gated;              // the columns of w are gates and ups, in eights
    static constexpr u32 kColsPerOut = Gated ? 2 : 1;  // columns of w of one of y
    static_assert(!ReduceScatter || !Gated, "partial sums have no gates");
    static constexpr bool kWeightsKn = WeightsKn;  // weights as [k, n] in place of [n, k]
    static_assert(!WeightsKn || (TileN % 128 == 0 && !Gated), "two warps load 128 adjacent columns");
    static constexpr bool kSendsPartials = ReduceScatter;
    static constexpr bool kScatters = ReduceScatter;

    // Warps: consumers, producers, signaller and mover. A multiprocessor's four parts have 16 K
    // registers each, so three warps on each have 168 a thread.
    static constexpr u32 kConsumerWarps = 8;
    static constexpr u32 kConsumers = 2;  // in groups of 128 threads
    static constexpr u32 kProducerWarps = 2;
    static constexpr u32 kMoverWarps = 1;
    static constexpr u32 kSignallerWarp = kConsumerWarps + kProducerWarps;
    static constexpr u32 kMoverWarp = kSignallerWarp + 1;
    static constexpr u32 kThreads = 32 * (kMoverWarp + kMoverWarps);

    // A tile's warps, each with a block of the output as square as it can be: operands are read
    // from shared memory once for each row and each column of them.
    static constexpr u32 kWarpsM = TileM >= 256 ? 4 : TileM >= 64 ? 2 : 1;
    static constexpr u32 kWarpsN = kConsumerWarps / kWarpsM;
    static constexpr u32 kRows = TileM / kWarpsM;          // of one warp
    static constexpr u32 kCols = TileN / kWarpsN;          // of one warp
    static constexpr u32 kBlocks = kRows / 16;             // m16 blocks of one warp
    static constexpr u32 kPairs = kCols / 16;              // pairs of n8 blocks of one warp
    static constexpr u32 kBlockRows = 16;
    static constexpr u32 kAccumulators = kCols / 2;        // of one m16 block, in one thread
    static constexpr u32 kOutCols = kCols / kColsPerOut;   // of y, of one warp
    static_assert(kBlocks * 16 * kWarpsM == TileM && kPairs * 16 * kWarpsN == TileN, "tile");
    static_assert(kBlocks * kAccumulators <= 128, "accumulators");
    // Words of a residual that a thread loads at once, as registers allow.
    static constexpr u32 kResidualLoads = kBlocks * kAccumulators > 64 ? 4 : 16;
    // Whether consumers stamp items. Large tiles that send fp32 have no registers for that.
    static constexpr bool kStampsItems = !PartialsF32 || kBlocks * kAccumulators <= 64;
    // The accumulators lie as a Hopper tile's whose columns are split: see `epilogue.cuh`.
    static constexpr bool kSwapAB = false;
    static constexpr bool kSplitColumns = true;

    static constexpr u32 kBytesA = TileM * kTileK * 2;
    static constexpr u32 kBytesB = TileN * kTileK * 2;
    static constexpr u32 kStageBytes = kBytesA + kBytesB;
    // Weights of [k, n] lie in strips of 16 columns, a row of 32 bytes for each element along k. Its
    // two chunks change places every four rows, so that eight rows of a chunk meet different banks.
    static constexpr u32 kWeightStripBytes = kTileK * 32;

    // 16-byte vectors of a thread: of one m16 block in a slot, and of all accumulators in fp32.
    static constexpr u32 kBlockVectors = kAccumulators * kPartialBytes / 16;
    static constexpr u32 kSplitKVectors = kBlocks * kAccumulators / 4;
    static constexpr u32 kSplitKSlotBytes = TileM * TileN * 4;
    static_assert(kSplitKVectors * kConsumerWarps * 32 * 16 == kSplitKSlotBytes, "split-K slots");
    // Bytes of a strip of 16 rows in a slot of partial sums.
    static constexpr u32 kStripBytes = 16 * TileN * kPartialBytes;

    // Dynamic shared memory: stages, barriers and three words, from a 1024-byte border.
    static constexpr u32 kBarrierOffset = kStages * kStageBytes;
    static constexpr u32 kBarriers = 2 * kStages + 4;
    static constexpr u32 kArrivedOffset = kBarrierOffset + kBarriers * 8;
    static constexpr u32 kSharedBytes = kArrivedOffset + 24 + 1024;
};

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
    // The call's epoch, for the consumers.
    __device__ __forceinline__ u32 epoch() const { return arrived() + 16; }
};

}  // namespace flux
