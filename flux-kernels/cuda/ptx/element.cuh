// Element types: their bytes, and conversions of packed pairs (PTX ISA: cvt).

#pragma once
#include "abi.cuh"

namespace flux {

// bfloat16
struct Bf16 {
    static constexpr u32 kBytes = 2;
    static constexpr u32 kPerVector = kVectorBytes / kBytes;

    // cvt.rn.bf16x2.f32: rounds two numbers to nearest even, `lo` into the lower half
    __device__ __forceinline__ static u32 pack_2(float lo, float hi) {
        u32 v;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
        return v;
    }

    // The lower and upper half of a packed pair, exactly.
    __device__ __forceinline__ static void unpack_2(u32 v, float& lo, float& hi) {
        lo = __uint_as_float(v << 16);
        hi = __uint_as_float(v & 0xFFFF0000u);
    }
};

// IEEE 754 binary16
struct F16 {
    static constexpr u32 kBytes = 2;
    static constexpr u32 kPerVector = kVectorBytes / kBytes;

    // cvt.rn.f16x2.f32: rounds two numbers to nearest even, `lo` into the lower half
    __device__ __forceinline__ static u32 pack_2(float lo, float hi) {
        u32 v;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
        return v;
    }

    // The lower and upper half of a packed pair, exactly.
    __device__ __forceinline__ static void unpack_2(u32 v, float& lo, float& hi) {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(lo), "=f"(hi) : "r"(v));
    }
};

// E4M3 of the OCP 8-bit floating point specification, of operands alone
struct E4m3 {
    static constexpr u32 kBytes = 1;
    static constexpr u32 kPerVector = kVectorBytes / kBytes;
};

}  // namespace flux
