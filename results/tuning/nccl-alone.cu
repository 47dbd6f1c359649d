// Times what NCCL takes on the device for what ranks of two GPUs of one process tell each other before a kernel: from event to event behind a kernel that lets the host get ahead.
#include <nccl.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>
#define C(x) do { auto e = (x); if (e != 0) { printf("error %d at %s:%d\n", (int)e, __FILE__, __LINE__); exit(1); } } while (0)
__global__ void spin(long long ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while ((long long)(now - begin) < ns);
}
int main(int argc, char** argv) {
    cudaStream_t st[2]; cudaEvent_t a[2], b[2]; char *x[2], *y[2], *w[2], *host[2];
    for (int g = 0; g < 2; g++) {
        C(cudaSetDevice(g)); C(cudaStreamCreateWithFlags(&st[g], cudaStreamNonBlocking)); C(cudaEventCreate(&a[g])); C(cudaEventCreate(&b[g]));
        C(cudaMalloc(&x[g], 64 << 20)); C(cudaMalloc(&y[g], 128 << 20)); C(cudaMalloc(&w[g], 1 << 20)); C(cudaHostAlloc(&host[g], 4096, cudaHostAllocPortable | cudaHostAllocMapped));
    }
    struct Comms { int ctas; ncclComm_t c[2]; };
    auto make = [&](int ctas) {
        Comms r{ctas}; ncclUniqueId id; C(ncclGetUniqueId(&id)); C(ncclGroupStart());
        for (int g = 0; g < 2; g++) {
            C(cudaSetDevice(g)); ncclConfig_t cfg = NCCL_CONFIG_INITIALIZER;
            if (ctas) { cfg.minCTAs = ctas; cfg.maxCTAs = ctas; }
            C(ncclCommInitRankConfig(&r.c[g], 2, id, g, &cfg));
        }
        C(ncclGroupEnd()); return r;
    };
    size_t sizes[] = {524288, 786432, 1572864, 3145728, 6291456, 12582912};
    struct Way { const char* name; std::function<void(ncclComm_t, int, size_t)> f; };
    auto told = [&](ncclComm_t c, int g) { C(ncclSend(host[g], 8, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(host[g] + 64, 8, ncclInt8, 1 - g, c, st[g])); };
    auto word = [&](ncclComm_t c, int g) { C(ncclSend(w[g], 4, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(w[g] + 128, 4, ncclInt8, 1 - g, c, st[g])); };
    auto chunk = [&](ncclComm_t c, int g, size_t n) { C(ncclSend(x[g], n, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(y[g], n, ncclInt8, 1 - g, c, st[g])); };
    Way ways[] = {
        {"allgather", [&](ncclComm_t c, int g, size_t n) { C(ncclAllGather(x[g], y[g], n, ncclInt8, c, st[g])); }},
        {"reducescatter", [&](ncclComm_t c, int g, size_t n) { C(ncclReduceScatter(x[g], y[g], n / 2, ncclBfloat16, ncclSum, c, st[g])); }},
        {"chunk", [&](ncclComm_t c, int g, size_t n) { chunk(c, g, n); }},
        {"told+chunk", [&](ncclComm_t c, int g, size_t n) { told(c, g); chunk(c, g, n); }},
        {"told+chunk+word", [&](ncclComm_t c, int g, size_t n) { told(c, g); chunk(c, g, n); word(c, g); }},
    };
    for (int ctas : {0, 8, 16, 32, 64}) {
        size_t free_before, free_after, total; C(cudaSetDevice(0)); C(cudaMemGetInfo(&free_before, &total));
        Comms cc = make(ctas);
        C(ncclGroupStart()); for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); chunk(cc.c[g], g, 1 << 20); } C(ncclGroupEnd());
        for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaStreamSynchronize(st[g])); }
        C(cudaSetDevice(0)); C(cudaMemGetInfo(&free_after, &total)); printf("%2d ctas  %zu MiB for messages\n", ctas, (free_before - free_after) >> 20);
        for (auto& way : ways) {
            printf("%2d ctas  %-16s", ctas, way.name);
            for (size_t n : sizes) {
                std::vector<float> times;
                for (int i = 0; i < 24; i++) {
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); spin<<<1, 1, 0, st[g]>>>(400000); C(cudaEventRecord(a[g], st[g])); }
                    C(ncclGroupStart());
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); way.f(cc.c[g], g, n); }
                    C(ncclGroupEnd());
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaEventRecord(b[g], st[g])); }
                    float t[2]; for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaStreamSynchronize(st[g])); C(cudaEventElapsedTime(&t[g], a[g], b[g])); }
                    if (i >= 4) times.push_back(std::max(t[0], t[1]) * 1000);
                }
                std::sort(times.begin(), times.end());
                printf("  %5.1f", times[times.size() / 2]);
            }
            printf("\n"); fflush(stdout);
        }
        C(cudaSetDevice(0)); C(cudaMemGetInfo(&free_after, &total));
        printf("%2d ctas  %zu MiB of device memory\n", ctas, (free_before - free_after) >> 20);
        for (int g = 0; g < 2; g++) C(ncclCommDestroy(cc.c[g]));
    }
}
