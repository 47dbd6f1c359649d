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
    // The await list of the last item that awaited rows: chunks and bands span many tiles, and their signals stay raised.
    u32 seen_first = kNone, seen_count = 0;
    bool stamped = false;

    // What of an item's await list is still to come: `group` entries from `next` on are awaited before step `step` of k is loaded.
    struct Pending {
        u32 next, end, group, step;
    };

    __device__ __forceinline__ const TensorMap* a_map(const WorkItem& item) const {
        return item.a_source == static_cast<u32>(Source::kGather) ? &p.a_gather : &p.a_caller;
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

    __device__ __forceinline__ Pending pending(const WorkItem& item) {
        if (item.await_count == 0 || (item.await_first == seen_first && item.await_count == seen_count)) return {0, 0, 0, kNone};
        seen_first = item.await_first;
        seen_count = item.await_count;
        return at(item.await_first, item.await_first + item.await_count, item.await_group);
    }

    __device__ __forceinline__ Pending at(u32 next, u32 end, u32 group) const {
        return {next, end, group, next < end ? p.awaits[next].k_step : kNone};
    }

    // Stamps the first rows that came.
    __device__ __forceinline__ void arrived() {
        if (C::kTrace && !stamped) stamp_worker<C>(p, &WorkerStamps::first_rows);
        stamped = true;
    }

    // Whether the next group is there; goes past it where it is.
    __device__ __forceinline__ bool raised(Pending& w) {
        for (u32 first = 0; first < w.group; first += kPolls) {
            if (!all_raised(p, epoch, w.next + first, w.group - first)) return false;
        }
        arrived();
        // Orders the acquired signals before the bulk loads of the rows that they announce.
        ptx::fence_proxy_async();
        w = at(w.next + w.group, w.end, w.group);
        return true;
    }

    // Waits for the next group.
    __device__ __forceinline__ void wait(Pending& w) {
        for (u32 first = 0; first < w.group; first += kPolls) await_all(p, epoch, w.next + first, w.group - first);
        arrived();
        // As above. After a failed wait the rows are garbage, but in bounds: the tile is computed and the call reported as failed.
        ptx::fence_proxy_async();
        w = at(w.next + w.group, w.end, w.group);
    }

    // Rows of A that peers send are missing: the weights need no signal, so as many of them as the ring holds are loaded before the wait.
    __device__ __forceinline__ u32 load_awaited(const WorkItem& item, Pending& w, u32 step, u32 end) {
        // The consumers give a stage back when they have the next one: within an item, one stage is theirs until A has come too.
        const u32 free = step == item.k_first ? C::kStages : C::kStages - 1;
        const u32 ahead = end - step < free ? end - step : free;
        RingState<C::kStages> start = ring;
        for (u32 s = step; s < step + ahead; ++s) {
            open_stage(C::kStageBytes);
            load_b(item, ring.stage, s);
            ring.advance();
        }
        for (u32 s = step; s < step + ahead; ++s) {
            while (s >= w.step) wait(w);
            load_a(item, start.stage, s);
            start.advance();
        }
        return step + ahead;
    }

    // The accumulators of the other ranges of k, in their order, through the same ring.
    __device__ __forceinline__ void load_parts(const WorkItem& item) {
        const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
        for (u32 n = 0; n < item.parts; ++n) {
            await_late(p, epoch, item, n);
            // Orders the acquired signal before the bulk loads of what it announces.
            ptx::fence_proxy_async();
            const u64 part = half + p.parts_offset + static_cast<u64>(item.part + n) * C::kPartBytes;
            for (u32 piece = 0; piece < C::kPartPieces; ++piece) {
                open_stage(C::kConsumers * C::kPartPieceBytesPerConsumer);
                for (u32 c = 0; c < C::kConsumers; ++c) {
                    ptx::bulk_load(smem.a(ring.stage) + c * C::kPartPieceBytesPerConsumer,
                                   part + c * (C::kPartBytes / C::kConsumers) + piece * C::kPartPieceBytesPerConsumer,
                                   C::kPartPieceBytesPerConsumer, smem.full(ring.stage));
                }
                ring.advance();
            }
        }
    }

    // The partial tiles of others, in the order of their slots, through the same ring.
    __device__ __forceinline__ void load_partials(const WorkItem& item, u32 index) {
        const u32 end = item.late_first + item.late_count;
        for (u32 first = item.late_first + item.parts; first < end; first += kPolls) await_all(p, epoch, first, end - first);
        stamp<C>(p, index, &ItemStamps::partials_there);
        // Orders the acquired signals before the bulk loads of the partial tiles that they announce.
        ptx::fence_proxy_async();
        const u64 half = p.data[p.rank] + (epoch & 1) * p.half_stride;
        for (u32 source = 0; source < item.partials; ++source) {
            const u64 slot = half + static_cast<u64>(item.partial_slot + source * p.slots_per_source) * C::kOutBytes;
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
            u32 step = item.k_first;
            const u32 end = step + item.k_steps;
            stamp<C>(p, i, &ItemStamps::opened);
            if constexpr (!C::kReduceScatter) {
                for (Pending w = pending(item); w.step < end;) {
                    for (; step < w.step; ++step) load(item, step);
                    if (!raised(w)) step = load_awaited(item, w, step, end);
                }
            }
            stamp<C>(p, i, &ItemStamps::rows_there);
            for (; step < end; ++step) load(item, step);
            stamp<C>(p, i, &ItemStamps::loaded);
            if (item.parts != 0) load_parts(item);
            if constexpr (C::kReduceScatter) {
                // What a fold adds is read by the consumers.
                if (item.partials != 0 && item.sink != static_cast<u32>(Sink::kFold)) load_partials(item, i);
            }
        }
    }

    __device__ __forceinline__ void load(const WorkItem& item, u32 step) {
        open_stage(C::kStageBytes);
        load_a(item, ring.stage, step);
        load_b(item, ring.stage, step);
        ring.advance();
    }
};

}  // namespace flux
