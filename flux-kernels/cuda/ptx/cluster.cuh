// CTAs that run together and reach each other's shared memory (PTX ISA: mapa, mbarrier, barrier.cluster, cp.async.bulk.tensor with .multicast::cluster).
#pragma once
#include "types.cuh"

namespace flux::ptx {

// %cluster_ctarank
__device__ __forceinline__ u32 cta_of_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// barrier.cluster: by all threads of the cluster; release and acquire at its scope
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// mbarrier.arrive at the barrier that lies at this shared address in another CTA of the cluster. It publishes nothing that this thread wrote: a release at the
// cluster's scope would hold back everything until all of the thread's accesses have reached L2, at every stage.
__device__ __forceinline__ void mbarrier_arrive_at(u32 bar, u32 cta) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
        "r"(cta)
        : "memory");
}

// cp.async.bulk.tensor.2d, global to the same shared address of every CTA in `mask`, where it completes the barrier at the address of `bar`
__device__ __forceinline__ void tensor_load_2d_to(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, u32 mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
            dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "h"(static_cast<unsigned short>(mask))
        : "memory");
}

}  // namespace flux::ptx
