// Shared-memory barriers that count arrivals and bytes, and words with an explicit memory order
// (PTX ISA: mbarrier, ld, st).

#pragma once
#include "types.cuh"

namespace flux::ptx {

// cvta: the 32-bit shared-window address of a generic pointer.
__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// st.release.cta of a word of shared memory
__device__ __forceinline__ void store_release_cta_shared(u32 p, u64 v) {
    asm volatile("st.release.cta.shared::cta.u64 [%0], %1;" ::"r"(p), "l"(v) : "memory");
}

// ld.acquire.cta of a word of shared memory
__device__ __forceinline__ u64 load_acquire_cta_shared(u32 p) {
    u64 v;
    asm volatile("ld.acquire.cta.shared::cta.u64 %0, [%1];" : "=l"(v) : "r"(p) : "memory");
    return v;
}

// mbarrier.init
__device__ __forceinline__ void mbarrier_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: orders mbarrier.init before their use by the async proxy and other threads.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive, release at CTA scope
__device__ __forceinline__ void mbarrier_arrive(u32 bar) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(bar) : "memory");
}

// mbarrier.arrive.expect_tx: one arrival, and `bytes` more to be completed by bulk copies in this
// phase
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 bar, u32 bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(bar), "r"(bytes)
                 : "memory");
}

// Suspends a while where the architecture can.
#if __CUDA_ARCH__ >= 900
#define FLUX_TRY_WAIT "mbarrier.try_wait.parity"
#else
#define FLUX_TRY_WAIT "mbarrier.test_wait.parity"
#endif

// mbarrier.try_wait.parity or test_wait.parity, repeated until the phase of this parity has
// completed; acquire at CTA scope. Only threads of this CTA, and copies that they issued, complete
// these barriers; the waits among them are bounded in `wait.cuh`.
__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n" FLUX_TRY_WAIT
            ".shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}

#undef FLUX_TRY_WAIT

}  // namespace flux::ptx
