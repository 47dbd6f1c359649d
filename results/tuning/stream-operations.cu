// What operations of streams take on one GPU: nvcc -O2 -arch=sm_90 -o stream-operations stream-operations.cu -lcuda && ./stream-operations
// Medians of 60; two kernels of one warp read the clock before and after, which is 1.7 us without anything between (the line "nothing").
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cuda.h>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

using u64 = unsigned long long;

static void check(int code, const char* what) {
    if (code != 0) {
        std::printf("%s: error %d\n", what, code);
        std::exit(1);
    }
}
#define CHECK(call) check(static_cast<int>(call), #call)

__device__ u64 now() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Works for `before` nanoseconds, raises the flag, notes when, and works for `after` more.
__global__ void work(unsigned* flag, unsigned value, u64 before, u64 after, u64* raised) {
    const u64 start = now();
    while (now() - start < before) {}
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *raised = now();
        asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    }
    while (now() - start < before + after) {}
}

__global__ void stamp(u64* time) {
    if (threadIdx.x == 0) *time = now();
}

// Waits for the flag, at most a second.
__global__ void look(const unsigned* flag, unsigned value) {
    unsigned seen;
    const u64 start = now();
    do asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    while (static_cast<int>(seen - value) < 0 && now() - start < 1000000000);
}

int main() {
    constexpr u64 kBefore = 100000, kAfter = 60000;
    constexpr int kHeld = 200 * 1024;
    CHECK(cudaSetDevice(0));
    unsigned *host, *of_host, *of_device;
    u64* times;
    char* bytes;
    CHECK(cudaHostAlloc(&host, 4096, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(reinterpret_cast<void**>(&of_host), host, 0));
    CHECK(cudaMalloc(&of_device, 4096));
    CHECK(cudaMalloc(&times, 4096));
    CHECK(cudaMalloc(&bytes, 4096));
    CHECK(cudaMemset(of_device, 0, 4096));
    for (int i = 0; i < 1024; ++i) host[i] = 0;
    CHECK(cudaFuncSetAttribute(work, cudaFuncAttributeMaxDynamicSharedMemorySize, kHeld));
    cudaStream_t kernel, side;
    CHECK(cudaStreamCreateWithFlags(&kernel, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    cudaEvent_t there, back;
    CHECK(cudaEventCreateWithFlags(&there, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&back, cudaEventDisableTiming));
    unsigned value = 0;
    auto report = [&](const char* what, const std::function<void()>& enqueue) {
        std::vector<double> us;
        for (int i = 0; i < 60; ++i) {
            ++value;
            enqueue();
            CHECK(cudaDeviceSynchronize());
            u64 t[2];
            CHECK(cudaMemcpy(t, times, sizeof t, cudaMemcpyDeviceToHost));
            us.push_back(static_cast<double>(t[1] - t[0]) / 1000);
        }
        std::sort(us.begin(), us.end());
        std::printf("%-64s %5.1f us (%.1f to %.1f)\n", what, us[30], us[6], us[53]);
    };
    for (const bool all : {false, true}) {
        for (unsigned* flag : {of_host, of_device}) {
            const char* where = flag == of_host ? "host" : "device";
            char what[96];
            const auto begin = [&] { work<<<all ? 128 : 1, 384, all ? kHeld : 0, kernel>>>(flag, value, kBefore, kAfter, times); };
            std::snprintf(what, sizeof what, "flag in memory of the %s, %d SMs held, to the stream behind it", where, all ? 128 : 1);
            report(what, [&] {
                begin();
                CHECK(cuStreamWaitValue32(side, reinterpret_cast<CUdeviceptr>(flag), value, 0));
                stamp<<<1, 32, 0, side>>>(times + 1);
            });
            std::snprintf(what, sizeof what, "the same, awaited by a kernel of one warp");
            report(what, [&] {
                begin();
                look<<<1, 32, 0, side>>>(flag, value);
                stamp<<<1, 32, 0, side>>>(times + 1);
            });
        }
    }
    const auto between = [&](const char* what, const std::function<void()>& operation) {
        report(what, [&] {
            // Until all is enqueued.
            work<<<1, 32, 0, side>>>(of_device + 8, value, kBefore, 0, times + 2);
            stamp<<<1, 32, 0, side>>>(times);
            operation();
            stamp<<<1, 32, 0, side>>>(times + 1);
        });
    };
    const auto writes = [&](unsigned count, bool wide) {
        CUstreamBatchMemOpParams ops[8] = {};
        for (unsigned i = 0; i < count; ++i) {
            ops[i].writeValue.operation = wide ? CU_STREAM_MEM_OP_WRITE_VALUE_64 : CU_STREAM_MEM_OP_WRITE_VALUE_32;
            ops[i].writeValue.address = reinterpret_cast<CUdeviceptr>(of_host + 32 + 2 * i);
            ops[i].writeValue.value64 = value;
        }
        CHECK(cuStreamBatchMemOp(side, count, ops, 0));
    };
    between("nothing", [] {});
    between("a write of 32 bits", [&] { writes(1, false); });
    between("a write of 64 bits", [&] { writes(1, true); });
    between("three writes of 32 bits in a batch", [&] { writes(3, false); });
    between("eight writes of 64 bits in a batch", [&] { writes(8, true); });
    between("a copy of 4 bytes within the device", [&] { CHECK(cudaMemcpyAsync(bytes, bytes + 64, 4, cudaMemcpyDeviceToDevice, side)); });
    between("another stream, by an event, and back", [&] {
        CHECK(cudaEventRecord(there, side));
        CHECK(cudaStreamWaitEvent(kernel, there, 0));
        CHECK(cudaEventRecord(back, kernel));
        CHECK(cudaStreamWaitEvent(side, back, 0));
    });
}
