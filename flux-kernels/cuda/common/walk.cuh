// How a CTA walks its items and its ring of stages, in every generation.

#pragma once
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux {

constexpr __host__ __device__ u32 least(u32 a, u32 b) { return a < b ? a : b; }

constexpr __host__ __device__ u32 ceil_div(u32 a, u32 b) { return (a + b - 1) / b; }

// Addresses in the CTA's shared window; every generation has its own.
template <class C>
struct Shared;

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

// The items of a CTA: every `stride`-th of the program's.
struct Walk {
    u32 first, stride, count;

    // The `number`-th of them.
    __device__ __forceinline__ u32 item(u32 number) const { return first + number * stride; }

    // The last of them; there is at least one.
    __device__ __forceinline__ u32 last() const { return first + (count - 1 - first) / stride * stride; }
};

__device__ __forceinline__ WorkItem load_item(const Params& p, u32 index) {
    WorkItem item;
    const char* src = reinterpret_cast<const char*>(p.items + index);
    uint4* dst = reinterpret_cast<uint4*>(&item);
#pragma unroll
    for (u32 i = 0; i < sizeof(WorkItem) / 16; ++i) dst[i] = ptx::load_constant_16(src + 16 * i);
    return item;
}

}  // namespace flux
