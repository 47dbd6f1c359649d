// How a warp's accumulators leave it and come back, in vectors of 16 bytes.
//
// acc[block][4 j + i] of lane `lane` is row lane / 4 of the m16 block, plus 8 for i >= 2, and
// column 8 j + 2 (lane mod 4) + (i mod 2) of the warp (PTX ISA: mma.m16n8k16, fragments).

#pragma once
#include "common/accumulate.cuh"
#include "common/epilogue.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "sm80/config.cuh"

namespace flux {

template <class C>
using Accumulators = float[C::kBlocks][C::kAccumulators];

// Accumulators as they leave: word 2 j + h of a block holds elements 4 j + 2 h and the next. They
// take half of the registers, so more than one pass over them is possible.
template <class C>
struct Rounded {
    u32 words[C::kBlocks][C::kOutCols / 4];

    __device__ __forceinline__ explicit Rounded(const Accumulators<C>& acc) {
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 i = 0; i < C::kOutCols / 4; ++i) {
                words[block][i] = C::Output::pack_2(result<C>(acc[block], 2 * i), result<C>(acc[block], 2 * i + 1));
            }
        }
    }
};

// Where a thread's accumulators lie in the tile. Made where it is used: kept through the mainloop,
// its fields would take registers of accumulators.
template <class C>
struct Part {
    u32 lane = ptx::copied_here(threadIdx.x) % 32;
    u32 warp = ptx::copied_here(threadIdx.x) / 32;

    __device__ __forceinline__ u32 row() const { return warp / C::kWarpsN * C::kRows; }
    __device__ __forceinline__ u32 col() const { return warp % C::kWarpsN * C::kCols; }
};

// This rank's data memory. Its place among the parameters is not kept through the mainloop.
__device__ __forceinline__ u64 own_data(const Params& p) {
    return p.data[ptx::copied_here(p.rank)];
}

// Four lanes hold a word of each of four vectors; afterwards lane q of them holds vector q.
__device__ __forceinline__ uint4 transpose_quad(u32 v0, u32 v1, u32 v2, u32 v3) {
    const u32 thread = ptx::copied_here(threadIdx.x);
    const bool odd = thread & 1, upper = thread & 2;
    const u32 got0 = __shfl_xor_sync(0xFFFFFFFFu, odd ? v0 : v1, 1);
    const u32 got1 = __shfl_xor_sync(0xFFFFFFFFu, odd ? v2 : v3, 1);
    // Words of lanes 0 and 1, or 2 and 3, of vectors `odd` and 2 + `odd`.
    const u32 a0 = odd ? got0 : v0, a1 = odd ? v1 : got0, b0 = odd ? got1 : v2, b1 = odd ? v3 : got1;
    const u32 first = __shfl_xor_sync(0xFFFFFFFFu, upper ? a0 : b0, 2), second = __shfl_xor_sync(0xFFFFFFFFu, upper ? a1 : b1, 2);
    return upper ? uint4{first, second, b0, b1} : uint4{a0, a1, first, second};
}

// Stores four accumulators, as they are.
__device__ __forceinline__ void store_four(u64 to, const float* d) {
    ptx::store_global_16(to, {__float_as_uint(d[0]), __float_as_uint(d[1]), __float_as_uint(d[2]), __float_as_uint(d[3])});
}

// Stores rounded rows. `row_at(row)` is the place of a row of the tile at the item's first column,
// or 0 for a row that does not exist; `put(at, eight)` stores eight columns at their place.
template <class C, class RowAt, class Put>
__device__ __forceinline__ void store_rows(const WorkItem& item, const Rounded<C>& rounded, RowAt row_at, Put put) {
    const Part<C> part;
    constexpr u32 kEights = C::kOutCols / 8;  // column blocks
    const u32 quad = part.lane / 4, within = part.lane % 4, first_row = part.row(), first_col = part.col() / C::kColsPerOut;
    const auto store = [&](u64 row, u32 col, uint4 eight) {
        if (row != 0 && col * C::kColsPerOut < item.cols) put(row + col * C::Output::kBytes, eight);
    };
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
        const auto pair = [&](u32 j, u32 half) { return rounded.words[block][j * 2 + half]; };
        const u32 row = first_row + block * 16 + quad;
        if constexpr (kEights % 4 == 0) {
            // Four column blocks of one row.
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u64 at = row_at(row + half * 8);
#pragma unroll
                for (u32 j = 0; j < kEights; j += 4) {
                    store(at, first_col + (j + within) * 8, transpose_quad(pair(j, half), pair(j + 1, half), pair(j + 2, half), pair(j + 3, half)));
                }
            }
        } else if constexpr (kEights == 1) {
            // No four vectors to transpose: each lane stores a pair of each row of y.
            static_assert(C::kGated, "others have two column blocks");
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u64 at = row_at(row + half * 8);
                if (at != 0 && first_col * C::kColsPerOut < item.cols) ptx::store_global_4(at + (first_col + within * 2) * C::Output::kBytes, pair(0, half));
            }
        } else {
            // Two column blocks of two rows.
            const u64 at = row_at(row + within / 2 * 8);
#pragma unroll
            for (u32 j = 0; j < kEights; j += 2) {
                store(at, first_col + (j + within % 2) * 8, transpose_quad(pair(j, 0), pair(j + 1, 0), pair(j, 1), pair(j + 1, 1)));
            }
        }
    }
}

// The same of partial sums in fp32: `put(at, four)` stores four columns. Lanes of four exchange
// pairs, so that they store sixteen columns of a row, two vectors of each of two column blocks.
template <class C, class RowAt, class Put>
__device__ __forceinline__ void store_rows_f32(const WorkItem& item, const Accumulators<C>& acc, RowAt row_at, Put put) {
    const Part<C> part;
    const bool odd = part.lane & 1;
    const u32 row = part.row() + part.lane / 4, col = part.col() + part.lane % 2 * 8 + part.lane / 2 % 2 * 4;
#pragma unroll
    for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u64 at = row_at(row + block * 16 + half * 8);
#pragma unroll
            for (u32 j = 0; j < C::kCols / 8; j += 2) {
                const float* left = &acc[block][j * 4 + half * 2];
                const float* right = left + 4;
                u32 own[2], got[2];
#pragma unroll
                for (u32 i = 0; i < 2; ++i) {
                    own[i] = __float_as_uint(odd ? right[i] : left[i]);
                    got[i] = __shfl_xor_sync(0xFFFFFFFFu, __float_as_uint(odd ? left[i] : right[i]), 1);
                }
                if (at == 0 || col + j * 8 >= item.cols) continue;
                put(at + (col + j * 8) * u64{4}, odd ? uint4{got[0], got[1], own[0], own[1]} : uint4{own[0], own[1], got[0], got[1]});
            }
        }
    }
}

// A slot of partial sums: strips of 16 rows, each as threads hold it. Of a shard with fewer
// rows than a tile it holds only the strips that have rows (`slot_bytes` of
// flux-core/src/layout). The reader is the same lane of another rank, so every access is
// contiguous.
template <class C>
struct Slot {
    static constexpr bool kMayBeShort = C::kTileM == 64 || C::kTileM == 128;

    const Params& p;

    __device__ __forceinline__ u64 bytes() const {
        return kMayBeShort && p.m_shard < C::kTileM ? ceil_div(p.m_shard, 16) * C::kStripBytes : C::kTileM * C::kTileN * C::kPartialBytes;
    }

    // This lane's first vector, of its warp's first strip.
    __device__ __forceinline__ static u64 vectors(u64 slot, const Part<C>& part) {
        return slot + part.row() / 16 * C::kStripBytes + part.col() * (16 * C::kPartialBytes) + part.lane * 16;
    }

    __device__ __forceinline__ static void store(u64 slot, u32 rows, const Accumulators<C>& acc) {
        const Part<C> part;
        const u64 first = vectors(slot, part);
#pragma unroll
        for (u32 b = 0; b < C::kBlocks; ++b) {
            if (part.row() + b * 16 >= rows) break;
            const u64 to = first + b * C::kStripBytes;
#pragma unroll
            for (u32 v = 0; v < C::kBlockVectors; ++v) {
                if constexpr (C::kPartialsF32) {
                    store_four(to + v * 512, &acc[b][v * 4]);
                    continue;
                }
                const float* d = &acc[b][v * 8];
                ptx::store_global_16(to + v * 512, {C::Output::pack_2(d[0], d[1]), C::Output::pack_2(d[2], d[3]), C::Output::pack_2(d[4], d[5]),
                                                    C::Output::pack_2(d[6], d[7])});
            }
        }
    }

    __device__ __forceinline__ static void add(u64 slot, u32 rows, Accumulators<C>& acc) {
        const Part<C> part;
        const u64 first = vectors(slot, part);
#pragma unroll
        for (u32 b = 0; b < C::kBlocks; ++b) {
            if (part.row() + b * 16 >= rows) break;
            const u64 from = first + b * C::kStripBytes;
#pragma unroll
            for (u32 v = 0; v < C::kBlockVectors; ++v) {
                // Registers are left for two loads under way, and the compiler would have more.
                if (v % 2 == 0) __syncwarp();
                const uint4 vector = ptx::load_global_16(from + v * 512);
                if constexpr (C::kPartialsF32) {
                    add_four(vector, &acc[b][v * 4]);
                } else {
                    add_eight<C>(vector, &acc[b][v * 8]);
                }
            }
        }
    }
};

// A split-K partial: fp32 accumulators in thread order.
template <class C>
struct SplitKSlot {
    // This lane's first vector of the `n`-th slot of the own rank.
    __device__ __forceinline__ static u64 vectors(const Params& p, u32 epoch, u32 n) {
        const Part<C> part;
        const u64 half = own_data(p) + (epoch & 1) * p.half_stride;
        return half + p.split_k_offset + static_cast<u64>(n) * C::kSplitKSlotBytes +
               part.warp * (C::kSplitKSlotBytes / C::kConsumerWarps) + part.lane * 16;
    }

    __device__ __forceinline__ static void store(u64 to, const Accumulators<C>& acc) {
#pragma unroll
        for (u32 v = 0; v < C::kSplitKVectors; ++v) store_four(to + v * 512, &acc[v * 4 / C::kAccumulators][v * 4 % C::kAccumulators]);
    }

    __device__ __forceinline__ static void add(u64 from, Accumulators<C>& acc) {
        constexpr u32 kTogether = least(4, C::kSplitKVectors);  // loads under way, as registers allow
#pragma unroll
        for (u32 first = 0; first < C::kSplitKVectors; first += kTogether) {
            // Keeps the loads of the next round back: there is no register for more.
            __syncwarp();
            uint4 four[kTogether];
#pragma unroll
            for (u32 v = 0; v < kTogether; ++v) four[v] = ptx::load_global_16(from + (first + v) * 512);
#pragma unroll
            for (u32 v = 0; v < kTogether; ++v) add_four(four[v], &acc[(first + v) * 4 / C::kAccumulators][(first + v) * 4 % C::kAccumulators]);
        }
    }
};

}  // namespace flux
