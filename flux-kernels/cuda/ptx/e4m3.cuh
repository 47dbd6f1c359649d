// Conversion to E4M3 (PTX ISA: cvt, from sm_89 on).

#pragma once
#include "types.cuh"

namespace flux::ptx {

// cvt.rn.satfinite.e4m3x2.f32: rounds two numbers to nearest even, 448 at most, `lo` into the lower
// byte
__device__ __forceinline__ u32 pack_e4m3_2(float lo, float hi) {
    unsigned short v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(hi), "f"(lo));
    return v;
}

__device__ __forceinline__ u32 pack_e4m3_4(float a, float b, float c, float d) {
    return pack_e4m3_2(a, b) | pack_e4m3_2(c, d) << 16;
}

}  // namespace flux::ptx
