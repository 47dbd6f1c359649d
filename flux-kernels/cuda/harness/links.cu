// Kernels that measure links: bulk copies between devices, and the latency of a signal.
#include "abi.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

using namespace flux;

// Copies `bytes` from `src` to `dst`, either of which may be a peer's, in pieces through a ring of
// shared memory; one thread of each CTA. `piece` is a multiple of 16, and `ring` pieces fit the
// dynamic shared memory beside `ring` barriers.
extern "C" __global__ void flux_bulk_copy(const __grid_constant__ BulkCopy p) {
    extern __shared__ __align__(128) unsigned char shared[];
    if (threadIdx.x != 0) return;
    const u64 dst = p.dst, src = p.src, bytes = p.bytes;
    const u32 piece = p.piece, ring = p.ring;
    const u32 base = ptx::shared_address(shared);
    const u32 bars = base + ring * piece;
    for (u32 i = 0; i < ring; ++i) ptx::mbarrier_init(bars + 8 * i, 1);
    ptx::fence_mbarrier_init();
    const u64 pieces = (bytes + piece - 1) / piece;
    const u64 mine = pieces > blockIdx.x ? (pieces - blockIdx.x - 1) / gridDim.x + 1 : 0;
    const auto offset = [&](u64 j) { return (blockIdx.x + j * gridDim.x) * piece; };
    const auto size = [&](u64 j) { return static_cast<u32>(bytes - offset(j) < piece ? bytes - offset(j) : piece); };
    const auto load = [&](u64 j) {
        const u32 s = static_cast<u32>(j % ring);
        ptx::mbarrier_arrive_expect_tx(bars + 8 * s, size(j));
        ptx::bulk_load(base + s * piece, src + offset(j), size(j), bars + 8 * s);
    };
    const u32 ahead = ring / 2;
    for (u64 j = 0; j < ahead && j < mine; ++j) load(j);
    for (u64 j = 0; j < mine; ++j) {
        const u32 s = static_cast<u32>(j % ring);
        ptx::mbarrier_wait(bars + 8 * s, static_cast<u32>(j / ring) & 1);
        ptx::bulk_store(dst + offset(j), base + s * piece, size(j));
        ptx::bulk_commit();
        if (j + ahead < mine) {
            ptx::bulk_wait_read<1>();
            load(j + ahead);
        }
    }
    ptx::bulk_wait<0>();
}

// Two devices answer each other `rounds` times; the nanoseconds of all rounds are left in
// `elapsed`, or 0 after the deadline.
extern "C" __global__ void flux_ping_pong(const __grid_constant__ PingPong p) {
    const u64 start = ptx::global_timer_ns();
    u64 begun = start;
    for (u32 i = 1; i <= p.rounds; ++i) {
        if (p.first) ptx::store_release_sys(p.theirs, i);
        while (ptx::load_acquire_sys(p.mine) < i) {
            if (ptx::global_timer_ns() - start > p.deadline_ns) {
                *p.elapsed = 0;
                return;
            }
        }
        // The first round waits for the other kernel to start.
        if (i == 1) begun = ptx::global_timer_ns();
        if (!p.first) ptx::store_release_sys(p.theirs, i);
    }
    *p.elapsed = ptx::global_timer_ns() - begun;
}
