// The persistent kernel: the warps of every CTA are a producer, a storer, a mover, a watcher, and two consumers of four warps each.
#pragma once
#include "core/close.cuh"
#include "core/config.cuh"
#include "core/consumer.cuh"
#include "core/mover.cuh"
#include "core/producer.cuh"
#include "core/trace.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "core/storer.cuh"
#include "core/watcher.cuh"

namespace flux {

template <class C>
__device__ __forceinline__ void fused_gemm(const Params& p) {
    extern __shared__ unsigned char dynamic_shared[];
    const Shared<C> smem{(ptx::shared_address(dynamic_shared) + 1023) & ~1023u};
    const u32 warpgroup = ptx::from_lane(threadIdx.x / 128, 0);
    const u32 warp = ptx::from_lane(threadIdx.x / 32, 0);
    stamp_cta<C>(p, &WorkerStamps::entered);
    // All that a role begins with is asked for at once, before the barriers are made: each takes its way to memory.
    // So is the epoch, by every CTA before its ticket, so before the last one advances it; by one lane of each warp, since what all of them load from one place the
    // compiler takes for the warp's own value, and waits for it before anything else is asked for.
    u32 read = 0;
    if (threadIdx.x % 32 == 0) read = ptx::load_relaxed_gpu(&p.control->epoch);
    const Walk walk{blockIdx.x, gridDim.x, p.item_count};
    const bool walks = walk.first < walk.count;
    // The mover's warp is the third, the watcher's and the storer's help it where nothing is there to begin with.
    const auto mover = [&](u32 epoch) { return Mover<C>{p, epoch, threadIdx.x % 32, (warp + 1) % Mover<C>::kWarps}; };
    const bool moves = !C::kReduceScatter && p.transfer_count != 0 && (warp == 2 || (p.push_together && (warp == 1 || warp == 3)));
    WorkItem first{};
    Transfer pushed{};
    Await head{};
    Awaited awaited{};
    if (moves) {
        // Whatever the call's number is.
        mover(0).ask_ahead(blockIdx.x, gridDim.x);
        pushed = transfer_of_lane(p, 0);
    }
    if (warp == 0 && walks) first = load_item(p, walk.first);
    if (!C::kReduceScatter && warp == 3) {
        if (p.await_count != 0) head = await_of_lane(p);
        if (walks) awaited = awaited_by(p, walk.first);
    }

    if (threadIdx.x == 0) {
        for (u32 s = 0; s < C::kStages; ++s) {
            ptx::mbarrier_init(smem.full(s), 1);
            ptx::mbarrier_init(smem.empty(s), C::kConsumers);
        }
        for (u32 c = 0; c < C::kConsumers; ++c) {
            ptx::mbarrier_init(smem.out_full(c), 128);
            ptx::mbarrier_init(smem.out_empty(c), 1);
        }
        ptx::mbarrier_init(smem.fold_ready(), 1);
        ptx::mbarrier_init(smem.part_back(), 1);
        for (u32 piece = 0; piece < C::kEarlyPieces; ++piece) {
            ptx::mbarrier_init(smem.early_full(piece), 1);
            ptx::mbarrier_init(smem.early_empty(piece), C::kConsumers);
        }
        // Released with the barriers: released by itself, it might wait for what was asked for.
        ptx::store_shared_16(smem.there(), {});
        ptx::fence_mbarrier_init();
        ptx::prefetch_tensor_map(&p.a_caller);
        ptx::prefetch_tensor_map(&p.b);
        ptx::prefetch_tensor_map(&p.y);
    }
    __syncthreads();
    const u32 epoch = ptx::from_lane(read, 0);

    if (warpgroup == 0) {
        ptx::release_registers<C::kProducerRegisters>();
        if (warp == 0) {
            Producer<C> producer{p, smem, epoch};
            const bool leads = ptx::elect_one();
            const bool folds = leads && producer.run(walk, first);
            __syncwarp();
            const bool failed = __any_sync(0xFFFFFFFFu, leads && producer.drain(folds));
            // The last tile is still to be multiplied to its end, rounded and stored, or to be folded.
            close_call(p, epoch, failed);
        } else {
            // Not before the roles part: what the producer has asked for would be in the mover's registers.
            if (moves) mover(epoch).run(blockIdx.x, gridDim.x, pushed);
            if (warp == 1) {
                Storer<C>{p, smem, epoch, threadIdx.x % 32}.run(walk);
            } else if (warp == 3) {
                Watcher<C>{p, smem, epoch, threadIdx.x % 32}.run(walk, awaited, head);
            }
        }
        // The mover's warp, which has nothing to do by now.
        if (warp == 2 && blockIdx.x == 0) announce_call(p, epoch);
        __syncwarp();
    } else {
        ptx::acquire_registers<C::kConsumerRegisters>();
        Consumer<C>{p, smem, epoch, warpgroup - 1, threadIdx.x % 128}.run(walk);
    }
    if constexpr (C::kTrace) {
        __syncthreads();
        stamp_cta<C>(p, &WorkerStamps::left);
    }
}

}  // namespace flux
