// Raising signals: what an item's results announce, to whom, and when.

#pragma once
#include "common/shards.cuh"
#include "common/wait.cuh"
#include "program.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Counts an item of a chunk; whether the chunk is complete.
__device__ __forceinline__ bool completes_chunk(const Params& p, const WorkItem& item) {
    if (item.counter == kNone) return true;
    // Orders what this worker has stored before the count that lets another worker raise the
    // signals.
    ptx::fence_acq_rel_sys();
    return ptx::atomic_inc_wrap_relaxed(chunk_counter(p.control, item.counter), item.raise_after - 1) == item.raise_after - 1;
}

// The same by a warp, whose lanes then raise the signals.
__device__ __forceinline__ bool warp_completes_chunk(const Params& p, const WorkItem& item) {
    if (item.counter == kNone) return true;
    u32 complete = 0;
    if (threadIdx.x % 32 == 0) {
        complete = completes_chunk(p, item);
        // Orders the chunk's items, whose counts are acquired, before the other lanes' signals.
        ptx::fence_acq_rel_sys();
    }
    complete = ptx::from_lane(complete, 0);
    __syncwarp();
    return complete != 0;
}

// Raises the item's signal at its owner, once its chunk is complete.
__device__ __forceinline__ void raise(const Params& p, u32 epoch, const WorkItem& item) {
    if (!completes_chunk(p, item)) return;
    // Orders the chunk's slots before the signal: the bulk stores are complete, and the count
    // is acquired.
    ptx::fence_acq_rel_sys();
    ptx::store_relaxed_sys(signal_word(p.pad[item.dest], item.raise, epoch), epoch);
}

// Raises the signals of the rows' owners, with the last row also those of ranks without rows.
// Where all tiles are one chunk, raises those of all ranks when the chunk is complete. By the warp.
__device__ __forceinline__ void raise_scattered(const Params& p, u32 epoch, const WorkItem& item) {
    // Nobody awaits the rows.
    if (item.raise == kNone) return;
    const u32 lane = threadIdx.x % 32;
    const u32 end = item.row + item.rows, all = p.world * (p.m_shard - 1) + p.full_shards;
    u32 first = RowOwner(p, item.row).rank, last = end == all ? p.world - 1 : RowOwner(p, end - 1).rank;
    if (!warp_completes_chunk(p, item)) return;
    if (item.counter != kNone || p.scatter_mask != 0) {
        first = 0;
        last = p.world - 1;
    }
    const u32 owner = first + lane;
    if (owner > last) return;
    // Orders the consumers' rows, acquired with their barriers, before the signal.
    ptx::fence_acq_rel_sys();
    ptx::store_relaxed_sys(signal_word(p.pad[owner], item.raise, epoch), epoch);
}

// Whether a finished tile also goes to every peer.
template <class C>
__device__ __forceinline__ bool is_shared(const WorkItem& item) {
    return C::kSendsPartials && item.sink == static_cast<u32>(Sink::kReduce) && item.raise != kNone;
}

// Raises the item's signal at `peer`, if that is one: a thread for each.
__device__ __forceinline__ void raise_at_peers(const Params& p, u32 epoch, const WorkItem& item, u32 peer) {
    if (peer >= p.world || peer == p.rank) return;
    // Orders what the threads have stored, gathered by a barrier, before the signal.
    ptx::fence_acq_rel_sys();
    ptx::store_relaxed_sys(signal_word(p.pad[peer], item.raise, epoch), epoch);
}

// Whether the intra-node peers whose partial tiles are in a relay's sum are in the same op. The
// sum's owner hears from none of them. A relay adds none in its mainloop.
__device__ __forceinline__ bool intra_node_peers_agree(const Params& p, u32 epoch, const WorkItem& item) {
#pragma unroll 1
    for (u32 n = item.parts; n < item.late_count; ++n) {
        if (!same_op(p, epoch, p.awaits[item.late_first + n].peer)) return false;
    }
    return true;
}

// Whether no intra-node peer has given up. A peer that has may have overwritten what it sent
// before the relay read it, and the sum's owner in another node does not hear of it.
__device__ __forceinline__ bool intra_node_peers_work(const Params& p, u32 epoch) {
    u32 reasons = 0;
#pragma unroll 4
    for (u32 peer = 0; peer < p.world; ++peer) reasons |= ptx::load_relaxed_sys(broken_word(p.pad[p.rank], peer));
    for (u32 peer = 0; reasons != 0 && peer < p.world; ++peer) peer_works(p, epoch, peer);
    return reasons == 0;
}

// Whether a relay's sum may be announced.
__device__ __forceinline__ bool intra_node_peers_stand(const Params& p, u32 epoch, const WorkItem& item) {
    return intra_node_peers_agree(p, epoch, item) && intra_node_peers_work(p, epoch);
}

}  // namespace flux
