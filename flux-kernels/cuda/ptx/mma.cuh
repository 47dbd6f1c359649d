// Matrix instructions of a warp (PTX ISA: ldmatrix, mma), fp32 accumulators in registers.

#pragma once
#include "ptx/element.cuh"

namespace flux::ptx {

// ldmatrix.x4: four 8x8 matrices of 16-bit elements; lane l gives the address of row l mod 8 of
// matrix l / 8, and receives elements 2 (l mod 4) and the next of row l / 4 of each.
__device__ __forceinline__ void load_matrix_x4(u32 (&m)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(row) : "memory");
}

// The same of the transposed matrices: a lane receives rows 2 (l mod 4) and the next of column
// l / 4.
__device__ __forceinline__ void load_matrix_x4_transposed(u32 (&m)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(row)
                 : "memory");
}

// mma.m16n8k16: d (16 x 8) += a (16 x 16) * b (8 x 16)^T. A row of a or b is 32 bytes of any type,
// so lanes hold the same bytes of all.
__device__ __forceinline__ void mma_16x8(Bf16, float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_16x8(F16, float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.m16n8k32 (from sm_89 on): d (16 x 8) += a (16 x 32) * b (8 x 32)^T
__device__ __forceinline__ void mma_16x8(E4m3, float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace flux::ptx
