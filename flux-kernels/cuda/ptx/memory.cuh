// Loads, stores and atomics with an explicit memory order and scope (PTX ISA: ld, st, atom, fence),
// and the clock.

#pragma once
#include "types.cuh"

namespace flux::ptx {

// ld.acquire.sys
__device__ __forceinline__ u32 load_acquire_sys(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// ld.relaxed.sys
__device__ __forceinline__ u32 load_relaxed_sys(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// ld.relaxed.sys, 64 bits
__device__ __forceinline__ u64 load_relaxed_sys_64(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

// ld.relaxed.gpu
__device__ __forceinline__ u32 load_relaxed_gpu(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// st.release.sys
__device__ __forceinline__ void store_release_sys(u32* p, u32 v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// st.relaxed.gpu
__device__ __forceinline__ void store_relaxed_gpu(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// st.relaxed.sys
__device__ __forceinline__ void store_relaxed_sys(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// st.relaxed.sys, 64 bits
__device__ __forceinline__ void store_relaxed_sys_64(u64* p, u64 v) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ld.relaxed.sys, four words, each of which may come without the others
__device__ __forceinline__ uint4 load_relaxed_sys_16(u64 p) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// st.relaxed.sys, four words, each of which may arrive without the others
__device__ __forceinline__ void store_relaxed_sys_16(u64 p, uint4 v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// fence.acq_rel.sys
__device__ __forceinline__ void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// fence.acq_rel.cta
__device__ __forceinline__ void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// fence.acq_rel.gpu
__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// atom.acq_rel.gpu.inc: adds one and wraps to zero after `last`; returns the value before
__device__ __forceinline__ u32 atomic_inc_wrap(u32* p, u32 last) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
    return old;
}

// atom.relaxed.gpu.inc, between fences
__device__ __forceinline__ u32 atomic_inc_wrap_relaxed(u32* p, u32 last) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(last) : "memory");
    return old;
}

// red.relaxed.gpu.max.u64
__device__ __forceinline__ void reduce_max_relaxed(u64* p, u64 value) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// atom.relaxed.gpu.cas; returns the value before
__device__ __forceinline__ u32 atomic_cas(u32* p, u32 expected, u32 desired) {
    u32 old;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
    return old;
}

// ld.global.nc, 16 bytes: for memory that nobody writes while the kernel runs
__device__ __forceinline__ uint4 load_constant_16(const void* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// ld.global, 16 bytes, kept in L1: for memory that nobody writes once the launch ahead has ended
__device__ __forceinline__ uint4 load_finished_16(const void* p) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// prefetch.global.L2: brings a line into L2
__device__ __forceinline__ void prefetch_line(u64 p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// ld.global, 16 bytes; not kept in L1, which another SM's or GPU's writes do not reach
__device__ __forceinline__ uint4 load_global_16(u64 p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

// st.global, 16 bytes
__device__ __forceinline__ void store_global_16(u64 p, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// ld.global, 4 bytes
__device__ __forceinline__ u32 load_global_4(u64 p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// ld.global.nc, 4 bytes
__device__ __forceinline__ u32 load_constant_4(u64 p) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// ld.global.nc, 2 bytes
__device__ __forceinline__ u32 load_constant_2(u64 p) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// st.global, 4 bytes
__device__ __forceinline__ void store_global_4(u64 p, u32 v) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ld.shared, 16 bytes
__device__ __forceinline__ uint4 load_shared_16(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
    return v;
}

// st.shared, 16 bytes
__device__ __forceinline__ void store_shared_16(u32 p, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// st.shared, 8 bytes
__device__ __forceinline__ void store_shared_8(u32 p, u32 first, u32 second) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(p), "r"(first), "r"(second) : "memory");
}

// st.shared, 4 bytes
__device__ __forceinline__ void store_shared_4(u32 p, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}

// stmatrix.x4: four 8x8 blocks of 16-bit elements; lane l gives the address of row l mod 8 of block
// l / 8
__device__ __forceinline__ void store_matrix_x4(u32 row, u32 b0, u32 b1, u32 b2, u32 b3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(b0), "r"(b1), "r"(b2), "r"(b3)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_x2(u32 row, u32 b0, u32 b1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(b0), "r"(b1) : "memory");
}

// The same of the transposed matrices: a lane's pair is of one column.
__device__ __forceinline__ void store_matrix_x4_transposed(u32 row, u32 b0, u32 b1, u32 b2, u32 b3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(b0), "r"(b1), "r"(b2), "r"(b3)
                 : "memory");
}

__device__ __forceinline__ void store_matrix_x2_transposed(u32 row, u32 b0, u32 b1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(b0), "r"(b1) : "memory");
}

__device__ __forceinline__ void store_matrix_x1_transposed(u32 row, u32 b0) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(row), "r"(b0) : "memory");
}

// %globaltimer, nanoseconds; only differences on one GPU mean anything
__device__ __forceinline__ u64 global_timer_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// nanosleep
__device__ __forceinline__ void sleep_ns(u32 ns) {
    asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

}  // namespace flux::ptx
