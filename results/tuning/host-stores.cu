// What stores to memory of the host cost the loads beside them: CTAs stream `w` through a ring in shared memory by bulk copies, as a GEMM's producers do, and rows of tiles leave for pinned
// memory of the host, 64 rows of 192 bytes from each CTA in the middle and at the end of its reads. Who stores them:
// 0 nobody; 1 a warp of each CTA, so many CTAs at once (0: all); 2 so many CTAs that do nothing else, which are handed them through this GPU's memory; 3 the same, each row by a bulk copy.
#include <cstdint>
#include <cstdio>
#include <algorithm>
#include <vector>
#include <cuda_runtime.h>
#define CHECK(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)
typedef unsigned long long u64; typedef uint32_t u32;
constexpr u32 STAGES = 6, STAGE = 28672, ROWS = 64, ROW = 192, TILE = ROWS * ROW, VECTORS = TILE / 16, PER_ROW = ROW / 16, PITCH = 24576;
struct P { const char* w; u64 steps; char* host; char* device; u32* ready; u32* taken; u32* done; u64* times; u32 mode, limit, readers, waves; };
__device__ u32 sa(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void mb_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(b), "r"(n)); }
__device__ void mb_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(b), "r"(n) : "memory"); }
__device__ void mb_wait(u32 b, u32 ph) { u32 ok; do { asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}" : "=r"(ok) : "r"(b), "r"(ph) : "memory"); } while (!ok); }
__device__ void bulk_load(u32 dst, const void* src, u32 n, u32 b) { asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(dst), "l"(src), "r"(n), "r"(b) : "memory"); }
__device__ void bulk_store(void* dst, u32 src, u32 n) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(dst), "r"(src), "r"(n) : "memory"); }
__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
__device__ u32 ld_acq(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
// Place of a tile's row in the host's memory: tiles side by side in rows of 24 KiB.
__device__ char* place(char* host, u32 tile, u32 row) { return host + (u64)(tile / 128) * ROWS * PITCH + (u64)row * PITCH + (tile % 128) * ROW; }
extern __shared__ __align__(1024) unsigned char sm[];
__global__ void __launch_bounds__(256, 1) kernel(P p) {
    __shared__ u64 full[STAGES]; __shared__ volatile u32 at;
    const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
    const bool reads = blockIdx.x < p.readers;
    if (t == 0) { for (u32 i = 0; i < STAGES; ++i) mb_init(sa(&full[i]), 1); at = 0; asm volatile("fence.mbarrier_init.release.cluster;"); p.times[blockIdx.x * 3] = now(); }
    __syncthreads();
    const u32 base = sa(sm);
    if (reads) {
        const u32 n = (u32)((p.steps + p.readers - 1 - blockIdx.x) / p.readers);
        if (warp == 0 && lane == 0) {
            u32 issued = 0;
            for (u32 i = 0; i < n; ++i) {
                for (; issued < n && issued < i + STAGES; ++issued) {
                    const u32 s = issued % STAGES;
                    mb_expect(sa(&full[s]), STAGE);
                    bulk_load(base + s * STAGE, p.w + ((u64)issued * p.readers + blockIdx.x) * STAGE, STAGE, sa(&full[s]));
                }
                mb_wait(sa(&full[i % STAGES]), i / STAGES & 1);
                at = i + 1;
            }
            p.times[blockIdx.x * 3 + 1] = now();
        } else if (warp == 1 && p.mode != 0) {
            const u32 out = base + STAGES * STAGE;
            for (u32 wave = 0; wave < p.waves; ++wave) {
                while (at < n * (wave + 1) / p.waves) __nanosleep(50);
                __syncwarp();
                const u32 tile = wave * p.readers + blockIdx.x;
                if (p.mode == 1) {
                    u32 ticket = 0;
                    if (p.limit != 0) {
                        if (lane == 0) { ticket = atomicAdd(p.taken, 1); while ((int)(ticket - ld_acq(p.done)) >= (int)p.limit) __nanosleep(100); }
                        __syncwarp();
                    }
#pragma unroll 4
                    for (u32 v = lane; v < VECTORS; v += 32) {
                        uint4 x; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(out + v * 16));
                        *(uint4*)(place(p.host, tile, v / PER_ROW) + v % PER_ROW * 16) = x;
                    }
                    __threadfence_system(); __syncwarp();
                    if (lane == 0) atomicAdd(p.done, 1);
                } else if (lane == 0) {
                    bulk_store(p.device + (u64)tile * TILE, out, TILE);
                    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
                    __threadfence();
                    asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p.ready + tile), "r"(1u) : "memory");
                }
            }
            if (lane == 0) p.times[blockIdx.x * 3 + 2] = now();
        }
    } else {
        const u32 movers = gridDim.x - p.readers, me = blockIdx.x - p.readers, tiles = p.waves * p.readers;
        if (p.mode == 2) {
            // Each warp a tile.
            for (u32 tile = me * 8 + warp; tile < tiles; tile += movers * 8) {
                while (ld_acq(p.ready + tile) == 0) __nanosleep(100);
                __syncwarp();
                const uint4* src = (const uint4*)(p.device + (u64)tile * TILE);
#pragma unroll 8
                for (u32 v = lane; v < VECTORS; v += 32) *(uint4*)(place(p.host, tile, v / PER_ROW) + v % PER_ROW * 16) = __ldcg(src + v);
            }
        } else if (lane == 0) {
            u32 ph = 0; const u32 room = base + warp * 24576;
            if (warp < 8) for (u32 tile = me * 8 + warp; tile < tiles; tile += movers * 8, ph ^= 1) {
                while (ld_acq(p.ready + tile) == 0) __nanosleep(100);
                asm volatile("fence.proxy.async.global;" ::: "memory");
                __shared__ u64 there[8];
                if (ph == 0 && tile == me * 8 + warp) { mb_init(sa(&there[warp]), 1); asm volatile("fence.mbarrier_init.release.cluster;"); }
                mb_expect(sa(&there[warp]), TILE);
                bulk_load(room, p.device + (u64)tile * TILE, TILE, sa(&there[warp]));
                mb_wait(sa(&there[warp]), ph);
                for (u32 r = 0; r < ROWS; ++r) bulk_store(place(p.host, tile, r), room + r * ROW, ROW);
                asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
            }
        }
        __threadfence_system();
        __syncthreads();
        if (t == 0) { p.times[blockIdx.x * 3 + 1] = p.times[blockIdx.x * 3]; p.times[blockIdx.x * 3 + 2] = now(); }
    }
}
int main() {
    P p{}; const u64 w = 604ull << 20; char* wp;
    CHECK(cudaMalloc(&wp, w)); CHECK(cudaMemset(wp, 1, w)); p.w = wp;
    CHECK(cudaHostAlloc(&p.host, 64 << 20, cudaHostAllocMapped)); CHECK(cudaMalloc(&p.device, 64 << 20));
    CHECK(cudaMalloc(&p.ready, 4096 * 4)); CHECK(cudaMalloc(&p.taken, 256)); p.done = p.taken + 32; CHECK(cudaMalloc(&p.times, 132 * 24));
    const u32 bytes = STAGES * STAGE + 2 * TILE;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 8 * 24576 > bytes ? 8 * 24576 : bytes));
    struct { u32 mode, limit; } ways[] = {{0, 0}, {1, 0}, {1, 16}, {1, 43}, {1, 86}, {2, 1}, {2, 2}, {2, 4}, {2, 8}, {2, 16}, {3, 1}, {3, 2}, {3, 4}, {3, 8}};
    for (u64 mb : {604ull, 302ull, 151ull}) for (u32 waves : {2u, 4u}) for (auto way : ways) {
        p.mode = way.mode; p.limit = way.limit; p.waves = waves; p.steps = (mb << 20) / STAGE; p.readers = way.mode >= 2 ? 132 - way.limit : 132;
        std::vector<float> reads, stores;
        for (int i = 0; i < 15; ++i) {
            CHECK(cudaMemset(p.ready, 0, 4096 * 4)); CHECK(cudaMemset(p.taken, 0, 256)); CHECK(cudaMemset(p.times, 0, 132 * 24));
            kernel<<<132, 256, 8 * 24576 > bytes ? 8 * 24576 : bytes>>>(p);
            CHECK(cudaDeviceSynchronize());
            u64 t[132 * 3]; CHECK(cudaMemcpy(t, p.times, sizeof t, cudaMemcpyDeviceToHost));
            u64 first = ~0ull, read = 0, stored = 0;
            for (int b = 0; b < 132; ++b) { first = std::min(first, t[b * 3]); read = std::max(read, t[b * 3 + 1]); stored = std::max(stored, t[b * 3 + 2]); }
            if (i >= 3) { reads.push_back((read - first) / 1e3); stores.push_back(stored ? (stored - first) / 1e3 : 0); }
        }
        auto med = [](std::vector<float> v) { std::sort(v.begin(), v.end()); return v[v.size() / 2]; };
        printf("w %3llu MiB, %u tiles a CTA, %.2f MB leave, mode %u of %3u: read after %6.1f us, stored after %6.1f us\n", mb, waves, waves * p.readers * TILE / 1e6, way.mode, way.limit, med(reads), med(stores));
    }
}
