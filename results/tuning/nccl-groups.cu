// Times groups of NCCL on two GPUs of one process: end to end by events, one group at a time, and back to back.
#include <nccl.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <functional>
#include <thread>
#include <chrono>
#define C(x) do { auto e = (x); if (e != 0) { printf("error %d at %s:%d\n", (int)e, __FILE__, __LINE__); exit(1); } } while (0)
int main() {
    int version; ncclGetVersion(&version); printf("NCCL %d\n", version);
    cudaStream_t st[2]; cudaEvent_t a[2], b[2]; char *x[2], *y[2], *w[2]; char* host[2];
    for (int g = 0; g < 2; g++) {
        C(cudaSetDevice(g)); C(cudaStreamCreateWithFlags(&st[g], cudaStreamNonBlocking)); C(cudaEventCreate(&a[g])); C(cudaEventCreate(&b[g]));
        C(cudaMalloc(&x[g], 64 << 20)); C(cudaMalloc(&y[g], 128 << 20)); C(cudaMalloc(&w[g], 1 << 20)); C(cudaHostAlloc(&host[g], 4096, cudaHostAllocPortable | cudaHostAllocMapped));
    }
    struct Comms { const char* name; ncclComm_t c[2]; };
    auto make = [&](const char* name, int ctas) {
        Comms r{name}; ncclUniqueId id; C(ncclGetUniqueId(&id)); C(ncclGroupStart());
        for (int g = 0; g < 2; g++) {
            C(cudaSetDevice(g)); ncclConfig_t cfg = NCCL_CONFIG_INITIALIZER;
            if (ctas) { cfg.minCTAs = ctas; cfg.maxCTAs = ctas; }
            C(ncclCommInitRankConfig(&r.c[g], 2, id, g, &cfg));
        }
        C(ncclGroupEnd()); return r;
    };
    std::vector<Comms> comms = {make("default", 0), make("8 ctas", 8), make("16 ctas", 16), make("32 ctas", 32)};
    size_t sizes[] = {262144, 786432, 1572864, 6291456};
    struct Way { const char* name; std::function<void(ncclComm_t, int, size_t)> f; };
    auto told = [&](ncclComm_t c, int g, bool on_host) {
        C(ncclSend(w[g], 8, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(on_host ? host[g] : w[g] + 64, 8, ncclInt8, 1 - g, c, st[g]));
    };
    auto word = [&](ncclComm_t c, int g) { C(ncclSend(w[g], 4, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(w[g] + 128, 4, ncclInt8, 1 - g, c, st[g])); };
    auto chunk = [&](ncclComm_t c, int g, size_t n) { C(ncclSend(x[g], n, ncclInt8, 1 - g, c, st[g])); C(ncclRecv(y[g], n, ncclInt8, 1 - g, c, st[g])); };
    auto self = [&](ncclComm_t c, int g, size_t n) { C(ncclSend(x[g], n, ncclInt8, g, c, st[g])); C(ncclRecv(y[g] + (64 << 20), n, ncclInt8, g, c, st[g])); };
    Way ways[] = {
        {"allgather", [&](ncclComm_t c, int g, size_t n) { C(ncclAllGather(x[g], y[g], n, ncclInt8, c, st[g])); }},
        {"allgather told+rows", [&](ncclComm_t c, int g, size_t n) { C(ncclAllGather(w[g], host[g], 8, ncclInt8, c, st[g])); C(ncclAllGather(x[g], y[g], n, ncclInt8, c, st[g])); }},
        {"alltoall", [&](ncclComm_t c, int g, size_t n) { chunk(c, g, n); self(c, g, n); }},
        {"chunk", [&](ncclComm_t c, int g, size_t n) { chunk(c, g, n); }},
        {"chunk+word", [&](ncclComm_t c, int g, size_t n) { chunk(c, g, n); word(c, g); }},
        {"told+chunk", [&](ncclComm_t c, int g, size_t n) { told(c, g, false); chunk(c, g, n); }},
        {"told(host)+chunk", [&](ncclComm_t c, int g, size_t n) { told(c, g, true); chunk(c, g, n); }},
        {"told(host)+chunk+word", [&](ncclComm_t c, int g, size_t n) { told(c, g, true); chunk(c, g, n); word(c, g); }},
        {"told alone", [&](ncclComm_t c, int g, size_t) { told(c, g, false); }},
        {"allgather 8 bytes", [&](ncclComm_t c, int g, size_t) { C(ncclAllGather(w[g], w[g] + 256, 8, ncclInt8, c, st[g])); }},
    };
    for (auto& cc : comms) {
        for (auto& way : ways) {
            printf("%-8s %-22s", cc.name, way.name);
            for (size_t n : sizes) {
                std::vector<float> one;
                for (int i = 0; i < 40; i++) {
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaStreamSynchronize(st[g])); }
                    C(ncclGroupStart());
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); way.f(cc.c[g], g, n); }
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaEventRecord(a[g], st[g])); }
                    C(ncclGroupEnd());
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaEventRecord(b[g], st[g])); }
                    for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaStreamSynchronize(st[g])); }
                    float t[2]; for (int g = 0; g < 2; g++) C(cudaEventElapsedTime(&t[g], a[g], b[g]));
                    if (i >= 10) one.push_back(std::max(t[0], t[1]) * 1000);
                }
                // back to back: 50 groups behind each other, the stream held by a first event
                for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaEventRecord(a[g], st[g])); }
                for (int i = 0; i < 50; i++) { C(ncclGroupStart()); for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); way.f(cc.c[g], g, n); } C(ncclGroupEnd()); }
                for (int g = 0; g < 2; g++) { C(cudaSetDevice(g)); C(cudaEventRecord(b[g], st[g])); C(cudaStreamSynchronize(st[g])); }
                float t; C(cudaEventElapsedTime(&t, a[0], b[0]));
                std::sort(one.begin(), one.end());
                printf("  %7zu: one %5.1f each %5.1f", n, one[one.size() / 2], t * 1000 / 50);
            }
            printf("\n"); fflush(stdout);
        }
    }
}
