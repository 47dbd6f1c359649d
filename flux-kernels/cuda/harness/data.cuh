// Operand data as a function of position, bit for bit what `flux-kernels/src/harness/data.rs`
// generates on the host. It shares no code with the kernels that it checks: it rounds by integers.

#pragma once
#include "abi.cuh"

namespace flux::harness {

constexpr u32 kSixth = kRawEnd / 6;
// Makes another seed of an operand's: that of its scales.
constexpr u64 kScaleSeed = 0x5CA1E5ull << 32;

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
    if (fill != Fill::kSmallInts) __trap();
    return static_cast<float>(static_cast<i32>(r >= kRawEnd - kSixth) - static_cast<i32>(r < kSixth));
}

// To the nearest, ties to even; infinite from 2^128 on.
__device__ __forceinline__ u16 to_bf16(float v) {
    const u32 bits = __float_as_uint(v);
    return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// To the nearest, ties to even; infinite from 65520 on.
__device__ __forceinline__ u16 to_fp16(float v) {
    const u32 bits = __float_as_uint(v), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    u32 rounded;
    if (magnitude >= 0x47800000u) {  // 2^16
        rounded = 0x7C00u;
    } else if (magnitude < 0x38800000u) {  // 2^-14: a subnormal, whose step of 2^-24 is that of fp32 at 1/2
        rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u;
    } else {
        rounded = (magnitude + 0xFFFu + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
    }
    return static_cast<u16>(sign | rounded);
}

__device__ __forceinline__ float from_fp16(u16 v) {
    const u32 sign = (v & 0x8000u) << 16, exponent = v >> 10 & 31, mantissa = v & 0x3FFu;
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint(static_cast<float>(mantissa) * 0x1p-24f));
    return __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

// To the nearest, ties to even; at most 448, and no NaN.
__device__ __forceinline__ u8 to_e4m3(float v) {
    const u32 bits = __float_as_uint(v), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    u32 rounded;
    if (magnitude < 0x3C800000u) {  // 2^-6: a subnormal, whose step of 2^-9 is that of fp32 at 2^14
        rounded = __float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - 0x46800000u;
    } else {
        rounded = min((magnitude + 0x7FFFFu + (magnitude >> 20 & 1) - (120u << 23)) >> 20, 0x7Eu);
    }
    return static_cast<u8>(sign | rounded);
}

__device__ __forceinline__ float from_e4m3(u8 v) {
    const u32 sign = (v & 0x80u) << 24, exponent = v >> 3 & 15, mantissa = v & 7u;
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint(static_cast<float>(mantissa) * 0x1p-9f));
    return __uint_as_float(sign | (exponent + 120) << 23 | mantissa << 20);
}

// Rounded to 16 bits.
__device__ __forceinline__ u16 round_to(DType dtype, float v) {
    return dtype == DType::kBf16 ? to_bf16(v) : to_fp16(v);
}

__device__ __forceinline__ float widen(DType dtype, u16 v) {
    return dtype == DType::kBf16 ? __uint_as_float(static_cast<u32>(v) << 16) : from_fp16(v);
}

// The element as the operands hold it.
__device__ __forceinline__ float element(DType dtype, Fill fill, u64 seed, u32 row, u32 col) {
    const float v = value(fill, seed, row, col);
    return dtype == DType::kE4m3 ? from_e4m3(to_e4m3(v)) : widen(dtype, round_to(dtype, v));
}

// A scale of the operand with this seed, by its place in the matrix of all ranks' scales. Its few
// significant bits keep a product of two elements with their scales exact in fp32. Those of
// integers keep sums integers.
__device__ __forceinline__ float scale(Fill fill, u64 seed, u32 row, u32 col) {
    const u32 r = raw(seed ^ kScaleSeed, row, col);
    if (fill == Fill::kSmallInts) return r % 2 == 0 ? 1.0f : -1.0f;
    return static_cast<float>(8 + r % 8) / 16.0f;
}

}  // namespace flux::harness
