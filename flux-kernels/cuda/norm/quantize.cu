// The quantising kernel of both element types.

#include "norm/quantize.cuh"

extern "C" __global__ void __launch_bounds__(512) flux_quantize_bf16(const __grid_constant__ flux::QuantizeParams p) { flux::quantize<flux::Bf16>(p); }
extern "C" __global__ void __launch_bounds__(512) flux_quantize_fp16(const __grid_constant__ flux::QuantizeParams p) { flux::quantize<flux::F16>(p); }
