// Kernels that measure links: bulk copies between devices, and the latency of signals and of few
// bytes.
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

// A word that no data have.
constexpr u32 kNotArrived = 0xFFFFFFFF;

// Two devices send data to each other `rounds` times, at once. Each thread sends one vector and
// compares the one that it receives. Data are their own flags, or a flag of the CTA follows them.
//
// Round i uses buffer i mod `buffers`. Where data are their own flags, the thread that read a
// vector restores its words, and fences at the end of each half of the buffers. Its sends of the
// next half so follow what it restored, and the other side writes the first half again after it has
// received them all. A flag's round needs no more than two buffers.
extern "C" __global__ void flux_exchange(const __grid_constant__ Exchange p) {
    const u64 start = ptx::global_timer_ns();
    const auto expired = [&] { return ptx::global_timer_ns() - start > p.deadline_ns; };
    const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    const auto data = [&](u32 side, u32 round) {
        const u32 v = thread * 0x85EBCA6B + round * 0x9E3779B1 + side;
        const u32 mask = kNotArrived >> 1;
        return make_uint4(v & mask, v >> 1, (v ^ side) & mask, v >> 2);
    };
    const u32 flag = blockIdx.x * 32;
    u64 begun = start;
    for (u32 round = 1; round <= p.rounds; ++round) {
        const u32 buffer = round % p.buffers;
        const u64 at = static_cast<u64>(buffer) * p.bytes + thread * 16;
        ptx::store_relaxed_sys_16(p.theirs + at, data(p.side, round));
        bool late = false;
        if (p.my_flags != nullptr) {
            __syncthreads();
            if (threadIdx.x == 0) {
                // Orders the CTA's data before its flag.
                ptx::fence_acq_rel_sys();
                ptx::store_relaxed_sys(p.their_flags + flag, round);
                while (ptx::load_acquire_sys(p.my_flags + flag) < round && !late) late = expired();
            }
            late = __syncthreads_or(late);
        }
        const auto all_here = [](uint4 v) {
            return v.x != kNotArrived && v.y != kNotArrived && v.z != kNotArrived && v.w != kNotArrived;
        };
        uint4 v = ptx::load_relaxed_sys_16(p.mine + at);
        while (!all_here(v) && !late) {
            late = expired();
            v = ptx::load_relaxed_sys_16(p.mine + at);
        }
        const uint4 sent = data(p.side ^ 1, round);
        if (late || v.x != sent.x || v.y != sent.y || v.z != sent.z || v.w != sent.w) {
            ptx::reduce_max_relaxed(p.failed, 1);
            return;
        }
        if (p.my_flags == nullptr) {
            ptx::store_relaxed_sys_16(p.mine + at, make_uint4(kNotArrived, kNotArrived, kNotArrived, kNotArrived));
            // Orders what was restored in this half before the sends of the next one.
            if (buffer == p.buffers / 2 - 1 || buffer == p.buffers - 1) ptx::fence_acq_rel_sys();
        }
        // The first round waits for the other kernel to start.
        if (round == 1) begun = ptx::global_timer_ns();
    }
    if (thread == 0) *p.elapsed = ptx::global_timer_ns() - begun;
}
