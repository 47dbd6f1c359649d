// The signal poller: a warp that polls peers' signals ahead of the producer, and publishes how far
// rows or partial tiles have arrived.
//
// A poll is a round trip to memory, and what it finds has to be acquired. Done by the producer,
// that would drain the ring of stages at every shard and delay the first partial tiles of every own
// tile.

#pragma once
#include "sm90/config.cuh"
#include "common/progress.cuh"
#include "common/reduce_rows.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

template <class C>
struct SignalPoller {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    bool stamped = false;

    __device__ __forceinline__ void run(const Walk& walk) {
        if constexpr (C::kReduceScatter) {
            run_beside(walk);
        } else {
            run_ahead(walk);
        }
    }

    // AllGather-GEMM: polls for rows of all items, ahead of the producer.
    __device__ __forceinline__ void run_ahead(const Walk& walk) {
        // The await list of the last item that had one: many tiles share a list, and its signals
        // stay raised.
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

    // GEMM-ReduceScatter: polls for what an item adds, while the item is multiplied.
    __device__ __forceinline__ void run_beside(const Walk& walk) const {
        u32 number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride, ++number) {
            const WorkItem& item = p.items[i];
            if constexpr (C::kScatters) {
                if (item.sink == static_cast<u32>(Sink::kReduceRows)) {
                    // With an in-flight limit the storer may lag far behind the peers. Without one
                    // the rows arrive soon after its own last tile, and the storer awaits them.
                    if (p.in_flight_limit == 0) return;
                    while (ptx::load_acquire_cta_shared(smem.opened()) <= number) ptx::sleep_ns(100);
                    await_rows_to_reduce<C>(p, smem, epoch, walk, i, RowAwaits::of(p, i));
                    return;
                }
            }
            if (awaits_partials(item)) await_partials(number, item.late_first + item.parts, item.late_count - item.parts);
        }
    }

private:
    // By the whole warp, whose lanes have acquired what they waited for.
    __device__ __forceinline__ void publish(u32 number, u32 step) const {
        __syncwarp();
        if (lane == 0) ptx::store_release_cta_shared(smem.arrived(), progress(number, step));
    }

    // The entry of a group that this lane polls first; any entry where the group has none for it.
    __device__ __forceinline__ Await entry_of_lane(u32 first, u32 group) const {
        return p.awaits[first + (lane < group ? lane : 0)];
    }

    // Waits for an item's groups of awaits, each before one step along k; `mine` is this lane's
    // entry of the first. After a failed wait the rows are garbage within bounds: the tile is
    // computed and the call reported as failed.
    __device__ __forceinline__ void await_rows(u32 number, u32 first, u32 count, u32 group, Await mine) {
        for (u32 next = first; next < first + count; next += group) {
            WaitTarget target = await_target(p, epoch, mine);
            publish(number, mine.k_step);
            // Loaded beside this group's signals: loaded after them, it would delay the next poll
            // by a round trip.
            if (next + group < first + count) mine = entry_of_lane(next + group, group);
            for (u32 n = lane; n < group;) {
                wait_for(p, epoch, target);
                if ((n += 32) < group) target = await_target(p, epoch, next + n);
            }
            __syncwarp();
            if (!stamped && lane == 0) stamp_worker(p, &WorkerStamps::first_rows);
            stamped = true;
        }
    }

    // Waits for an item's partial tiles and publishes each in their order.
    __device__ __forceinline__ void await_partials(u32 number, u32 first, u32 count) const {
        // The deadline runs from the item's begin, not from the call's.
        const auto begin = [&] {
            while (ptx::load_acquire_cta_shared(smem.opened()) <= number) ptx::sleep_ns(100);
        };
        await_in_order(p, epoch, first, count, begin, [&](u32 arrived) { publish(number, arrived); });
    }
};

}  // namespace flux
