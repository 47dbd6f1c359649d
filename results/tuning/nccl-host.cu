// What the host takes to put a group of NCCL's messages on a stream: two GPUs of one process, a thread and a communicator each, which blocks or does not.
#include <nccl.h>
#include <cuda_runtime.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define C(x) do { int e = (int)(x); if (e != 0 && e != ncclInProgress) { printf("error %d at %s:%d\n", e, __FILE__, __LINE__); exit(1); } } while (0)
using Clock = std::chrono::steady_clock;
static double us(Clock::time_point a) { return std::chrono::duration<double, std::micro>(Clock::now() - a).count(); }
static std::atomic<int> arrived{0};
static void meet() { int n = arrived.fetch_add(1) / 2; while (arrived.load() < 2 * (n + 1)) sched_yield(); }
static void show(const char* what, std::vector<double> t) {
    std::sort(t.begin(), t.end());
    auto at = [&](double q) { return t[(size_t)(q * (t.size() - 1))]; };
    printf("%-34s p10 %7.1f median %7.1f p90 %7.1f p99 %7.1f most %7.1f us\n", what, at(.1), at(.5), at(.9), at(.99), at(1)); fflush(stdout);
}
static void ready(ncclComm_t c) {
    ncclResult_t s = ncclInProgress;
    while (s == ncclInProgress) { C(ncclCommGetAsyncError(c, &s)); if (s == ncclInProgress) sched_yield(); }
    C(s);
}
enum Kind { BLOCKING, NOT_BLOCKING, SPLIT, SHARED };
static ncclUniqueId id[4];
static int first = 0, last = 3;
static void rank(int g) {
    C(cudaSetDevice(g));
    cudaStream_t st; C(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
    char *x, *y; C(cudaMalloc(&x, 8 << 20)); C(cudaMalloc(&y, 8 << 20));
    const char* names[] = {"blocking", "not blocking", "blocking, split of not blocking", "blocking, split of not blocking, shared"};
    for (int kind = first; kind <= last; kind++) {
        ncclComm_t c, parent = nullptr; ncclConfig_t cfg = NCCL_CONFIG_INITIALIZER;
        cfg.minCTAs = cfg.maxCTAs = 8; cfg.blocking = kind == BLOCKING ? 1 : 0; cfg.splitShare = kind == SHARED ? 1 : 0;
        auto began = Clock::now();
        C(ncclCommInitRankConfig(&c, 2, id[kind], g, &cfg)); ready(c);
        double init = us(began), split = 0;
        if (kind >= SPLIT) {
            began = Clock::now();
            parent = c; c = nullptr; cfg.blocking = 1;
            C(ncclCommSplit(parent, 0, g, &c, &cfg)); ready(parent);
            split = us(began);
        }
        auto group = [&] {
            C(ncclGroupStart());
            C(ncclSend(x, 1 << 20, ncclInt8, 1 - g, c, st)); C(ncclRecv(y, 1 << 20, ncclInt8, 1 - g, c, st));
            C(ncclSend(x, 4, ncclInt8, 1 - g, c, st)); C(ncclRecv(y + (4 << 20), 4, ncclInt8, 1 - g, c, st));
            C(ncclGroupEnd());
            if (kind == NOT_BLOCKING) ready(c);
        };
        for (int i = 0; i < 20; i++) group();
        C(cudaStreamSynchronize(st));
        std::vector<double> one, eight;
        for (int i = 0; i < 300; i++) {
            meet(); auto t = Clock::now(); group(); one.push_back(us(t)); C(cudaStreamSynchronize(st));
        }
        for (int i = 0; i < 100; i++) {
            meet(); auto t = Clock::now(); for (int j = 0; j < 8; j++) group(); eight.push_back(us(t) / 8); C(cudaStreamSynchronize(st));
        }
        if (g == 0) {
            printf("%s: made in %.0f us, split in %.0f\n", names[kind], init, split);
            show("  a group", one); show("  each of eight groups", eight);
        }
        meet();
        if (kind == SHARED) {
            // The peer never comes: groups pile up until the host waits in one. Whoever aborts the parent lets it go.
            if (g == 1) { meet(); printf("shared: the peer stays away\n"); C(ncclCommAbort(parent)); C(ncclCommAbort(c)); return; }
            std::atomic<int> done{0}; std::atomic<bool> stop{false};
            std::thread caller([&] {
                C(cudaSetDevice(0));
                while (!stop && done < 20000) {
                    if (ncclGroupStart() || ncclSend(x, 4, ncclInt8, 1, c, st) || ncclRecv(y, 4, ncclInt8, 1, c, st)) { printf("refused after %d\n", done.load()); (void)ncclGroupEnd(); return; }
                    ncclResult_t r = ncclGroupEnd();
                    if (r) { printf("group %d ended with %d\n", done.load(), r); return; }
                    done++;
                }
            });
            int seen = -1, still = 0;
            while (still < 10 && done < 20000) { usleep(50000); int now = done; still = now == seen ? still + 1 : 0; seen = now; }
            printf("shared: the host waits in group %d\n", done.load()); fflush(stdout);
            stop = true; auto t = Clock::now();
            std::thread aborter([&] { C(cudaSetDevice(0)); ncclResult_t r = ncclCommAbort(parent); printf("shared: parent aborted (%d) after %.0f us\n", r, us(t)); fflush(stdout); });
            caller.join(); printf("shared: the caller was let go after %.0f us, group %d\n", us(t), done.load()); fflush(stdout);
            C(cudaStreamSynchronize(st)); printf("shared: the stream was empty after %.0f us\n", us(t)); fflush(stdout);
            aborter.join();
            meet();
            ncclResult_t r = ncclCommAbort(c); printf("shared: child aborted (%d) after %.0f us\n", r, us(t)); fflush(stdout);
            return;
        }
        if (kind == SPLIT) { C(ncclCommAbort(parent)); C(ncclCommAbort(c)); continue; }
        if (kind == NOT_BLOCKING) { C(ncclCommFinalize(c)); ready(c); }
        C(ncclCommDestroy(c));
    }
}
int main(int argc, char** argv) {
    if (argc > 1) first = last = atoi(argv[1]);
    int version; ncclGetVersion(&version); printf("NCCL %d\n", version);
    for (auto& i : id) C(ncclGetUniqueId(&i));
    std::vector<double> made, slept, yielded;
    for (int i = 0; i < 300; i++) {
        auto t = Clock::now(); pthread_t p;
        pthread_create(&p, nullptr, [](void*) -> void* { return nullptr; }, nullptr); pthread_join(p, nullptr); made.push_back(us(t));
        t = Clock::now(); usleep(1); slept.push_back(us(t));
        t = Clock::now(); sched_yield(); yielded.push_back(us(t));
    }
    show("a thread made and joined", made); show("usleep(1)", slept); show("sched_yield", yielded);
    std::thread a(rank, 0), b(rank, 1); a.join(); b.join();
}
