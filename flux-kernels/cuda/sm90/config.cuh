// What a kernel is instantiated with, and the shared memory that follows from it.

#pragma once
#include "common/walk.cuh"

namespace flux {

template <u32 TileM, u32 TileN, u32 StagingBuffers, u32 Stages, bool Bf16, bool ReduceScatter, bool PartialsF32, bool Gated, bool WeightsKn>
struct Config {
    static constexpr u32 kTileM = TileM;
    static constexpr u32 kTileN = TileN;
    static constexpr u32 kTileK = 64;  // one 128-byte swizzled row of 16-bit elements
    static constexpr u32 kStages = Stages;
    // A ring of whole pairs, at least three, is filled two steps along k at once. A shorter ring
    // would miss the stage that waits for its pair.
    static constexpr bool kPairs = Stages >= 6 && Stages % 2 == 0;
    static constexpr bool kBf16 = Bf16;
    static constexpr bool kReduceScatter = ReduceScatter;
    // Partial sums leave for other ranks in fp32, not in the op's type.
    static constexpr bool kPartialsF32 = PartialsF32;
    static_assert(ReduceScatter || !PartialsF32, "nobody adds");
    static constexpr u32 kPartialBytes = PartialsF32 ? 4 : 2;
    static constexpr bool kGated = Gated;         // the columns of w are gates and ups, in eights
    static constexpr u32 kColsPerOut = Gated ? 2 : 1;  // columns of w of one of y
    static_assert(!ReduceScatter || !Gated, "partial sums have no gates");
    static constexpr bool kWeightsKn = WeightsKn;  // weights as [k, n] in place of [n, k]
    static_assert(!WeightsKn || !Gated, "boxes of [k, n] hold columns that are adjacent in memory");

    static constexpr u32 kConsumers = 2;                            // warpgroups
    static constexpr u32 kThreads = 128 * (1 + kConsumers);  // and one of producer, storer, mover and signal poller
    static constexpr u32 kMoverWarps = 3;
    // Without swap-AB, rows of A are wgmma's m, a multiple of 64 for each consumer or the same 64
    // for both, and columns are its n, any multiple of 8. Other rows are multiplied with swap-AB:
    // rows of B are m and rows of A are n. The accumulators then hold the transpose.
    static constexpr bool kSwapAB = TileM != 64 && TileM % (64 * kConsumers) != 0;
    // Consumers split a tile by columns where its rows are one m64 block, or where a swap-AB tile
    // has whole m64 blocks of columns for each. Else they split it by rows.
    static constexpr bool kSplitColumns = TileM == 64 || (kSwapAB && TileN % (64 * kConsumers) == 0);
    static constexpr u32 kRows = kSplitColumns ? TileM : TileM / kConsumers;     // of one consumer
    static constexpr u32 kCols = kSplitColumns ? TileN / kConsumers : TileN;     // of one consumer
    static constexpr u32 kBlocks = (kSwapAB ? kCols : kRows) / 64;               // m64 blocks of one consumer
    static constexpr u32 kBlockRows = 64;                                       // without swap-AB
    static constexpr u32 kWgmmaN = kSwapAB ? kRows : kCols;                     // wgmma's n
    static constexpr u32 kAccumulators = kWgmmaN / 2;                           // of one block, in one thread
    static_assert(kBlocks * 64 == (kSwapAB ? kCols : kRows) && kWgmmaN % (kSwapAB ? 8 : 16) == 0 && kWgmmaN <= 256, "tile");
    static_assert(kBlocks * kWgmmaN <= 384, "accumulators");
    // Words of a residual that a thread loads at once, as registers allow.
    static constexpr u32 kResidualLoads = kBlocks * kWgmmaN > 256 ? 4 : 16;
    // Whether this form sends partial tiles to slots and adds them from there, as
    // `sends_partials_from` of flux-core/src/tile/table.rs: a thread's rounded accumulators are
    // whole 16-byte vectors. Both types of partial sums have the same tiles.
    static constexpr bool kCanSendPartials = !kSwapAB || (StagingBuffers == 1 && kBlocks * kWgmmaN % 16 == 0);
    static constexpr bool kSendsPartials = ReduceScatter && kCanSendPartials;
    static constexpr u32 kVectors = kBlocks * kWgmmaN * kPartialBytes / 32;  // 16-byte vectors of a thread's part of a slot

    // Registers of a thread. The launch gives 168 to each, 64 K in all.
    static constexpr u32 kProducerRegisters = 56;
    static constexpr u32 kConsumerRegisters = 224;

    static constexpr u32 kBytesA = TileM * kTileK * 2;
    static constexpr u32 kBytesB = TileN * kTileK * 2;
    static constexpr u32 kStageBytes = kBytesA + kBytesB;
    static constexpr u32 kOutBytesPerConsumer = TileM * TileN * 2 / kConsumers;
    static constexpr u32 kSlotBytes = TileM * TileN * kPartialBytes;  // unless the shard has fewer rows
    static constexpr u32 kSlotBytesPerConsumer = kSlotBytes / kConsumers;
    // Boxes of the tensor store to y: a block's rows, swizzled over their whole width, which is the
    // widest swizzle that divides the columns.
    static constexpr u32 kOutCols = kCols / kColsPerOut;               // of y, of one consumer
    static constexpr u32 kBlockCols = 64 / kColsPerOut;                // of y, of one block of a swap-AB tile
    static constexpr u32 kBoxUnit = kSwapAB ? kBlockCols : kOutCols;   // whole boxes
    static constexpr u32 kBoxCols = kBoxUnit % 64 == 0 ? 64 : kBoxUnit % 32 == 0 ? 32 : kBoxUnit % 16 == 0 ? 16 : 8;
    static constexpr u32 kBoxRows = kSwapAB ? kRows : 64;
    static constexpr u32 kBoxRowBytes = kBoxCols * 2;
    static constexpr u32 kBoxBytes = kBoxRows * kBoxRowBytes;
    // Weights of [k, n] come in boxes of as many columns, a step along k high.
    static constexpr u32 kWeightBoxBytes = kTileK * kBoxRowBytes;
    static constexpr u32 kBoxes = kBoxUnit / kBoxCols;  // of one block of one consumer
    // Epilogue staging: one buffer for each consumer, or one that they use in turn, which often
    // leaves memory for one more stage. Consumers that wait for the shared buffer fall half a tile
    // apart, so one ends its tile while the other multiplies; large tiles run in lockstep instead.
    static constexpr u32 kStagingBuffers = StagingBuffers;
    static constexpr bool kLockstep = kBlocks > 1 && !kSwapAB;
    // Groups in which a consumer commits the products of a stage. With two it holds a stage and a
    // half on average, but waits twice a stage.
    static constexpr u32 kWgmmaGroups = kLockstep ? 1 : 2;
    static constexpr u32 kStagingBytes = kOutBytesPerConsumer;
    static_assert(kStagingBuffers == 1 || kStagingBuffers == kConsumers, "staging buffers");
    static_assert(kBlocks * kBoxes * kBoxBytes * kColsPerOut == kStagingBytes, "boxes of a consumer's part");
    // Rows that go to several owners need the whole tile staged, in fp32 a part of its rows at a
    // time. Gaps of 16 or 32 bytes between them let the rows of a store meet different banks.
    static constexpr bool kScatters = ReduceScatter && kStagingBuffers == kConsumers;
    static constexpr u32 kOutRowBytes = (TileN * 2 + 16) * (PartialsF32 ? 2 : 1);
    static constexpr u32 kOutBufferBytes = kScatters ? TileM * (TileN * 2 + 16) : kStagingBuffers * kStagingBytes;
    // Rows of a consumer that are staged at once, and how often. In fp32 a part is every other
    // eight rows of wgmma's m, or consecutive ones of its n, of which an odd count leaves a third.
    static constexpr u32 kPartRows = !PartialsF32 ? kRows : kSwapAB ? kRows / 16 * 8 : kRows / 2;
    static constexpr u32 kScatterParts = kScatters ? ceil_div(kRows, kPartRows) : 1;
    static_assert(!kScatters || kPartRows * (kSplitColumns ? 1 : kConsumers) * kOutRowBytes <= kOutBufferBytes, "staged rows");

    // A peer's partial tile travels through the operand ring in so many pieces, the last perhaps
    // shorter. Each holds the same vectors of both consumers: as many as registers allow, and for
    // swap-AB as many as the staging buffer holds.
    static constexpr u32 kPieces = !kCanSendPartials ? 1
                                   : kSwapAB ? ceil_div(kVectors, least(16, least(kStageBytes, kOutBytesPerConsumer) / (kConsumers * 128 * 16)))
                                             : (kBlocks * kWgmmaN > 256 ? 4 : kBlocks * kWgmmaN % 32 == 0 ? 2 : 1) * kPartialBytes / 2;
    static constexpr u32 kPieceVectors = ceil_div(kVectors, kPieces);
    static constexpr __device__ u32 piece_vectors(u32 piece) { return least(kPieceVectors, kVectors - piece * kPieceVectors); }
    static constexpr __device__ u32 piece_bytes_per_consumer(u32 piece) { return piece_vectors(piece) * 128 * 16; }
    static constexpr u32 kPieceBytesPerConsumer = kPieceVectors * 128 * 16;  // of the longest
    static_assert(!kCanSendPartials || (kAccumulators % 2 == 0 && kPieceBytesPerConsumer * kConsumers <= kStageBytes), "pieces");
    // Pieces that are added during the mainloop come into the staging buffers, idle at that time.
    static constexpr u32 kInMainloopPieces = kCanSendPartials && kStagingBuffers * kStagingBytes >= 2 * kConsumers * kPieceBytesPerConsumer ? 2 : 1;
    static_assert(!kCanSendPartials || kStagingBuffers * kStagingBytes >= kConsumers * kPieceBytesPerConsumer, "pieces during the mainloop");
    // Global staging memory of a CTA: a whole fp32 partial tile, or the first consumer's part of one
    // that leaves the shared buffer.
    static constexpr u32 kGlobalStagingBytes = !ReduceScatter ? 0 : PartialsF32 ? kSlotBytes : kStagingBuffers == 1 ? kOutBytesPerConsumer : 0;
    static_assert(kPieces * 2 <= kInMainloopGap * kPartialBytes, "steps that flux-core plans for a partial tile");
    // Split-K partials, in fp32, travel through the ring too, in more pieces.
    static constexpr u32 kSplitKVectors = kBlocks * kWgmmaN / 8;
    static constexpr u32 kSplitKPieceVectors = kSwapAB ? least(8, kSplitKVectors) : kSplitKVectors * kPartialBytes / (4 * kPieces);
    static constexpr u32 kSplitKPieces = ceil_div(kSplitKVectors, kSplitKPieceVectors);
    static constexpr u32 kSplitKSlotBytes = kSplitKVectors * 128 * 16 * kConsumers;  // of a workspace slot
    static constexpr __device__ u32 split_k_piece_vectors(u32 piece) { return least(kSplitKPieceVectors, kSplitKVectors - piece * kSplitKPieceVectors); }
    static_assert(kSplitKSlotBytes == TileM * TileN * 4 && kAccumulators % 4 == 0 && kSplitKPieceVectors * 128 * 16 * kConsumers <= kStageBytes, "split-K pieces");

    // Dynamic shared memory: stages, staging buffers, barriers, from a 1024-byte border as the
    // swizzle needs.
    static constexpr u32 kOutOffset = kStages * kStageBytes;
    static constexpr u32 kBarrierOffset = kOutOffset + kOutBufferBytes;
    static constexpr u32 kBarriers = 2 * kStages + 2 * kConsumers + 7;
    static constexpr u32 kArrivedOffset = kBarrierOffset + kBarriers * 8;
    static constexpr u32 kOpenedOffset = kArrivedOffset + 8;
    static constexpr u32 kSharedBytes = kOpenedOffset + 8 + 1024;
    static_assert(kSharedBytes <= kSharedBytesLimit, "shared memory of an sm_90 CTA");
};

// Addresses in the CTA's shared window.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + C::kBytesA; }
    // The staging buffer of a consumer's part of a tile.
    __device__ __forceinline__ u32 out(u32 consumer) const { return base + C::kOutOffset + (C::kStagingBuffers == 1 ? 0 : consumer) * C::kStagingBytes; }
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
    // Whether a consumer has dropped rows that it was to scatter. It shares `arrived`'s word:
    // programs that scatter await no partial tiles.
    __device__ __forceinline__ u32 dropped_rows() const { return arrived(); }
    // Items that the producer has opened, up to the last that awaits partial tiles or reduces rows.
    __device__ __forceinline__ u32 opened() const { return base + C::kOpenedOffset; }
    // Completed when a consumer may write its part of an item: its staging buffer is free.
    __device__ __forceinline__ u32 out_empty(u32 consumer) const { return full(2 * C::kStages + C::kConsumers + consumer); }
};

}  // namespace flux
