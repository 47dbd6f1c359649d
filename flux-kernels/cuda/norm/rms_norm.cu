// The RMSNorm kernel of both element types.

#include "norm/rms_norm.cuh"

extern "C" __global__ void __launch_bounds__(512) flux_rms_norm_bf16(const __grid_constant__ flux::RmsNormParams p) { flux::rms_norm<flux::Bf16>(p); }
extern "C" __global__ void __launch_bounds__(512) flux_rms_norm_fp16(const __grid_constant__ flux::RmsNormParams p) { flux::rms_norm<flux::F16>(p); }
