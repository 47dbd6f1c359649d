// How many cycles a step of 64 along k takes a consumer that is alone on its multiprocessor, and one of two: a tile of 64 rows each, operands always there. lone-consumer.txt has the command.
#include <cstdio>
#include <cstdlib>
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
using namespace flux;
constexpr u32 kStageBytes = 48 * 1024, kStages = 4;

__device__ __forceinline__ long long cycles() { long long t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory"); return t; }

// Groups: in which a stage of four products is issued. Pending: groups that may stay under way at each wait. Looks: at a barrier that is complete, before each stage. Fences: wgmma.fence before each stage.
template <u32 N, u32 Groups, u32 Pending, bool Looks, bool Fences>
__global__ void __launch_bounds__(384, 1) lone(const uint4* fill, long long* out, float* sink, u32 steps, u32 active) {
    extern __shared__ unsigned char raw[];
    const u32 base = (ptx::shared_address(raw) + 1023) & ~1023u;
    const u32 bars = base + kStages * kStageBytes;
    for (u32 i = threadIdx.x; i < kStages * kStageBytes / 16; i += 384) ptx::store_shared_16(base + i * 16, fill[i]);
    if (threadIdx.x < kStages) { ptx::mbarrier_init(bars + 8 * threadIdx.x, 1); }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < kStages) ptx::mbarrier_arrive(bars + 8 * threadIdx.x);
    __syncthreads();
    const u32 wg = ptx::from_lane(threadIdx.x / 128, 0);
    if (wg == 0) { ptx::release_registers<56>(); return; }
    ptx::acquire_registers<224>();
    const u32 index = wg - 1;
    if (index >= active) return;
    const u32 first_a = ptx::from_lane(ptx::k_major_128b_descriptor(base + index * 8192), 0);
    const u32 first_b = ptx::from_lane(ptx::k_major_128b_descriptor(base + 16384), 0);
    float acc[N / 2] = {};
    u32 stage = 0;
    constexpr u32 kGroup = 4 / Groups;
    ptx::pin_registers(acc);
    const long long begin = cycles();
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
        if constexpr (Looks) ptx::mbarrier_wait(bars + 8 * stage, 0);
        const u32 a = ptx::advance_descriptor(first_a, stage * kStageBytes), b = ptx::advance_descriptor(first_b, stage * kStageBytes);
        ptx::pin_registers(acc);
        if constexpr (Fences) ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {
            ptx::Wgmma<N, true>::mma(acc, ptx::advance_descriptor(a, k * 32), ptx::advance_descriptor(b, k * 32), 1);
            if ((k + 1) % kGroup != 0) continue;
            ptx::wgmma_commit();
            ptx::pin_registers(acc);
            ptx::wgmma_wait<Pending>();
            ptx::pin_registers(acc);
        }
        if (++stage == kStages) stage = 0;
    }
    ptx::wgmma_wait<0>();
    ptx::pin_registers(acc);
    const long long end = cycles();
    if (threadIdx.x % 128 == 0) out[blockIdx.x * 2 + index] = end - begin;
    float sum = 0;
    for (u32 i = 0; i < N / 2; ++i) sum += acc[i];
    sink[blockIdx.x * 384 + threadIdx.x] = sum;
}

template <u32 N, u32 G, u32 P, bool L, bool F>
void run(const uint4* fill, long long* out, float* sink, const char* data) {
    auto* kernel = lone<N, G, P, L, F>;
    const int bytes = kStages * kStageBytes + 64 + 1024;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    const u32 steps = 512;
    for (u32 active = 1; active <= 2; ++active) {
        for (int blocks : {1, 132}) {
            for (int i = 0; i < 2; ++i) kernel<<<blocks, 384, bytes>>>(fill, out, sink, steps, active);
            cudaError_t e = cudaDeviceSynchronize();
            if (e != cudaSuccess) { printf("%s\n", cudaGetErrorString(e)); exit(1); }
            long long t[2];
            cudaMemcpy(t, out, sizeof t, cudaMemcpyDeviceToHost);
            printf("n %3u  %s  groups %u  pending %u  looks %d  fences %d  consumers %u  CTAs %3d: %7.1f cycles a step (%u alone at the full rate)\n", N, data, G, P, L, F, active, blocks,
                   double(t[0]) / steps, 2 * N);
        }
    }
}

int main() {
    uint4* fill; long long* out; float* sink;
    const size_t n = kStages * kStageBytes;
    cudaMalloc(&fill, n); cudaMalloc(&out, 264 * 8); cudaMalloc(&sink, 132 * 384 * 4);
    unsigned short* host = (unsigned short*)malloc(n);
    for (int random = 0; random < 2; ++random) {
        for (size_t i = 0; i < n / 2; ++i) host[i] = random ? (unsigned short)(0x3c00 + (rand() & 0x83ff)) : 0;
        cudaMemcpy(fill, host, n, cudaMemcpyHostToDevice);
        const char* d = random ? "random" : "zeros ";
        run<256, 2, 1, true, true>(fill, out, sink, d);    // as the kernel
        run<256, 1, 1, true, true>(fill, out, sink, d);    // one group
        run<256, 2, 2, true, true>(fill, out, sink, d);
        run<256, 2, 3, true, true>(fill, out, sink, d);
        run<256, 4, 3, true, true>(fill, out, sink, d);
        run<256, 2, 0, true, true>(fill, out, sink, d);    // drained at each group: what a drain costs
        run<256, 1, 0, true, true>(fill, out, sink, d);
        run<256, 2, 1, false, true>(fill, out, sink, d);   // without the look at a barrier
        run<128, 2, 1, true, true>(fill, out, sink, d);
        run<128, 1, 1, true, true>(fill, out, sink, d);
        run<192, 1, 1, true, true>(fill, out, sink, d);
    }
}
