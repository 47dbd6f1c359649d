// Operand data as a function of position, bit for bit what `flux-bench/src/data.rs` generates on
// the host.

#pragma once
#include "ptx/warp.cuh"
#include "types.cuh"

namespace flux::harness {

enum class Fill : u32 { kUniform = 0, kSmallInts = 1 };

constexpr u32 kRawEnd = 1u << 24;
constexpr u32 kSixth = kRawEnd / 6;

// 24 random bits of an element: the top of splitmix64's finaliser over its seed and position.
__device__ __forceinline__ u32 raw(u64 seed, u32 row, u32 col) {
    u64 z = seed ^ (static_cast<u64>(row) << 32 | col);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return static_cast<u32>(z >> 40);
}

__device__ __forceinline__ float value(Fill fill, u64 seed, u32 row, u32 col) {
    const u32 r = raw(seed, row, col);
    if (fill == Fill::kUniform) return static_cast<float>(r) / (kRawEnd / 2) - 1.0f;
    return static_cast<float>(static_cast<i32>(r >= kRawEnd - kSixth) - static_cast<i32>(r < kSixth));
}

// Rounded to 16 bits.
__device__ __forceinline__ u16 round_to(bool bf16, float v) {
    return static_cast<u16>(bf16 ? ptx::pack_2<true>(v, 0.0f) : ptx::pack_2<false>(v, 0.0f));
}

__device__ __forceinline__ float widen(bool bf16, u16 v) {
    float lo, hi;
    if (bf16) {
        ptx::unpack_2<true>(v, lo, hi);
    } else {
        ptx::unpack_2<false>(v, lo, hi);
    }
    return lo;
}

// The element as the operands hold it.
__device__ __forceinline__ float element(bool bf16, Fill fill, u64 seed, u32 row, u32 col) {
    return widen(bf16, round_to(bf16, value(fill, seed, row, col)));
}

}  // namespace flux::harness
