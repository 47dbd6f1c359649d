// Programmatic dependent launch (PTX ISA: griddepcontrol). Where the device has none, nothing.

#pragma once
#include "types.cuh"

namespace flux::ptx {

// griddepcontrol.wait: the launch ahead on the stream has ended, and its writes are seen.
__device__ __forceinline__ void await_launch_ahead() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents: when all CTAs have come here, or ended, those of the next launch
// may begin.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flux::ptx
