// The signaller: a warp that awaits what items add, and raises the signals of finished items.

#pragma once
#include "common/progress.cuh"
#include "common/raise.cuh"
#include "common/reduce_rows.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "ptx/mbarrier.cuh"
#include "sm80/config.cuh"

namespace flux {

template <class C>
struct Signaller {
    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    u32 phase = 0;  // of `stored`

    __device__ __forceinline__ void run(const Walk& walk) {
        u32 i = walk.first;
        for (u32 number = 0; i < walk.count; i += walk.stride, ++number) {
            const WorkItem item = load_item(p, i);
            if (C::kScatters && item.sink == static_cast<u32>(Sink::kReduceRows)) break;
            if (item.parts != 0) {
                await_own_deadline(item, number);
                await(number, 0, item.late_first, item.parts);
            }
            if constexpr (C::kSendsPartials) {
                if (item.partials != 0) await_partials(item, number);
            }
            if (item.raise == kNone) continue;
            ptx::mbarrier_wait(smem.stored(), phase);
            phase ^= 1;
            // The consumers may store the next item's results meanwhile.
            if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.announced());
            announce(item);
            if (threadIdx.x % 32 == 0) stamp(p, i, &ItemStamps::sent);
        }
        if constexpr (C::kScatters) {
            if (i < walk.count) await_rows_to_reduce<C>(p, smem, epoch, walk, i, RowAwaits::of(p, i));
        }
        if (C::kReduceScatter && p.copy_count != 0) ptx::mbarrier_wait(smem.copied(), 0);
    }

private:
    // Lets the consumers add what has arrived. By the whole warp, whose lanes have acquired it.
    __device__ __forceinline__ void publish(u32 number, u32 arrived) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::store_release_cta_shared(smem.arrived(), progress(number, arrived));
    }

    // Returns when the split-K partials of an item have arrived, or the item is multiplied. A
    // worker whose peers' rows are late sends no partial: the wait for the rows, which names the
    // peer, began earlier and ends first.
    __device__ __forceinline__ void await_own_deadline(const WorkItem& item, u32 number) const {
        const u32 lane = threadIdx.x % 32;
        const WaitTarget target = await_target(p, epoch, item.late_first + (lane < item.parts ? lane : 0));
        while (!__all_sync(0xFFFFFFFFu, ptx::load_acquire_sys(target.word) == epoch)) {
            // The lanes leave together: each reads the word at its own time.
            if (__any_sync(0xFFFFFFFFu, ptx::load_acquire_cta_shared(smem.multiplied()) > number)) return;
            ptx::sleep_ns(20);
        }
    }

    // Awaits addends of the CTA's `number`-th item behind the first `before`.
    __device__ __forceinline__ void await(u32 number, u32 before, u32 first, u32 count) const {
        await_in_order(p, epoch, first, count, [] {}, [&](u32 arrived) { publish(number, before + arrived); });
    }

    // Every partial tile has an await, or none has. This kernel adds those that others add in their
    // mainloop before the rest.
    __device__ __forceinline__ void await_partials(const WorkItem& item, u32 number) const {
        const u32 in_mainloop = in_mainloop_partials(p, item);
        await(number, item.parts, item.await_first, least(item.await_count, in_mainloop));
        if (awaits_partials(item)) {
            await(number, item.parts + in_mainloop, item.late_first + item.parts, item.late_count - item.parts);
        } else {
            publish(number, item.parts + item.partials);
        }
    }

    // Raises the item's signal. The consumers' stores are acquired with their barrier.
    __device__ __forceinline__ void announce(const WorkItem& item) const {
        if (item.sink == static_cast<u32>(Sink::kPartial)) {
            if (threadIdx.x % 32 != 0) return;
            // Orders the consumers' accumulators before the signal.
            ptx::fence_acq_rel_gpu();
            ptx::store_relaxed_gpu(signal_word(p.pad[p.rank], item.raise, epoch), epoch);
        } else if constexpr (C::kReduceScatter) {
            // A consumer that has seen the poison has stored nothing, and it is seen here too.
            if (__any_sync(0xFFFFFFFFu, poisoned(p))) return;
            if (item.sink == static_cast<u32>(Sink::kScatter)) {
                raise_scattered(p, epoch, item);
            } else if (item.sink == static_cast<u32>(Sink::kReduce)) {
                if (warp_completes_chunk(p, item)) raise_at_peers(p, epoch, item, threadIdx.x % 32);
            } else if (threadIdx.x % 32 == 0 && (item.partials == 0 || intra_node_peers_stand(p, epoch, item))) {
                raise(p, epoch, item);
            }
            __syncwarp();
        }
    }
};

}  // namespace flux
