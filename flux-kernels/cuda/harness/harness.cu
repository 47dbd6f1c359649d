// Kernels of the harness: operands, checks against an fp64 reference, and a delay.
#include "common/epilogue.cuh"
#include "harness/data.cuh"
#include "norm/rms_norm.cuh"
#include "ptx/memory.cuh"

namespace flux::harness {

constexpr u32 kTileRows = 64;
constexpr u32 kTileCols = 32;
constexpr u32 kStep = 16;

// By the definition, in fp64.
template <Activation A>
__device__ __forceinline__ double reference_of(double v) {
    if constexpr (A == Activation::kGelu) {
        return 0.5 * v * (1.0 + tanh(0.79788456080286536 * (v + 0.044715 * v * v * v)));
    } else if constexpr (A == Activation::kSilu) {
        return v / (1.0 + exp(-v));
    } else if constexpr (A == Activation::kRelu) {
        return v < 0.0 ? 0.0 : v;
    } else {
        static_assert(A == Activation::kNone, "an activation without a reference");
        return v;
    }
}

// Calls `f<A>()` for the activation with this number. Every activation of the Rust enum has an
// instantiation, so one without a reference does not compile; another number traps.
template <u32 A = 0, class F>
__device__ __forceinline__ void with_activation(u32 activation, F f) {
    if constexpr (A == kCountOf<Activation>) {
        __trap();
    } else if (activation == A) {
        f.template operator()<static_cast<Activation>(A)>();
    } else {
        with_activation<A + 1>(activation, f);
    }
}

}  // namespace flux::harness

using namespace flux;
using namespace flux::harness;

// Calls `f` with each element's index in the window's memory, and its row and column in the matrix.
template <class F>
__device__ __forceinline__ void each_element(const FillParams& p, F f) {
    const u64 total = static_cast<u64>(p.rows) * p.cols;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 row = static_cast<u32>(i / p.cols), col = static_cast<u32>(i % p.cols);
        f(p.transposed != 0 ? col * p.row_stride + row : row * p.row_stride + col, p.row0 + row, p.col0 + col);
    }
}

extern "C" __global__ void __launch_bounds__(256) flux_fill(const __grid_constant__ FillParams p) {
    const Fill fill = static_cast<Fill>(p.fill);
    const DType dtype = static_cast<DType>(p.dtype);
    each_element(p, [&](u64 at, u32 row, u32 col) {
        const float v = value(fill, p.seed, row, col);
        if (dtype == DType::kE4m3) {
            reinterpret_cast<u8*>(p.dst)[at] = to_e4m3(v);
        } else {
            reinterpret_cast<u16*>(p.dst)[at] = round_to(dtype, v);
        }
    });
}

extern "C" __global__ void __launch_bounds__(256) flux_fill_scales(const __grid_constant__ FillParams p) {
    each_element(p, [&](u64 at, u32 row, u32 col) { reinterpret_cast<float*>(p.dst)[at] = scale(static_cast<Fill>(p.fill), p.seed, row, col); });
}

// Of every shard's rows the lines of a number one after the other: [shards, lines, cols] becomes
// [lines, shards, cols].
extern "C" __global__ void __launch_bounds__(256) flux_interleave_shards(const __grid_constant__ InterleaveParams p) {
    const float* from = reinterpret_cast<const float*>(p.from);
    float* to = reinterpret_cast<float*>(p.to);
    const u64 total = static_cast<u64>(p.shards) * p.lines * p.cols;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 col = static_cast<u32>(i % p.cols), line = static_cast<u32>(i / p.cols / p.shards), shard = static_cast<u32>(i / p.cols % p.shards);
        to[i] = from[(static_cast<u64>(shard) * p.lines + line) * p.cols + col];
    }
}

// The row of scales and their column, at column `col` of all ranks' `k`, of a row of x or of w.
__device__ __forceinline__ float scale_at(const VerifyParams& p, u64 seed, u32 row, u32 rows_each, u32 col) {
    const Scales scales = static_cast<Scales>(p.scales);
    if (scales == Scales::kNone) return 1.0f;
    const u32 long_columns = p.long_segments * p.segment;
    const u32 source = col < long_columns ? col / p.segment : p.long_segments + (col - long_columns) / max(p.segment - p.segment_group, 1u);
    const bool of_blocks = scales == Scales::kBlock;
    return scale(static_cast<Fill>(p.fill), seed, scales == Scales::kTensor ? 0 : of_blocks ? row / rows_each : row, of_blocks ? col / kScaleBlock : source);
}

// The rank whose partial sums for a row of all are not rounded.
__device__ __forceinline__ u32 owner_of(const VerifyParams& p, u32 row) {
    const u32 full = p.m_shard * p.full_shards;
    if (p.m_shard == 0) return p.own;
    // Shards behind the full ones have one row less.
    return row < full ? row / p.m_shard : p.full_shards + (row - full) / max(p.m_shard - 1, 1u);
}

// Checks 64 x 32 elements a CTA, 4 x 2 a thread. The reference is accumulated in fp64 from the
// generators, not from the operands in memory.
//
// The bound of an element sums four roundings. The result's is u * |y|, or of a tiny number half the
// distance to the next. That of each partial sum sent in 16 bits is u * |partial|. A partial sum
// sent in fp32 has none. Accumulation in fp32 costs sqrt(k) * eps * sum |x| |w|, and
// of 8-bit operands what tensor cores and scales cost. The addition of a
// bias or a residual costs eps * |sum|. Each addition that rounds to 16 bits costs u of all
// magnitudes. An inexact activation multiplies the bound by its slope and adds its own error. Small
// integers must be equal, but for inexact activations and rounded additions.
//
// Of gated weights a thread's two columns are a gate and its up: a CTA checks half as many elements.
// With a and u their exact values, off by da and du at most, the product is off by da (|u| + du) +
// |a| du, and by its rounding.
extern "C" __global__ void __launch_bounds__(256) flux_verify(const __grid_constant__ VerifyParams p) {
    __shared__ float xs[kTileRows][kStep + 1];
    __shared__ float ws[kTileCols][kStep + 1];
    const DType operand = static_cast<DType>(p.operand), output = static_cast<DType>(p.output);
    const Fill fill = static_cast<Fill>(p.fill);
    const bool gated = p.gated != 0;
    const u32 row = blockIdx.y * kTileRows, col = blockIdx.x * (gated ? kTileCols / 2 : kTileCols);
    // The row of w, among the rank's, of one of the CTA's columns.
    const auto w_row = [&](u32 c) { return gated ? (col + c % 16) * p.gate_step + c / 16 * p.up_offset : col + c; };
    const u32 ti = threadIdx.x / 16, tj = threadIdx.x % 16;

    double sum[4][2] = {}, node[4][2] = {}, segment[4][2] = {};
    float magnitude[4][2] = {}, partials[4][2] = {};
    u32 in_segment = 0, source = 0;
    for (u32 c0 = 0; c0 < p.k; c0 += kStep) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < kTileRows * kStep; i += 256) {
            const u32 r = i / kStep, c = c0 + i % kStep;
            xs[r][i % kStep] = c < p.k ? element(operand, fill, p.x_seed, p.row0 + row + r, c) * scale_at(p, p.x_seed, p.row0 + row + r, 1, c) : 0.0f;
        }
        for (u32 i = threadIdx.x; i < kTileCols * kStep; i += 256) {
            const u32 r = i / kStep, c = c0 + i % kStep;
            ws[r][i % kStep] = c < p.k ? element(operand, fill, p.w_seed, p.col0 + w_row(r), c) * scale_at(p, p.w_seed, p.col0 + w_row(r), kScaleBlock, c) : 0.0f;
        }
        __syncthreads();
        // Segments are multiples of 8 long: half a step.
        for (u32 c = 0; c < kStep; c += 8) {
            if (c0 + c >= p.k) break;
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                float x[4], w[2];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) x[i] = xs[ti + 16 * i][c + e];
#pragma unroll
                for (u32 j = 0; j < 2; ++j) w[j] = ws[tj + 16 * j][c + e];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        // Products of 16-bit floats are exact in fp32, and those of 8 bits with
                        // scales of 4.
                        const float product = x[i] * w[j];
                        segment[i][j] += product;
                        magnitude[i][j] += fabsf(product);
                    }
                }
            }
            in_segment += 8;
            if (in_segment == p.segment - (source < p.long_segments ? 0 : p.segment_group) || c0 + c + 8 >= p.k) {
                in_segment = 0;
                const bool node_ends = (source + 1) % p.per_node == 0;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const u32 own = owner_of(p, p.row0 + row + ti + 16 * i);
                    const bool to_relay = source % p.per_node != own % p.per_node;
                    const bool to_node = node_ends && source / p.per_node != own / p.per_node;
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        // Integer partials are exact in fp32, so their rounding is known. The bound
                        // allows for that of others.
                        const auto sent = [&](double part) {
                            if (p.f32_partials != 0) return part;
                            partials[i][j] += fabsf(static_cast<float>(part));
                            return fill == Fill::kSmallInts ? widen(output, round_to(output, static_cast<float>(part))) : part;
                        };
                        node[i][j] += to_relay ? sent(segment[i][j]) : segment[i][j];
                        segment[i][j] = 0.0;
                        if (!node_ends) continue;
                        sum[i][j] += to_node ? sent(node[i][j]) : node[i][j];
                        node[i][j] = 0.0;
                    }
                }
                ++source;
            }
        }
    }

    const float u = unit_roundoff(output);
    const float eps = 5.9604645e-8f;  // 2^-24
    const float tiny = least_roundoff(output);
    // A node's sum includes rounded partial sums, and is rounded itself.
    const float per_sent = p.per_node > 1 ? u * (1.0f + u) : u;
    const bool exact = activation_is_exact(static_cast<Activation>(p.activation));
    float max_error = 0.0f, max_reference = 0.0f;
    RawReport* report = reinterpret_cast<RawReport*>(p.report);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            const u32 r = row + ti + 16 * i, c = col + tj + 16 * j;
            if (r >= p.rows || c >= p.cols || (gated && j == 1)) continue;
            const u16 bits = reinterpret_cast<const u16*>(p.y)[r * p.row_stride + c];
            const float y = widen(output, bits);
            // A sum with what is added to it, and how far it may be off.
            const auto finished = [&](u32 j, double& whole, float& inner) {
                whole = sum[i][j];
                inner = fill == Fill::kSmallInts ? 0.0f : (sqrtf(static_cast<float>(p.k)) * eps + p.accumulation) * magnitude[i][j] + per_sent * partials[i][j];
                float added = 0.0f;  // magnitudes
                const auto add = [&](float term) {
                    whole += term;
                    added += fabsf(term);
                    if (fill != Fill::kSmallInts) inner += eps * (fabsf(static_cast<float>(whole)) + inner);
                };
                if (p.bias != 0) add(element(output, fill, p.bias_seed, 0, p.col0 + w_row(tj + 16 * j)));
                if (p.residual != 0) add(element(output, fill, p.residual_seed, p.row0 + r, p.col0 + c));
                if (p.rounded_additions != 0) inner += u * p.rounded_additions * (partials[i][j] + added + inner);
            };
            double whole, expected;
            float inner;
            finished(j, whole, inner);
            with_activation(p.activation, [&]<Activation A>() {
                expected = reference_of<A>(whole);
                if (!activation_is_exact(A)) inner = activation_slope(A) * inner + kActivationError * (fabsf(static_cast<float>(whole)) + inner);
            });
            if (gated) {
                double up;
                float off;
                finished(1, up, off);
                inner = inner * (fabsf(static_cast<float>(up)) + off) + fabsf(static_cast<float>(expected)) * off;
                expected *= up;
                if (fill != Fill::kSmallInts || !exact) inner += eps * (fabsf(static_cast<float>(expected)) + inner);
            }
            const float reference = static_cast<float>(expected);
            const float error = static_cast<float>(fabs(static_cast<double>(y) - expected));
            bool ok;
            if (fill == Fill::kSmallInts && exact && p.rounded_additions == 0) {
                ok = y == widen(output, round_to(output, reference));
            } else {
                ok = error <= u * (fabsf(reference) + inner) + inner + tiny;
            }
            max_error = fmaxf(max_error, error);
            max_reference = fmaxf(max_reference, fabsf(reference));
            if (!ok) {
                atomicAdd(&report->violations, 1ull);
                atomicMin(&report->first, static_cast<u64>(r) << 32 | c);
            }
        }
    }
    // Bits of non-negative floats are ordered like the floats.
    atomicMax(&report->max_error, __float_as_uint(max_error));
    atomicMax(&report->max_reference, __float_as_uint(max_reference));
}

// Of a row of sums or of a bias the elements of eight columns of y: without gates in `gate` alone.
template <class Element>
__device__ __forceinline__ void load_eight(const UnfusedEpilogueParams& p, u64 row, u32 i, float (&gate)[8], float (&up)[8]) {
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if (p.gate_step != 2) {
        widen_8<Element>(from[i], gate);
        if (p.gate_step != 0) widen_8<Element>(from[p.up_offset / Element::kPerVector + i], up);
        return;
    }
    float low[8], high[8];
    widen_8<Element>(from[2 * i], low);
    widen_8<Element>(from[2 * i + 1], high);
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
        gate[e] = low[2 * e];
        up[e] = low[2 * e + 1];
        gate[e + 4] = high[2 * e];
        up[e + 4] = high[2 * e + 1];
    }
}

// In fp32, within kActivationError, as the fused kernel has it.
template <Activation A>
__device__ __forceinline__ float activated(float v) {
    if constexpr (A == Activation::kGelu) {
        return gate(v, v * fmaf(fminf(v * v, kLargestFloat), -kGeluCubic, -kGeluLinear));
    } else if constexpr (A == Activation::kSilu) {
        return gate(v, -v);
    } else if constexpr (A == Activation::kRelu) {
        return v < 0.0f ? 0.0f : v;
    } else {
        static_assert(A == Activation::kNone, "an activation without a formula");
        return v;
    }
}

// The epilogue of an unfused layer: y = act(sum + bias + residual), or act(gate) * up, of sums that
// were rounded, then the norm of y. A CTA has one row, and a thread normalises what it finished.
template <class Element>
__device__ __forceinline__ void unfused_epilogue(const UnfusedEpilogueParams& p) {
    uint4* y = reinterpret_cast<uint4*>(p.norm.y + blockIdx.x * p.norm.y_row_bytes);
    const uint4* residual = reinterpret_cast<const uint4*>(p.residual + blockIdx.x * p.norm.y_row_bytes);
    const uint4* gain = reinterpret_cast<const uint4*>(p.norm.gain);
    uint4* out = reinterpret_cast<uint4*>(p.norm.out + blockIdx.x * p.norm.out_row_bytes);
    const u64 sums = p.sums + blockIdx.x * p.sums_row_bytes;
    float v[8], up[8], r[8], more[8], sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.norm.cols / Element::kPerVector; i += blockDim.x) {
        load_eight<Element>(p, sums, i, v, up);
        if (p.bias != 0) {
            load_eight<Element>(p, p.bias, i, r, more);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) {
                v[e] += r[e];
                if (p.gate_step != 0) up[e] += more[e];
            }
        }
        if (p.residual != 0) {
            widen_8<Element>(ptx::load_constant_16(&residual[i]), r);
#pragma unroll
            for (u32 e = 0; e < 8; ++e) v[e] += r[e];
        }
        with_activation(p.activation, [&]<Activation A>() {
#pragma unroll
            for (u32 e = 0; e < 8; ++e) v[e] = activated<A>(v[e]);
        });
        if (p.gate_step != 0) {
#pragma unroll
            for (u32 e = 0; e < 8; ++e) v[e] *= up[e];
        }
        y[i] = narrow_8<Element>(v);
        widen_8<Element>(y[i], v);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) sum = fmaf(v[e], v[e], sum);
    }
    if (p.norm.gain == 0) return;
    const float scale = rms_scale(p.norm, sum);
    for (u32 i = threadIdx.x; i < p.norm.cols / Element::kPerVector; i += blockDim.x) {
        widen_8<Element>(y[i], v);
        widen_8<Element>(ptx::load_constant_16(&gain[i]), r);
#pragma unroll
        for (u32 e = 0; e < 8; ++e) v[e] = v[e] * scale * r[e];
        out[i] = narrow_8<Element>(v);
    }
}

extern "C" __global__ void __launch_bounds__(512) flux_unfused_epilogue(const __grid_constant__ UnfusedEpilogueParams p) {
    if (static_cast<DType>(p.dtype) == DType::kBf16) {
        unfused_epilogue<Bf16>(p);
    } else {
        unfused_epilogue<F16>(p);
    }
}

// Occupies one thread for `ns`.
extern "C" __global__ void flux_spin(u64 ns) {
    const u64 start = ptx::global_timer_ns();
    while (ptx::global_timer_ns() - start < ns) ptx::sleep_ns(64);
}
