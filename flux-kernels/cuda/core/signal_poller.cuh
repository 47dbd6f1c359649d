// The watcher: a warp that waits for what other ranks send, and tells the producer how far it is
// there: rows ahead of it, or partial tiles while their item is multiplied. A look at a signal
// takes its way to memory and back, and what was seen has to be acquired: done by the producer,
// that would drain the ring of stages at every shard, and hold up the first partial tiles of every
// own tile.
#pragma once
#include "core/config.cuh"
#include "core/reduce_rows.cuh"
#include "core/trace.cuh"
#include "core/wait.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

// What is there: rows of A before step `step` of a CTA's item number `number`, counted from 0, or
// as many of the partial tiles that it awaits. Later is larger.
__device__ __forceinline__ u64 progress(u32 number, u32 step) {
    return static_cast<u64>(number) << 32 | step;
}

template <class C>
struct SignalPoller {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    bool stamped = false;

    // By the whole warp, whose lanes have acquired what they waited for.
    __device__ __forceinline__ void publish(u32 number, u32 step) const {
        __syncwarp();
        if (lane == 0) ptx::store_release_cta_shared(smem.arrived(), progress(number, step));
    }

    // The entry of a group that this lane looks at first; where there is none, as good as any.
    __device__ __forceinline__ Await entry_of_lane(u32 first, u32 group) const {
        return p.awaits[first + (lane < group ? lane : 0)];
    }

    // The groups of an item's await list, each of which is awaited before one step of k; `mine` is
    // this lane's entry of the first. After a failed wait the rows are garbage, but in bounds: the
    // tile is computed and the call reported as failed.
    __device__ __forceinline__ void await_rows(u32 number, u32 first, u32 count, u32 group, Await mine) {
        for (u32 next = first; next < first + count; next += group) {
            WaitTarget target = await_target(p, epoch, mine);
            publish(number, mine.k_step);
            // Asked for beside this group's signals: asked for after them, it would be a way to
            // memory more until they are told.
            if (next + group < first + count) mine = entry_of_lane(next + group, group);
            for (u32 n = lane; n < group;) {
                wait_for(p, epoch, target);
                if ((n += 32) < group) target = await_target(p, epoch, next + n);
            }
            __syncwarp();
            if (C::kTrace && !stamped && lane == 0) stamp_worker<C>(p, &WorkerStamps::first_rows);
            stamped = true;
        }
    }

    __device__ __forceinline__ void run_ahead(const Walk& walk) {
        // The list of the last item that awaited rows: chunks and bands span many tiles, and their
        // signals stay raised.
        u32 seen_first = kNone, seen_count = 0, number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            if (item.await_count != 0 && (item.await_first != seen_first || item.await_count != seen_count)) {
                const Await mine = entry_of_lane(item.await_first, item.await_group);
                await_rows(number, item.await_first, item.await_count, item.await_group, mine);
                seen_first = item.await_first;
                seen_count = item.await_count;
            }
            publish(++number, 0);
        }
    }

    // The partial tiles that an item awaits, as they come, in their order. After a failed wait all
    // are said to be there: the sums are garbage, but in bounds, and the call is reported as
    // failed.
    __device__ __forceinline__ void await_partials(u32 number, u32 first, u32 count) const {
        for (u32 there = 0; there < count;) {
            const u32 polled = count - there < 32 ? count - there : 32;
            const WaitTarget target = await_target(p, epoch, first + there + (lane < polled ? lane : 0));
            // Waits begin with their item, as the producer's would, and not with the call.
            while (there == 0 && ptx::load_acquire_cta_shared(smem.opened()) <= number) ptx::sleep_ns(100);
            for (Deadline deadline;;) {
                const u32 seen = ptx::load_acquire_sys(target.word);
                const u32 missing = __ballot_sync(0xFFFFFFFFu, lane < polled && seen != epoch);
                if ((missing & 1) == 0) {
                    there += missing == 0 ? polled : __ffs(missing) - 1;
                    break;
                }
                // The first lane waits for the first that is missing.
                if (__any_sync(0xFFFFFFFFu, lane == 0 && !deadline.again(p, epoch, target, seen))) {
                    there = count;
                    break;
                }
            }
            publish(number, there);
        }
    }

    __device__ __forceinline__ void run_beside(const Walk& walk) const {
        u32 number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride, ++number) {
            const WorkItem& item = p.items[i];
            if constexpr (C::kScatters) {
                if (item.sink == static_cast<u32>(Sink::kReduceRows)) {
                    // What folds add may be there long before the storer has had its turns. Else it
                    // is there soon after its own tiles are sent, and the storer awaits it.
                    if (p.in_flight_limit == 0) return;
                    while (ptx::load_acquire_cta_shared(smem.opened()) <= number) ptx::sleep_ns(100);
                    await_rows_to_reduce<C>(p, smem, epoch, walk, i, RowAwaits::of(p, i));
                    return;
                }
            }
            if (awaits_partials(item)) await_partials(number, item.late_first + item.parts, item.late_count - item.parts);
        }
    }

    __device__ __forceinline__ void run(const Walk& walk) {
        if constexpr (C::kReduceScatter) {
            run_beside(walk);
        } else {
            run_ahead(walk);
        }
    }
};

}  // namespace flux
