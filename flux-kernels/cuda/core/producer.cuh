// The producer: one thread that keeps the ring of stages full. It alone waits for other ranks' data.
#pragma once
#include "core/config.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "core/trace.cuh"
#include "core/wait.cuh"

namespace flux {

template <class C>
struct Producer {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    RingState<C::kStages> ring;
    // The first await of the last item that awaited rows: chunks and bands span many tiles, and their signals stay raised.
    u32 seen_await = kNone;

    __device__ __forceinline__ const TensorMap* a_map(const WorkItem& item) const {
        return item.a_source == static_cast<u32>(Source::kGather) ? &p.a_gather : &p.a_caller;
    }

    __device__ __forceinline__ WaitTarget target(const WorkItem& item, u32 i) const {
        const Await a = p.awaits[item.await_first + i];
        return {signal_word(p.pad[p.rank], a.signal), epoch, FaultWait::kSignal, a.peer, a.signal};
    }

    __device__ __forceinline__ void load_a(const WorkItem& item, u32 stage, u32 step) const {
        const bool gather = item.a_source == static_cast<u32>(Source::kGather);
        ptx::tensor_load_4d(smem.a(stage), a_map(item), smem.full(stage), step * C::kTileK, item.row, item.a_outer,
                            gather ? (epoch & 1) : 0);
    }

    __device__ __forceinline__ void load_b(const WorkItem& item, u32 stage, u32 step) const {
        ptx::tensor_load_2d(smem.b(stage), &p.b, smem.full(stage), step * C::kTileK, item.col);
    }

    // Waits until the stage is free and announces the bytes of the next phase.
    __device__ __forceinline__ void open_stage(u32 bytes) const {
        ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(smem.full(ring.stage), bytes);
    }

    __device__ __forceinline__ bool all_raised(const WorkItem& item) const {
        for (u32 i = 0; i < item.await_count; ++i) {
            const WaitTarget t = target(item, i);
            if (!epoch_reached(ptx::load_acquire_sys(t.word), t.expected)) return false;
        }
        return true;
    }

    // Rows of A that peers send: the weights need no signal, so as many of them as the ring holds are loaded before the wait.
    __device__ __forceinline__ u32 load_awaited(const WorkItem& item) {
        if (item.await_first == seen_await) return 0;
        seen_await = item.await_first;
        if (all_raised(item)) {
            // Orders the acquired signals before the bulk loads of the rows that they announce.
            ptx::fence_proxy_async();
            return 0;
        }
        const u32 ahead = p.k_steps < C::kStages ? p.k_steps : C::kStages;
        RingState<C::kStages> start = ring;
        for (u32 step = 0; step < ahead; ++step) {
            open_stage(C::kStageBytes);
            load_b(item, ring.stage, step);
            ring.advance();
        }
        for (u32 i = 0; i < item.await_count; ++i) wait_for(p, epoch, target(item, i));
        // As above. After a failed wait the rows are garbage, but in bounds: the tile is computed and the call reported as failed.
        ptx::fence_proxy_async();
        for (u32 step = 0; step < ahead; ++step) {
            load_a(item, start.stage, step);
            start.advance();
        }
        return ahead;
    }

    // The peers' partial tiles, in rank order, through the same ring.
    __device__ __forceinline__ void load_partials(const WorkItem& item, u32 index) {
        for (u32 i = 0; i < item.await_count; ++i) wait_for(p, epoch, target(item, i));
        stamp<C>(p, index, &ItemStamps::partials_there);
        // Orders the acquired signals before the bulk loads of the partial tiles that they announce.
        ptx::fence_proxy_async();
        const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
        for (u32 source = 0; source < item.partials; ++source) {
            const u64 slot = half + static_cast<u64>(item.slot + source * p.slots_per_source) * C::kOutBytes;
            for (u32 piece = 0; piece < C::kPieces; ++piece) {
                open_stage(C::kConsumers * C::kPieceBytesPerConsumer);
                for (u32 c = 0; c < C::kConsumers; ++c) {
                    ptx::bulk_load(smem.a(ring.stage) + c * C::kPieceBytesPerConsumer,
                                   slot + c * C::kOutBytesPerConsumer + piece * C::kPieceBytesPerConsumer,
                                   C::kPieceBytesPerConsumer, smem.full(ring.stage));
                }
                ring.advance();
            }
        }
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            u32 step = 0;
            stamp<C>(p, i, &ItemStamps::opened);
            if constexpr (!C::kReduceScatter) {
                if (item.await_count != 0) step = load_awaited(item);
            }
            stamp<C>(p, i, &ItemStamps::rows_there);
            for (; step < p.k_steps; ++step) {
                open_stage(C::kStageBytes);
                load_a(item, ring.stage, step);
                load_b(item, ring.stage, step);
                ring.advance();
            }
            stamp<C>(p, i, &ItemStamps::loaded);
            if constexpr (C::kReduceScatter) {
                if (item.sink == static_cast<u32>(Sink::kReduce)) load_partials(item, i);
            }
        }
    }
};

}  // namespace flux
