// The persistent kernel. The first warpgroup of every CTA is producer, storer, mover and signal
// poller, a warp each; the other two are consumers.

#pragma once
#include "common/close.cuh"
#include "common/copy.cuh"
#include "sm90/config.cuh"
#include "sm90/consumer.cuh"
#include "common/mover.cuh"
#include "sm90/producer.cuh"
#include "common/trace.cuh"
#include "ptx/grid.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warp.cuh"
#include "sm90/storer.cuh"
#include "sm90/signal_poller.cuh"

namespace flux {

// Makes the barriers, for all other threads and for bulk loads. By one thread.
template <class C>
__device__ __forceinline__ void set_up(const Params& p, const Shared<C>& smem) {
    for (u32 s = 0; s < C::kStages; ++s) {
        ptx::mbarrier_init(smem.full(s), 1);
        ptx::mbarrier_init(smem.empty(s), C::kConsumers);
    }
    for (u32 c = 0; c < C::kConsumers; ++c) {
        ptx::mbarrier_init(smem.out_full(c), 128);
        ptx::mbarrier_init(smem.out_empty(c), 1);
    }
    ptx::mbarrier_init(smem.rows_ready(), 1);
    ptx::mbarrier_init(smem.copied(), Copier<C>::kArrivals);
    ptx::mbarrier_init(smem.staged_part_back(), 1);
    for (u32 piece = 0; piece < C::kInMainloopPieces; ++piece) {
        ptx::mbarrier_init(smem.in_mainloop_full(piece), 1);
        ptx::mbarrier_init(smem.in_mainloop_empty(piece), C::kConsumers);
    }
    ptx::store_release_cta_shared(smem.arrived(), 0);
    ptx::store_release_cta_shared(smem.opened(), 0);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(&p.a_caller);
    ptx::prefetch_tensor_map(&p.b);
    ptx::prefetch_tensor_map(&p.y);
}

template <class C>
__device__ __forceinline__ void fused_gemm(const Params& p) {
    extern __shared__ unsigned char dynamic_shared[];
    const Shared<C> smem{(ptx::shared_address(dynamic_shared) + 1023) & ~1023u};
    const u32 warpgroup = ptx::from_lane(threadIdx.x / 128, 0);
    const u32 warp = ptx::from_lane(threadIdx.x / 32, 0);
    stamp_cta(p, &WorkerStamps::entered);
    const Walk walk{blockIdx.x, gridDim.x, p.item_count};
    // Until `await_launch_ahead` the launch ahead may still run. Items are read before it: their
    // copy is no launch, so what is behind it on the stream begins when it is done.
    WorkItem first{};
    if constexpr (C::kLoadsAhead) {
        if (warp == 0) {
            if (walk.first < walk.count) first = load_item(p, walk.first);
            if (threadIdx.x == 0) set_up(p, smem);
            __syncwarp();
            if (p.constant_weights != 0 && ptx::elect_one()) Producer<C>{p, smem, 0}.load_first_weights(first);
            __syncwarp();
        }
    } else {
        if (warp == 0 && walk.first < walk.count) first = load_item(p, walk.first);
        if (threadIdx.x == 0) set_up(p, smem);
    }
    ptx::await_launch_ahead();
    ptx::let_next_launch_begin();
    // Every CTA reads it before its ticket, so before the last CTA advances it.
    const u32 epoch = ptx::load_relaxed_gpu(&p.control->epoch);
    // The mover is the third warp. The signal poller's and the storer's help it with what every
    // tile waits for. The first push needs these words.
    const Mover<C> mover{p, epoch, threadIdx.x % 32, (warp + 1) % Mover<C>::kWarps};
    const bool moves = !C::kReduceScatter && p.transfer_count != 0 && (warp == 2 || (p.push_together && (warp == 1 || warp == 3)));
    Transfer pushed{};
    if (moves) {
        mover.ask_ahead(blockIdx.x, gridDim.x);
        pushed = transfer_of_lane(p, 0);
    }
    const bool reduces = C::kScatters && walk.first < walk.count && p.items[walk.last()].sink == static_cast<u32>(Sink::kReduceRows);
    __syncthreads();

    if (warpgroup == 0) {
        ptx::release_registers<C::kProducerRegisters>();
        if (moves) mover.run(blockIdx.x, gridDim.x, pushed);
        if (warp == 0) {
            Producer<C> producer{p, smem, epoch};
            const bool leads = ptx::elect_one();
            if (leads) producer.run(walk, first);
            __syncwarp();
            const bool failed = __any_sync(0xFFFFFFFFu, leads && producer.drain(reduces));
            // The last tile may still be multiplied, rounded and stored, or reduced.
            close_call(p, epoch, failed);
        } else if (warp == 1) {
            Storer<C>{p, smem, epoch, threadIdx.x % 32}.run(walk);
        } else if (warp == 3) {
            SignalPoller<C>{p, smem, epoch, threadIdx.x % 32}.run(walk);
        }
        // The mover's warp is idle by now.
        if (warp == 2 && blockIdx.x == 0) announce_call(p, epoch);
        if constexpr (C::kReduceScatter) {
            if (warp == 2 && p.copy_count != 0) Copier<C>{p, smem, epoch, threadIdx.x % 32}.beside_gemm();
        }
        __syncwarp();
    } else {
        ptx::acquire_registers<C::kConsumerRegisters>();
        Consumer<C>{p, smem, epoch, warpgroup - 1, threadIdx.x % 128}.run(walk);
        if constexpr (C::kReduceScatter) {
            if (p.copy_count != 0) Copier<C>{p, smem, epoch, threadIdx.x % 32}.behind_gemm(warp - 4);
        }
    }
    if (traces(p)) {
        __syncthreads();
        stamp_cta(p, &WorkerStamps::left);
    }
}

}  // namespace flux
