// The weight whose columns an item has, of an AllGather-GEMM with several weights.

#pragma once
#include "program.cuh"

namespace flux {

// Gates and weights of [k, n] come alone, and so do the weights of partial sums: everything here is
// then a parameter at a fixed place.
template <class C>
struct WeightOf {
    static constexpr bool kMayBeSeveral = !C::kReduceScatter && !C::kGated && !C::kWeightsKn;

    const Params& p;
    u32 number = 0;  // of the weight

    __device__ __forceinline__ WeightOf(const Params& p, u32 col) : p(p) {
        if constexpr (kMayBeSeveral) {
#pragma unroll
            for (u32 next = 1; next < kMaxWeights; ++next) number += col >= p.weights[next].start;
        }
    }

    __device__ __forceinline__ const Weight& operands() const { return p.weights[number]; }
    __device__ __forceinline__ const TensorMap* b() const { return number == 0 ? &p.b : more_maps(); }
    __device__ __forceinline__ const TensorMap* y() const { return number == 0 ? &p.y : more_maps() + 1; }
    __device__ __forceinline__ const TensorMap* short_shards() const { return number == 0 ? &p.short_shards : more_maps() + 2; }

private:
    __device__ __forceinline__ const TensorMap* more_maps() const { return &p.op_maps[(number - 1) * kMapsOfWeight]; }
};

}  // namespace flux
