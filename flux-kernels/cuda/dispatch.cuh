// From a run-time activation to its formula.

#pragma once
#include "abi.cuh"
#include "ptx/warp.cuh"

namespace flux {

// Calls `f<A>()` for the activation with this number. Every activation of the Rust enum has an
// instantiation, so one without a formula does not compile; another number traps.
template <u32 A = 0, class F>
__device__ __forceinline__ void with_activation(u32 activation, F f) {
    if constexpr (A == kActivations) {
        ptx::trap();
    } else if (activation == A) {
        f.template operator()<static_cast<Activation>(A)>();
    } else {
        with_activation<A + 1>(activation, f);
    }
}

}  // namespace flux
