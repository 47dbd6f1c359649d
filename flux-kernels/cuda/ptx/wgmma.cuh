// Warpgroup matrix instructions (PTX ISA: wgmma), A and B from shared memory, fp32 accumulators in
// registers.

#pragma once
#include "ptx/element.cuh"

namespace flux::ptx {

// wgmma.fence.sync: orders register accesses before the first wgmma that uses them
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group.sync
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync: all but the newest `Pending` groups are complete
template <u32 Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving accumulator accesses across an asynchronous wgmma.
template <u32 N>
__device__ __forceinline__ void pin_registers(float (&r)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Matrix descriptor of a K-major operand tile in shared memory with 128-byte swizzle: rows of 128
// bytes, groups of 8 rows every 1024. Fields (PTX ISA, "Matrix descriptor format"): start address,
// leading offset (unused here), stride offset, swizzle mode. This is the lower half. Each
// instruction adds the upper one, which follows from how the operand lies.
__device__ __forceinline__ u32 k_major_128b_descriptor(u32 address) {
    return (address & 0x3FFFF) >> 4 | 1u << 16;
}

// A descriptor `bytes` further on: along k within the 128-byte row, or whole groups of rows.
__device__ __forceinline__ u32 advance_descriptor(u32 descriptor, u32 bytes) {
    return descriptor + (bytes >> 4);
}

// The operands of an instruction with that many accumulators in a thread, d[0] and on: their places
// in the text, and their constraints.
#define FLUX_PLACES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLUX_PLACES_16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FLUX_PLACES_24 \
    FLUX_PLACES_16 \
    ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FLUX_PLACES_32 \
    FLUX_PLACES_24 \
    ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FLUX_PLACES_36 \
    FLUX_PLACES_32 \
    ", %32, %33, %34, %35"
#define FLUX_PLACES_40 \
    FLUX_PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FLUX_PLACES_48 \
    FLUX_PLACES_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FLUX_PLACES_64 \
    FLUX_PLACES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FLUX_PLACES_68 \
    FLUX_PLACES_64 \
    ", %64, %65, %66, %67"
#define FLUX_PLACES_72 \
    FLUX_PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FLUX_PLACES_76 \
    FLUX_PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75"
#define FLUX_PLACES_80 \
    FLUX_PLACES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FLUX_PLACES_84 \
    FLUX_PLACES_80 \
    ", %80, %81, %82, %83"
#define FLUX_PLACES_88 \
    FLUX_PLACES_80 \
    ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FLUX_PLACES_92 \
    FLUX_PLACES_88 \
    ", %88, %89, %90, %91"
#define FLUX_PLACES_96 \
    FLUX_PLACES_88 \
    ", %88, %89, %90, %91, %92, %93, %94, %95"
#define FLUX_PLACES_104 \
    FLUX_PLACES_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FLUX_PLACES_112 \
    FLUX_PLACES_104 \
    ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FLUX_PLACES_120 \
    FLUX_PLACES_112 \
    ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FLUX_PLACES_128 \
    FLUX_PLACES_120 \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define FLUX_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FLUX_EIGHT(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLUX_SUMS_8 FLUX_EIGHT(0)
#define FLUX_SUMS_16 FLUX_EIGHT(0), FLUX_EIGHT(8)
#define FLUX_SUMS_24 FLUX_SUMS_16, FLUX_EIGHT(16)
#define FLUX_SUMS_32 FLUX_SUMS_24, FLUX_EIGHT(24)
#define FLUX_SUMS_36 FLUX_SUMS_32, FLUX_FOUR(32)
#define FLUX_SUMS_40 FLUX_SUMS_32, FLUX_EIGHT(32)
#define FLUX_SUMS_48 FLUX_SUMS_32, FLUX_EIGHT(32), FLUX_EIGHT(40)
#define FLUX_SUMS_64 FLUX_SUMS_48, FLUX_EIGHT(48), FLUX_EIGHT(56)
#define FLUX_SUMS_68 FLUX_SUMS_64, FLUX_FOUR(64)
#define FLUX_SUMS_72 FLUX_SUMS_64, FLUX_EIGHT(64)
#define FLUX_SUMS_76 FLUX_SUMS_64, FLUX_EIGHT(64), FLUX_FOUR(72)
#define FLUX_SUMS_80 FLUX_SUMS_64, FLUX_EIGHT(64), FLUX_EIGHT(72)
#define FLUX_SUMS_84 FLUX_SUMS_80, FLUX_FOUR(80)
#define FLUX_SUMS_88 FLUX_SUMS_80, FLUX_EIGHT(80)
#define FLUX_SUMS_92 FLUX_SUMS_88, FLUX_FOUR(88)
#define FLUX_SUMS_96 FLUX_SUMS_88, FLUX_EIGHT(88)
#define FLUX_SUMS_104 FLUX_SUMS_96, FLUX_EIGHT(96)
#define FLUX_SUMS_112 FLUX_SUMS_104, FLUX_EIGHT(104)
#define FLUX_SUMS_120 FLUX_SUMS_112, FLUX_EIGHT(112)
#define FLUX_SUMS_128 FLUX_SUMS_120, FLUX_EIGHT(120)

// How an operand lies in shared memory: the upper half of its descriptor, whether it is transposed,
// and the bytes from an instruction's elements along k to the next one's.
struct KMajor {
    static constexpr u32 kUpper = 1u << 30 | 1024 >> 4;  // swizzle mode 1, stride offset 1024
    static constexpr u32 kTransposed = 0;
    static constexpr u32 kStepBytes = 32;
};

// Boxes of 64 rows, one for each element along k. A row is `RowBytes` of consecutive elements of m
// or n, swizzled over all of it. Modes 1, 2 and 3 are swizzles of 128, 64 and 32 bytes.
template <u32 RowBytes>
struct MnMajor {
    static_assert(RowBytes == 128 || RowBytes == 64 || RowBytes == 32, "a swizzle over whole rows");
    static constexpr u32 kUpper = (RowBytes == 128 ? 1u : RowBytes == 64 ? 2u : 3u) << 30 | 8 * RowBytes >> 4;
    static constexpr u32 kTransposed = 1;
    static constexpr u32 kStepBytes = 16 * RowBytes;

    // The lower half: boxes follow each other, which is the leading offset.
    __device__ __forceinline__ static u32 descriptor(u32 address) { return (address & 0x3FFFF) >> 4 | (64 * RowBytes >> 4) << 16; }
};

// wgmma.mma_async m64nNk16, or m64nNk32 of 8-bit operands, which are K-major: D (64 x N) = A (64 x
// k)
// * B (N x k)^T, added to D where `accumulate`.
template <u32 N, class Element>
struct Wgmma;

// Of `sums` = n / 2 accumulators; `a` to `tb` are the seven numbers that follow them.
#define FLUX_WGMMA_OF(n, sums, a, b, c, ua, ub, ta, tb, type, Element)                                                                              \
    template <>                                                                                                                                     \
    struct Wgmma<n, Element> {                                                                                                                      \
        template <class A, class B>                                                                                                                 \
        static __device__ __forceinline__ void mma(float (&d)[sums], u32 desc_a, u32 desc_b, u32 accumulate) {                                      \
            asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #c ", 0;\n"                                                          \
                         "mov.b64 a, {%" #a ", %" #ua "};\nmov.b64 b, {%" #b ", %" #ub "};\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." #type "." #type " {" FLUX_PLACES_##sums "}, a, b, p, 1, 1, %" #ta        \
                         ", %" #tb ";\n}"                                                                                                           \
                         : FLUX_SUMS_##sums                                                                                                         \
                         : "r"(desc_a), "r"(desc_b), "r"(accumulate), "n"(A::kUpper), "n"(B::kUpper), "n"(A::kTransposed), "n"(B::kTransposed));    \
        }                                                                                                                                           \
    };
#define FLUX_WGMMA_8_BIT(n, sums, a, b, c, ua, ub, type, Element)                                                                                    \
    template <>                                                                                                                                     \
    struct Wgmma<n, Element> {                                                                                                                      \
        template <class A, class B>                                                                                                                 \
        static __device__ __forceinline__ void mma(float (&d)[sums], u32 desc_a, u32 desc_b, u32 accumulate) {                                      \
            static_assert(!A::kTransposed && !B::kTransposed, "8-bit operands are K-major");                                                        \
            asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %" #c ", 0;\n"                                                          \
                         "mov.b64 a, {%" #a ", %" #ua "};\nmov.b64 b, {%" #b ", %" #ub "};\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." #type "." #type " {" FLUX_PLACES_##sums "}, a, b, p, 1, 1;\n}"           \
                         : FLUX_SUMS_##sums                                                                                                         \
                         : "r"(desc_a), "r"(desc_b), "r"(accumulate), "n"(A::kUpper), "n"(B::kUpper));                                              \
        }                                                                                                                                           \
    };
#define FLUX_WGMMA(n, sums, a, b, c, ua, ub, ta, tb)              \
    FLUX_WGMMA_OF(n, sums, a, b, c, ua, ub, ta, tb, bf16, Bf16)   \
    FLUX_WGMMA_OF(n, sums, a, b, c, ua, ub, ta, tb, f16, F16)     \
    FLUX_WGMMA_8_BIT(n, sums, a, b, c, ua, ub, e4m3, E4m3)

FLUX_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
FLUX_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FLUX_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
FLUX_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FLUX_WGMMA(72, 36, 36, 37, 38, 39, 40, 41, 42)
FLUX_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FLUX_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FLUX_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FLUX_WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74)
FLUX_WGMMA(144, 72, 72, 73, 74, 75, 76, 77, 78)
FLUX_WGMMA(152, 76, 76, 77, 78, 79, 80, 81, 82)
FLUX_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FLUX_WGMMA(168, 84, 84, 85, 86, 87, 88, 89, 90)
FLUX_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
FLUX_WGMMA(184, 92, 92, 93, 94, 95, 96, 97, 98)
FLUX_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FLUX_WGMMA(208, 104, 104, 105, 106, 107, 108, 109, 110)
FLUX_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
FLUX_WGMMA(240, 120, 120, 121, 122, 123, 124, 125, 126)
FLUX_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

}  // namespace flux::ptx
