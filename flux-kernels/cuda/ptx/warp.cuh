// Warps and warpgroups: election, register budgets and place (PTX ISA: elect.sync, setmaxnreg,
// %smid), and transposed fragments (movmatrix).

#pragma once
#include "types.cuh"

namespace flux::ptx {

// elect.sync: true in one thread of the (converged) warp
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// A copy of an accumulator's bits. Stored under a branch straight from a wgmma's accumulators, they
// would make the compiler serialise the wgmma.
__device__ __forceinline__ u32 copied_bits(float accumulator) {
    u32 v;
    asm volatile("mov.b32 %0, %1;" : "=r"(v) : "f"(accumulator));
    return v;
}

// Keeps the compiler from moving accesses of a register across this.
__device__ __forceinline__ void pin_register(float& r) {
    asm volatile("" : "+f"(r)::"memory");
}

// A copy made here: what follows from it is not computed ahead of a loop and kept through it.
__device__ __forceinline__ u32 copied_here(u32 value) {
    u32 v;
    asm volatile("mov.b32 %0, %1;" : "=r"(v) : "r"(value));
    return v;
}

__device__ __forceinline__ u64 copied_here(u64 value) {
    u64 v;
    asm volatile("mov.b64 %0, %1;" : "=l"(v) : "l"(value));
    return v;
}

// shfl.sync.idx: a lane's value, in all lanes of the (converged) warp
__device__ __forceinline__ u32 from_lane(u32 v, u32 lane) {
    return __shfl_sync(0xFFFFFFFFu, v, lane);
}

// bar.sync; the number is an immediate, since with a register a CTA reserves all sixteen barriers
template <u32 Barrier, u32 Threads>
__device__ __forceinline__ void named_barrier_sync() {
    asm volatile("bar.sync %0, %1;" ::"n"(Barrier), "n"(Threads) : "memory");
}

// bar.red.and: whether the predicate holds in all threads that take part
template <u32 Barrier, u32 Threads>
__device__ __forceinline__ bool named_barrier_all(bool holds) {
    u32 all;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.and.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(all)
                 : "r"(static_cast<u32>(holds)), "n"(Barrier), "n"(Threads)
                 : "memory");
    return all != 0;
}

// setmaxnreg.dec
template <u32 Registers>
__device__ __forceinline__ void release_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// setmaxnreg.inc
template <u32 Registers>
__device__ __forceinline__ void acquire_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// trap: ends the grid with an error
__device__ __forceinline__ void trap() {
    asm volatile("trap;");
}

// %ctaid.x, read anew at each use
__device__ __forceinline__ u32 cta_of_grid() {
    u32 id;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(id));
    return id;
}

// %smid: where the CTA runs
__device__ __forceinline__ u32 multiprocessor() {
    u32 id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}

// movmatrix.trans: transposes an 8x8 matrix of 16-bit elements, of which each lane holds a pair
__device__ __forceinline__ u32 transpose_matrix(u32 pair) {
    u32 v;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
    return v;
}

}  // namespace flux::ptx
