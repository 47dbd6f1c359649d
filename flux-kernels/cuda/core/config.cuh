// What a kernel is instantiated with, and the shared memory that follows from it.
#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux {

template <u32 TileM, u32 TileN, u32 Stages, bool Bf16, bool ReduceScatter, bool Trace = false>
struct Config {
    static constexpr u32 kTileM = TileM;
    static constexpr u32 kTileN = TileN;
    static constexpr u32 kTileK = 64;  // one 128-byte swizzled row of 16-bit elements
    static constexpr u32 kStages = Stages;
    static constexpr bool kBf16 = Bf16;
    static constexpr bool kReduceScatter = ReduceScatter;
    static constexpr bool kTrace = Trace;  // record when each phase of each item ended

    static constexpr u32 kConsumers = 2;                            // warpgroups
    static constexpr u32 kThreads = 128 * (1 + kConsumers);         // and one of producer, storer and mover
    static constexpr u32 kBlocksM = TileM / (64 * kConsumers);      // m64 blocks of one consumer
    static constexpr u32 kVectors = kBlocksM * TileN / 16;          // 16-byte vectors of rounded accumulators of one thread
    static_assert(TileM % (64 * kConsumers) == 0 && TileN % 64 == 0 && TileN <= 256, "tile");
    static_assert(kBlocksM * TileN <= 256, "accumulators");

    // Registers of a thread: 64 K in all, launched with 168 each.
    static constexpr u32 kProducerRegisters = 40;
    static constexpr u32 kConsumerRegisters = 232;

    static constexpr u32 kBytesA = TileM * kTileK * 2;
    static constexpr u32 kBytesB = TileN * kTileK * 2;
    static constexpr u32 kStageBytes = kBytesA + kBytesB;
    static constexpr u32 kOutBytes = TileM * TileN * 2;             // also the bytes of a slot
    static constexpr u32 kOutBytesPerConsumer = kOutBytes / kConsumers;

    // A partial tile travels through the operand ring in this many pieces; each holds the same vectors of both consumers.
    static constexpr u32 kPieces = 2;
    static constexpr u32 kPieceVectors = kVectors / kPieces;
    static constexpr u32 kPieceBytesPerConsumer = kPieceVectors * 128 * 16;
    static_assert(kVectors % kPieces == 0 && kPieceBytesPerConsumer * kConsumers <= kStageBytes, "pieces");

    // What goes to a peer at once, where it goes in pieces.
    static constexpr u32 kPieceBytes = 4096;
    // Pieces that the mover has in shared memory: 128 CTAs with four saturate a link of an H200 (results/h200-x4-links.txt).
    static constexpr u32 kMoverRing = ReduceScatter ? 0 : 4;

    // Dynamic shared memory: stages, output buffers, the mover's ring, barriers; from a 1024-byte border, as the swizzle needs.
    static constexpr u32 kOutOffset = kStages * kStageBytes;
    static constexpr u32 kMoverOffset = kOutOffset + kOutBytes;
    static constexpr u32 kBarrierOffset = kMoverOffset + kMoverRing * kPieceBytes;
    static constexpr u32 kBarriers = 2 * kStages + 2 * kConsumers + kMoverRing;
    static constexpr u32 kSharedBytes = kBarrierOffset + kBarriers * 8 + 1024;
    static_assert(kSharedBytes <= 232448, "shared memory of an sm_90 CTA");
};

// Addresses in the CTA's shared window.
template <class C>
struct Shared {
    u32 base;

    __device__ __forceinline__ u32 a(u32 stage) const { return base + stage * C::kStageBytes; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + C::kBytesA; }
    __device__ __forceinline__ u32 out(u32 consumer) const { return base + C::kOutOffset + consumer * C::kOutBytesPerConsumer; }
    // Completed when a stage is filled, by one arrival and its bytes.
    __device__ __forceinline__ u32 full(u32 stage) const { return base + C::kBarrierOffset + stage * 8; }
    // Completed when every consumer has read a stage.
    __device__ __forceinline__ u32 empty(u32 stage) const { return full(C::kStages + stage); }
    // Completed when a consumer's 128 threads have written its output buffer.
    __device__ __forceinline__ u32 out_full(u32 consumer) const { return full(2 * C::kStages + consumer); }
    // The mover's pieces, by their number in the call, and what completes when one is loaded.
    __device__ __forceinline__ u32 mover(u32 piece) const { return base + C::kMoverOffset + piece % C::kMoverRing * C::kPieceBytes; }
    __device__ __forceinline__ u32 moved(u32 piece) const {
        return full(2 * C::kStages + 2 * C::kConsumers + piece % C::kMoverRing);
    }
    // Completed when the storer's copies have read it.
    __device__ __forceinline__ u32 out_empty(u32 consumer) const { return full(2 * C::kStages + C::kConsumers + consumer); }
};

// A position in the ring of stages.
template <u32 Stages>
struct RingState {
    u32 stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            phase ^= 1;
        }
    }
};

// Which items a CTA works on: the program's, strided by the number of workers.
struct Walk {
    u32 first, stride, count;
};

__device__ __forceinline__ WorkItem load_item(const Params& p, u32 index) {
    WorkItem item;
    const char* src = reinterpret_cast<const char*>(p.items + index);
    uint4* dst = reinterpret_cast<uint4*>(&item);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) dst[i] = ptx::load_constant_16(src + 16 * i);
    return item;
}

}  // namespace flux
