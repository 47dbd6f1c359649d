// Asynchronous copies of a thread from global to shared memory (PTX ISA: cp.async).

#pragma once
#include "types.cuh"

namespace flux::ptx {

// cp.async.cg, 16 bytes, of which the first `bytes` are read and the others are zero. It passes L1
// by, and a miss brings 256 bytes into L2: this step's line and the next one's.
__device__ __forceinline__ void async_copy_16(u32 dst, u64 src, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// cp.async.mbarrier.arrive.noinc: arrives when all earlier copies of this thread are complete
__device__ __forceinline__ void async_copies_arrive(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

}  // namespace flux::ptx
