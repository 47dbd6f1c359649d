// Bulk asynchronous copies between global and shared memory (PTX ISA: cp.async.bulk,
// cp.async.bulk.tensor).

#pragma once
#include "types.cuh"

namespace flux::ptx {

// prefetch.tensormap
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk.tensor.2d, global to shared: completes `bar` by the bytes of the box
__device__ __forceinline__ void tensor_load_2d(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1)
                 : "memory");
}

// cp.async.bulk.tensor.4d, global to shared
__device__ __forceinline__ void tensor_load_4d(u32 dst, const TensorMap* map, u32 bar, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// cp.async.bulk.tensor.3d, shared to global; elements outside of the tensor are not written
__device__ __forceinline__ void tensor_store_3d(const TensorMap* map, u32 src, i32 c0, i32 c1, i32 c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(src), "r"(c0),
                 "r"(c1), "r"(c2)
                 : "memory");
}

// cp.async.bulk, global to shared; addresses and size are multiples of 16
__device__ __forceinline__ void bulk_load(u32 dst, u64 src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
                 "r"(bytes), "r"(bar)
                 : "memory");
}

// cp.async.bulk, shared to global (own or peer memory); addresses and size are multiples of 16
__device__ __forceinline__ void bulk_store(u64 dst, u32 src, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}

// cp.async.bulk.commit_group
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group: all but the newest `Pending` groups are complete, their writes visible
// to this thread
template <u32 Pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// cp.async.bulk.wait_group.read: all but the newest `Pending` groups have read their shared memory,
// nothing more
template <u32 Pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// fence.proxy.async.global: orders generic accesses of global memory before it with async-proxy
// accesses after it. Without a state space it would be a fence of all memory as well, which waits
// for what the thread has under way.
__device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// fence.proxy.async.shared::cta: the same for shared memory
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flux::ptx
