// A consumer: a warpgroup that multiplies the stages into its half of the tile's accumulators and leaves the rounded result in its
// output buffer, where the storer takes over.
#pragma once
#include "core/config.cuh"
#include "core/epilogue.cuh"
#include "core/trace.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace flux {

template <class C>
struct Consumer {
    static constexpr u32 kAccumulators = C::kTileN / 2;  // of one m64 block, in one thread

    const Params& p;
    const Shared<C> smem;
    const u32 index;   // which consumer
    const u32 thread;  // 0..128
    RingState<C::kStages> ring;
    u32 out_phase = 0;

    __device__ __forceinline__ void multiply(float (&acc)[C::kBlocksM][kAccumulators]) {
        u32 previous = 0;
        for (u32 step = 0; step < p.k_steps; ++step) {
            ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
            const u64 a = ptx::k_major_128b_descriptor(smem.a(ring.stage) + index * (C::kBytesA / C::kConsumers));
            const u64 b = ptx::k_major_128b_descriptor(smem.b(ring.stage));
#pragma unroll
            for (u32 block = 0; block < C::kBlocksM; ++block) ptx::pin_registers(acc[block]);
            ptx::wgmma_fence();
#pragma unroll
            for (u32 k = 0; k < C::kTileK / 16; ++k) {
#pragma unroll
                for (u32 block = 0; block < C::kBlocksM; ++block) {
                    ptx::Wgmma<C::kTileN, C::kBf16>::mma(acc[block], ptx::advance_descriptor(a, block * 64 * 128 + k * 32),
                                                         ptx::advance_descriptor(b, k * 32), (step | k) != 0);
                }
            }
            ptx::wgmma_commit();
#pragma unroll
            for (u32 block = 0; block < C::kBlocksM; ++block) ptx::pin_registers(acc[block]);
            // One group stays in flight: when this one is issued, the one before has read its stage.
            ptx::wgmma_wait<1>();
            if (step > 0 && thread == 0) ptx::mbarrier_arrive(smem.empty(previous));
            previous = ring.stage;
            ring.advance();
        }
        ptx::wgmma_wait<0>();
#pragma unroll
        for (u32 block = 0; block < C::kBlocksM; ++block) ptx::pin_registers(acc[block]);
        if (thread == 0) ptx::mbarrier_arrive(smem.empty(previous));
    }

    // Adds the peers' partial tiles in rank order, each element in the place where this thread's own accumulator has it.
    __device__ __forceinline__ void add_partials(const WorkItem& item, float (&acc)[C::kBlocksM][kAccumulators]) {
        for (u32 source = 0; source < item.partials; ++source) {
#pragma unroll
            for (u32 piece = 0; piece < C::kPieces; ++piece) {
                ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
                const u32 src = smem.a(ring.stage) + index * C::kPieceBytesPerConsumer + thread * 16;
#pragma unroll
                for (u32 v = 0; v < C::kPieceVectors; ++v) {
                    const uint4 four = ptx::load_shared_16(src + v * 128 * 16);
                    const u32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (u32 i = 0; i < 4; ++i) {
                        const u32 at = (piece * C::kPieceVectors + v) * 8 + 2 * i;
                        float lo, hi;
                        ptx::unpack_2<C::kBf16>(pairs[i], lo, hi);
                        acc[at / kAccumulators][at % kAccumulators] += lo;
                        acc[at / kAccumulators][at % kAccumulators + 1] += hi;
                    }
                }
                // All threads of the warpgroup have read the stage before it is given back.
                sync_consumer();
                if (thread == 0) ptx::mbarrier_arrive(smem.empty(ring.stage));
                ring.advance();
            }
        }
    }

    // Among this consumer's 128 threads; barrier 0 is __syncthreads.
    __device__ __forceinline__ void sync_consumer() const {
        if (index == 0) {
            ptx::named_barrier_sync<1, 128>();
        } else {
            ptx::named_barrier_sync<2, 128>();
        }
    }

    // One thread speaks for both consumers: they take the same stages at nearly the same time.
    __device__ __forceinline__ void mark(u32 item, u64 ItemStamps::* phase) const {
        if constexpr (C::kTrace) {
            if (index == 0 && thread == 0) stamp<C>(p, item, phase);
        }
    }

    // Row-major boxes of 64 x 64 with the 128-byte swizzle that the tensor store undoes.
    __device__ __forceinline__ void write_boxes(const float (&acc)[C::kBlocksM][kAccumulators]) const {
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 row = warp * 16 + lane % 16;  // the row whose 16 bytes this lane addresses: blocks 0, 2 are the upper eight rows
        const u32 half = lane / 16;             // blocks 2, 3 are the next eight columns
#pragma unroll
        for (u32 block = 0; block < C::kBlocksM; ++block) {
#pragma unroll
            for (u32 j = 0; j < C::kTileN / 8; j += 2) {
                const u32 box = smem.out(index) + (block * (C::kTileN / 64) + j / 8) * 8192;
                const u32 chunk = (j % 8 + half) ^ (row % 8);
                const float* d = &acc[block][j * 4];
                ptx::store_matrix_x4(box + row * 128 + chunk * 16, ptx::pack_2<C::kBf16>(d[0], d[1]), ptx::pack_2<C::kBf16>(d[2], d[3]),
                                     ptx::pack_2<C::kBf16>(d[4], d[5]), ptx::pack_2<C::kBf16>(d[6], d[7]));
            }
        }
    }

    // A slot holds accumulators in the order in which threads hold them: vector v of thread t at (v * 128 + t) * 16. Writer and
    // reader are the same thread of two ranks, so nothing is transposed on the way and every access is contiguous.
    __device__ __forceinline__ void write_slot(const float (&acc)[C::kBlocksM][kAccumulators]) const {
#pragma unroll
        for (u32 v = 0; v < C::kVectors; ++v) {
            const u32 at = v * 8;
            const float* d = &acc[at / kAccumulators][at % kAccumulators];
            const uint4 four = {ptx::pack_2<C::kBf16>(d[0], d[1]), ptx::pack_2<C::kBf16>(d[2], d[3]), ptx::pack_2<C::kBf16>(d[4], d[5]),
                                ptx::pack_2<C::kBf16>(d[6], d[7])};
            ptx::store_shared_16(smem.out(index) + (v * 128 + thread) * 16, four);
        }
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            float acc[C::kBlocksM][kAccumulators];
            multiply(acc);
            mark(i, &ItemStamps::multiplied);
            if constexpr (C::kReduceScatter) {
                if (item.sink == static_cast<u32>(Sink::kReduce)) add_partials(item, acc);
            }
            mark(i, &ItemStamps::summed);
            ptx::mbarrier_wait(smem.out_empty(index), out_phase ^ 1);
            bool send = false;
            if constexpr (C::kReduceScatter) send = item.sink == static_cast<u32>(Sink::kSend);
            if (send) {
                write_slot(acc);
            } else {
                finish_tile<C>(p, item, thread, acc);
                write_boxes(acc);
            }
            // Orders this thread's writes of the output buffer before the bulk store that reads it.
            ptx::fence_proxy_async_shared();
            // Before the arrival, so that it is never later than the storer's stamp.
            mark(i, &ItemStamps::written);
            ptx::mbarrier_arrive(smem.out_full(index));
            out_phase ^= 1;
        }
    }
};

}  // namespace flux
