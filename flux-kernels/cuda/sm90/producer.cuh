// The producer: one thread that keeps the ring of stages full. The signal poller awaits peers' rows
// and partial tiles for it; split-K partials it awaits itself.

#pragma once
#include "sm90/config.cuh"
#include "sm90/partials.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "common/weights.cuh"
#include "sm90/signal_poller.cuh"

namespace flux {

template <class C>
struct Producer {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    RingState<C::kStages> ring;
    u64 rows = 0;  // last loaded `progress`
    const TensorMap* weights = nullptr;  // of the item's columns
    u32 weights_col = 0;                 // its first column there

    // Loads weights that the launch ahead does not write, as many steps of the first item as the
    // ring holds.
    __device__ __forceinline__ void load_first_weights(const WorkItem& item) {
        choose_weights(item);
        load_weights(item, item.k_first, steps_ahead(item));
    }

    __device__ __forceinline__ void run(const Walk& walk, WorkItem item) {
        u32 number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride, ++number) {
            if (number != 0) item = load_item(p, i);
            choose_weights(item);
            u32 step = item.k_first;
            const u32 end = step + item.k_steps;
            if (item.a_source >= kCountOf<RowSource>) ptx::trap();
            stamp(p, i, &ItemStamps::opened);
            if constexpr (C::kReduceScatter) {
                const bool reduces = C::kScatters && item.sink == static_cast<u32>(Sink::kReduceRows);
                if (reduces || awaits_partials(item)) ptx::store_release_cta_shared(smem.opened(), number + 1);
            }
            if constexpr (C::kLoadsAhead) {
                if (p.constant_weights != 0 && number == 0) {
                    // Their weights are on their way.
                    const u32 ahead = steps_ahead(item);
                    load_rows(item, ring, number, step, ahead);
                    step += ahead;
                    ring = {ahead % C::kStages, ahead / C::kStages};
                }
            }
            if constexpr (!C::kReduceScatter) {
                // Rows that nobody sends need no poller.
                if (item.await_count != 0) step = load_as_they_come(item, number, step, end);
            }
            stamp(p, i, &ItemStamps::rows_there);
            load_all(item, step, end);
            stamp(p, i, &ItemStamps::loaded);
            if (item.parts != 0) load_split_k_partials(item);
            if constexpr (C::kSendsPartials) {
                // The consumers read the rows of a reduction themselves.
                if (item.partials != 0 && item.sink != static_cast<u32>(Sink::kReduceRows)) load_peer_partials(item, i, number);
            }
        }
    }

    // Waits until no role of this CTA waits for peers any more. Returns whether the call has
    // failed.
    __device__ __forceinline__ bool drain(bool reduces) const {
        if (C::kSendsPartials && p.in_mainloop != 0) {
            // The storer's waits for in-mainloop partial tiles are over when the consumers have
            // read the last stage.
            RingState<C::kStages> last = ring;
            for (u32 s = 0; s < C::kStages; ++s) {
                ptx::mbarrier_wait(smem.empty(last.stage), last.phase ^ 1);
                last.advance();
            }
        }
        if (reduces) ptx::mbarrier_wait(smem.rows_ready(), 0);
        if (C::kReduceScatter && p.copy_count != 0) ptx::mbarrier_wait(smem.copied(), 0);
        return poisoned(p);
    }

private:
    // Steps of the first item whose weights are loaded before the launch ahead has ended.
    __device__ __forceinline__ static u32 steps_ahead(const WorkItem& item) { return least(item.k_steps, C::kStages); }

    __device__ __forceinline__ void choose_weights(const WorkItem& item) {
        const WeightOf<C> weight(p, item.col);
        weights = weight.b();
        weights_col = item.col - weight.operands().start;
    }

    // Operand A of an item: the map of its rows, and their place there.
    struct RowsOfA {
        const TensorMap* map;
        u32 outer, buffer;
    };

    __device__ __forceinline__ RowsOfA rows_of_a(const WorkItem& item) const {
        if (item.a_source == static_cast<u32>(RowSource::kGather)) return {&p.a_gather, item.a_outer, epoch & 1};
        const bool is_short = item.a_outer >= p.full_shards;
        return {is_short ? &p.short_shards : &p.a_caller, is_short ? item.a_outer - p.full_shards : item.a_outer, 0};
    }

    __device__ __forceinline__ void load_a(const WorkItem& item, u32 stage, u32 step) const {
        const RowsOfA rows = rows_of_a(item);
        ptx::tensor_load_4d(smem.a(stage), rows.map, smem.full(stage), step * C::kTileK, item.row, rows.outer, rows.buffer);
    }

    __device__ __forceinline__ void load_b(const WorkItem& item, u32 stage, u32 step) const {
        if constexpr (C::kWeightsKn) {
            // Boxes beyond the last column are zeros, and count as bytes.
#pragma unroll
            for (u32 col = 0; col < C::kTileN; col += C::kBoxCols) {
                ptx::tensor_load_2d(smem.b(stage) + col / C::kBoxCols * C::kWeightBoxBytes, &p.b, smem.full(stage), item.col + col, step * C::kTileK);
            }
        } else if constexpr (C::kGated) {
            ptx::tensor_load_4d(smem.b(stage), &p.b, smem.full(stage), step * C::kTileK, 0, 0, item.col / 16);
        } else {
            ptx::tensor_load_2d(smem.b(stage), weights, smem.full(stage), step * C::kTileK, weights_col);
        }
    }

    // Of the boxes that a stage gets.
    __device__ __forceinline__ u32 stage_bytes() const { return p.box_rows * C::kStepBytes + C::kStageBytes - C::kBytesA; }

    // Waits until the stage is free, and sets the bytes of its next phase.
    __device__ __forceinline__ void open_stage(u32 bytes) const {
        ptx::mbarrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(smem.full(ring.stage), bytes);
    }

    // Whether the rows of this step of the CTA's `number`-th item have arrived.
    __device__ __forceinline__ bool rows_arrived(u32 number, u32 step) {
        const u64 needed = progress(number, step);
        if (needed < rows) return true;
        const u64 now = ptx::load_acquire_cta_shared(smem.arrived());
        if (now == rows) return false;
        rows = now;
        // Orders the acquired signals before the bulk loads of their rows.
        ptx::fence_proxy_async_global();
        return needed < rows;
    }

    // Loads steps whose rows of A have not arrived: first the weights of as many stages as the ring
    // holds, which need no signal, then the rows.
    __device__ __forceinline__ u32 load_awaited(const WorkItem& item, u32 number, u32 step, u32 end) {
        // The consumers free a stage when they have the next one: within an item they hold one
        // until A has arrived too.
        const u32 free = step == item.k_first ? C::kStages : C::kStages - 1;
        const u32 steps = least(end - step, free);
        const RingState<C::kStages> start = ring;
        load_weights(item, step, steps);
        load_rows(item, start, number, step, steps);
        return step + steps;
    }

    __device__ __forceinline__ void load_weights(const WorkItem& item, u32 step, u32 steps) {
        for (const u32 end = step + steps; step < end; ++step) {
            open_stage(stage_bytes());
            load_b(item, ring.stage, step);
            ring.advance();
        }
    }

    // Loads the rows of stages from `start` on whose weights were loaded, each when it has arrived.
    __device__ __forceinline__ void load_rows(const WorkItem& item, RingState<C::kStages> start, u32 number, u32 step, u32 steps) {
        for (const u32 end = step + steps; step < end; ++step) {
            // Ends, because the signal poller ends all its waits.
            while (!C::kReduceScatter && item.await_count != 0 && !rows_arrived(number, step)) {}
            load_a(item, start.stage, step);
            start.advance();
        }
    }

    // Loads in order of arrival. Returns the step from which on all rows have arrived.
    __device__ __forceinline__ u32 load_as_they_come(const WorkItem& item, u32 number, u32 step, u32 end) {
        while (step < end && !rows_arrived(number, end - 1)) {
            if (rows_arrived(number, step)) {
                load(item, step++);
            } else {
                step = load_awaited(item, number, step, end);
            }
        }
        return step;
    }

    __device__ __forceinline__ void load(const WorkItem& item, u32 step) {
        open_stage(stage_bytes());
        load_a(item, ring.stage, step);
        load_b(item, ring.stage, step);
        ring.advance();
    }

    // Loads steps in pairs, where the ring allows: memory answers sooner for adjacent lines of a
    // row of w.
    __device__ __forceinline__ void load_all(const WorkItem& item, u32 step, u32 end) {
        if constexpr (C::kPairs) {
            for (; step + 1 < end; step += 2) {
                const u32 stage = ring.stage;
                open_stage(stage_bytes());
                ring.advance();
                open_stage(stage_bytes());
                load_b(item, stage, step);
                load_b(item, ring.stage, step + 1);
                load_a(item, stage, step);
                load_a(item, ring.stage, step + 1);
                ring.advance();
            }
        }
        for (; step < end; ++step) load(item, step);
    }

    // Loads the tile's split-K partials through the ring, in their order.
    __device__ __forceinline__ void load_split_k_partials(const WorkItem& item) {
        const u64 half = half_of(p, p.data[p.rank], epoch);
        for (u32 n = 0; n < item.parts; ++n) {
            await_late(p, epoch, item, n);
            // Orders the acquired signal before the bulk loads of its partial.
            ptx::fence_proxy_async_global();
            const u64 part = half + p.split_k_offset + static_cast<u64>(item.part + n) * C::kSplitKSlotBytes;
            for (u32 piece = 0; piece < C::kSplitKPieces; ++piece) {
                const u32 bytes = C::split_k_piece_vectors(piece) * 128 * 16;  // of one consumer
                open_stage(C::kConsumers * bytes);
                for (u32 c = 0; c < C::kConsumers; ++c) {
                    ptx::bulk_load(smem.a(ring.stage) + c * bytes, part + c * (C::kSplitKSlotBytes / C::kConsumers) + piece * C::kSplitKPieceVectors * 128 * 16, bytes,
                                   smem.full(ring.stage));
                }
                ring.advance();
            }
        }
    }

    // Loads peers' partial tiles through the ring, in slot order, each as it arrives.
    __device__ __forceinline__ void load_peer_partials(const WorkItem& item, u32 index, u32 number) {
        const u64 half = half_of(p, p.data[p.rank], epoch);
        const u32 in_mainloop = in_mainloop_partials(p, item);
        for (u32 source = in_mainloop; source < item.partials;) {
            // Every partial tile has an await, or none has.
            const u32 next = awaits_partials(item) ? in_mainloop + partials_arrived(number, source - in_mainloop) : item.partials;
            if (next == item.partials) stamp(p, index, &ItemStamps::partials_there);
            // Orders the acquired signals before the bulk loads of their partial tiles.
            ptx::fence_proxy_async_global();
            for (; source < next; ++source) load_peer_partial(Slot<C>{p}.partial(half, item, source));
        }
    }

    // How many partial tiles of the CTA's `number`-th item have arrived, once they are more than
    // `taken`. Ends, because the signal poller ends all its waits.
    __device__ __forceinline__ u32 partials_arrived(u32 number, u32 taken) const {
        for (;;) {
            const u64 now = ptx::load_acquire_cta_shared(smem.arrived());
            if (now > progress(number, taken)) return static_cast<u32>(now);
        }
    }

    __device__ __forceinline__ void load_peer_partial(u64 slot) {
        for (u32 piece = 0; piece < C::kPieces; ++piece) {
            open_stage(Slot<C>{p}.piece_bytes(piece));
            Slot<C>{p}.load_piece(slot, piece, smem.a(ring.stage), smem.full(ring.stage));
            ring.advance();
        }
    }
};

}  // namespace flux
