// The weight whose columns an item has, of an AllGather-GEMM with several weights.

#pragma once
#include "program.cuh"

namespace flux {

// An op with one weight has its operands alone: everything here is then a constant or a parameter.
template <class C>
struct WeightOf {
    const Params& p;
    u32 number = 0;  // of the weight
    u32 start = 0;   // its first column, as items count columns

    __device__ __forceinline__ WeightOf(const Params& p, u32 col) : p(p) {
        if constexpr (C::kSeveralWeights) {
#pragma unroll
            for (u32 next = 1; next < kMaxWeights; ++next) {
                if (col >= p.more[next - 1].start) {
                    number = next;
                    start = p.more[next - 1].start;
                }
            }
        }
    }

    __device__ __forceinline__ const TensorMap* b() const { return number == 0 ? &p.b : more_maps(); }
    __device__ __forceinline__ const TensorMap* y() const { return number == 0 ? &p.y : more_maps() + 1; }
    __device__ __forceinline__ const TensorMap* short_shards() const { return number == 0 ? &p.short_shards : more_maps() + 2; }
    __device__ __forceinline__ u64 w() const { return number == 0 ? p.w : p.more[number - 1].w; }
    __device__ __forceinline__ u64 w_row_bytes() const { return number == 0 ? p.w_row_bytes : p.more[number - 1].w_row_bytes; }
    __device__ __forceinline__ u64 y_address() const { return number == 0 ? p.y_address : p.more[number - 1].y_address; }
    __device__ __forceinline__ u64 y_row_bytes() const { return number == 0 ? p.y_row_bytes : p.more[number - 1].y_row_bytes; }
    // Of column 0, as items count columns.
    __device__ __forceinline__ u64 bias() const { return number == 0 ? p.bias : p.more[number - 1].bias - start * u64{2}; }

private:
    __device__ __forceinline__ const TensorMap* more_maps() const { return &p.op_maps[(number - 1) * kMapsOfWeight]; }
};

}  // namespace flux
