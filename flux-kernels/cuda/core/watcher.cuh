// The watcher: a warp that waits for what other ranks send, and tells the producer how far it is there: rows ahead of it, or partial tiles while their item is multiplied. A look
// at a signal takes its way to memory and back, and what was seen has to be acquired: done by the producer, that would drain the ring of stages at every shard, and hold up
// the first partial tiles of every own tile.
#pragma once
#include "core/config.cuh"
#include "core/trace.cuh"
#include "core/wait.cuh"
#include "ptx/mbarrier.cuh"

namespace flux {

// What is there: rows of A before step `step` of a CTA's item number `number`, counted from 0, or as many of the partial tiles that it awaits. Later is larger.
__device__ __forceinline__ u64 progress(u32 number, u32 step) {
    return static_cast<u64>(number) << 32 | step;
}

// The entries of the await list that an item's rows of A wait for.
struct Awaited {
    u32 first, count, group;
};

__device__ __forceinline__ Awaited awaited_by(const Params& p, u32 index) {
    const WorkItem item = load_item(p, index);
    return {item.await_first, item.await_count, item.await_group};
}

// The entries at the head of the await list, one for each lane of a warp. Most programs' first items await those: a guess, made before the first item is known.
__device__ __forceinline__ Await await_of_lane(const Params& p) {
    const u32 at = threadIdx.x % 32;
    return p.awaits[at < p.await_count ? at : 0];
}

template <class C>
struct Watcher {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 lane;
    bool stamped = false;

    // By the whole warp, whose lanes have acquired what they waited for.
    __device__ __forceinline__ void tell(u32 number, u32 step) const {
        __syncwarp();
        if (lane == 0) ptx::store_release_cta_shared(smem.there(), progress(number, step));
    }

    // The entry of a group that this lane looks at first; where there is none, as good as any.
    __device__ __forceinline__ Await entry_of_lane(u32 first, u32 group) const {
        return p.awaits[first + (lane < group ? lane : 0)];
    }

    // The groups of an item's await list, each of which is awaited before one step of k; `mine` is this lane's entry of the first. After a failed wait the rows are garbage,
    // but in bounds: the tile is computed and the call reported as failed.
    __device__ __forceinline__ void await_rows(u32 number, const Awaited& item, Await mine) {
        for (u32 next = item.first; next < item.first + item.count; next += item.group) {
            WaitTarget target = await_target(p, epoch, mine);
            tell(number, mine.k_step);
            // Asked for beside this group's signals: asked for after them, it would be a way to memory more until they are told.
            if (next + item.group < item.first + item.count) mine = entry_of_lane(next + item.group, item.group);
            for (u32 n = lane; n < item.group;) {
                wait_for(p, epoch, target);
                if ((n += 32) < item.group) target = await_target(p, epoch, next + n);
            }
            __syncwarp();
            if (C::kTrace && !stamped && lane == 0) stamp_worker<C>(p, &WorkerStamps::first_rows);
            stamped = true;
        }
    }

    __device__ __forceinline__ void run_ahead(const Walk& walk, Awaited item, const Await& head) {
        // The list of the last item that awaited rows: chunks and bands span many tiles, and their signals stay raised.
        u32 seen_first = kNone, seen_count = 0, number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride) {
            if (number != 0) item = awaited_by(p, i);
            if (item.count != 0 && (item.first != seen_first || item.count != seen_count)) {
                await_rows(number, item, item.first == 0 ? head : entry_of_lane(item.first, item.group));
                seen_first = item.first;
                seen_count = item.count;
            }
            tell(++number, 0);
        }
    }

    // The partial tiles that an item awaits, as they come, in their order. After a failed wait all are said to be there: the sums are garbage, but in bounds, and the call is
    // reported as failed.
    __device__ __forceinline__ void await_partials(u32 number, u32 first, u32 count) const {
        for (u32 there = 0; there < count;) {
            const u32 polled = count - there < 32 ? count - there : 32;
            const WaitTarget target = await_target(p, epoch, first + there + (lane < polled ? lane : 0));
            // Waits begin with their item, as the producer's would, and not with the call.
            while (there == 0 && ptx::load_acquire_cta_shared(smem.opened()) <= number) ptx::sleep_ns(100);
            for (Patience patience;;) {
                const u32 seen = ptx::load_acquire_sys(target.word);
                const u32 missing = __ballot_sync(0xFFFFFFFFu, lane < polled && seen != epoch);
                if ((missing & 1) == 0) {
                    there += missing == 0 ? polled : __ffs(missing) - 1;
                    break;
                }
                // The first lane waits for the first that is missing.
                if (__any_sync(0xFFFFFFFFu, lane == 0 && !patience.again(p, epoch, target, seen))) {
                    there = count;
                    break;
                }
            }
            tell(number, there);
        }
    }

    __device__ __forceinline__ void run_beside(const Walk& walk) const {
        u32 number = 0;
        for (u32 i = walk.first; i < walk.count; i += walk.stride, ++number) {
            const WorkItem& item = p.items[i];
            if (awaits_partials(item)) await_partials(number, item.late_first + item.parts, item.late_count - item.parts);
        }
    }

    // `first`: what the CTA's first item awaits, and `head`: what `await_of_lane` has asked for; both of rows of A only.
    __device__ __forceinline__ void run(const Walk& walk, const Awaited& first, const Await& head) {
        if constexpr (C::kReduceScatter) {
            run_beside(walk);
        } else {
            run_ahead(walk, first, head);
        }
    }
};

}  // namespace flux
