// Kernels of the harness: they make operands, check results against an fp64 reference, and occupy
// the device for a known time.
#include "harness/data.cuh"
#include "program.cuh"
#include "ptx/memory.cuh"

namespace flux::harness {

struct FillParams {
    u64 dst;         // first element of the window
    u64 row_stride;  // elements
    u64 seed;
    u32 row0, col0;  // the window's place in the global matrix
    u32 rows, cols;
    u32 fill, bf16;
};
static_assert(sizeof(FillParams) == 48, "harness.rs");

// What is checked: y[i, j] of a window against act(sum over c of x[row0 + i, c] * w[col0 + j, c] +
// bias[col0 + j]).
struct VerifyParams {
    u64 y;
    u64 row_stride;  // elements
    u64 x_seed, w_seed;
    u64 report;
    u64 bias_seed;   // of a matrix of one row
    u32 row0, col0;
    u32 rows, cols;
    u32 k, segment;  // the inner product is summed in segments of this length, one for each rank
    u32 own;         // whose output it is; no rank where tiles are flattened
    u32 fill, bf16;
    u32 bias;        // whether there is one
    u32 activation;
    u32 per_node;    // segments of a node: what is sent is rounded to 16 bits, a node's but for the one on the owner's rail, and each other node's sum
};
static_assert(sizeof(VerifyParams) == 96, "harness.rs");

struct VerifyReport {
    u64 violations;
    u64 first;          // smallest row << 32 | column of a violation
    u32 max_error;      // bits of a float, not negative
    u32 max_reference;  // likewise
    u32 max_ratio;      // likewise: error over its bound
    u32 reserved;
};
static_assert(sizeof(VerifyReport) == 32, "harness.rs");

constexpr u32 kTileRows = 64;
constexpr u32 kTileCols = 32;
constexpr u32 kStep = 16;

// By the definitions, in fp64, with the largest slope: what an error before the activation grows
// by.
__device__ __forceinline__ double activated(Activation activation, double v, float& slope) {
    slope = 1.0f;
    switch (activation) {
        case Activation::kNone: break;
        case Activation::kGelu: slope = 1.13f; return 0.5 * v * (1.0 + tanh(0.79788456080286536 * (v + 0.044715 * v * v * v)));
        case Activation::kSilu: slope = 1.1f; return v / (1.0 + exp(-v));
        case Activation::kRelu: return v < 0.0 ? 0.0 : v;
    }
    return v;
}

}  // namespace flux::harness

using namespace flux;
using namespace flux::harness;

extern "C" __global__ void __launch_bounds__(256) flux_fill(const __grid_constant__ FillParams p) {
    u16* dst = reinterpret_cast<u16*>(p.dst);
    const u64 total = static_cast<u64>(p.rows) * p.cols;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < total; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 row = static_cast<u32>(i / p.cols), col = static_cast<u32>(i % p.cols);
        dst[row * p.row_stride + col] =
            round_to(p.bf16 != 0, value(static_cast<Fill>(p.fill), p.seed, p.row0 + row, p.col0 + col));
    }
}

// One CTA checks 64 x 32 elements; a thread 4 x 2. The reference is accumulated in fp64 from the
// generators, not from the operands in memory.
//
// The bound of an element: the rounding of the result, u * |y|; of each partial sum that was
// rounded to 16 bits to be sent, u * |partial|; and of fp32 accumulation, sqrt(k) * eps * sum |x|
// |w|; of the bias's addition, eps * |sum|. GELU and SiLU multiply what was off before them by
// their slope and add 7 * eps * |sum| (flux-kernels/src/epilogue.rs). Small integers have to be
// exact before these two, and in the result without them.
extern "C" __global__ void __launch_bounds__(256) flux_verify(const __grid_constant__ VerifyParams p) {
    __shared__ float xs[kTileRows][kStep + 1];
    __shared__ float ws[kTileCols][kStep + 1];
    const bool bf16 = p.bf16 != 0;
    const Fill fill = static_cast<Fill>(p.fill);
    const u32 row = blockIdx.y * kTileRows, col = blockIdx.x * kTileCols;
    const u32 ti = threadIdx.x / 16, tj = threadIdx.x % 16;

    double sum[4][2] = {}, node[4][2] = {}, segment[4][2] = {};
    float magnitude[4][2] = {}, partials[4][2] = {};
    u32 in_segment = 0, source = 0;
    for (u32 c0 = 0; c0 < p.k; c0 += kStep) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < kTileRows * kStep; i += 256) {
            const u32 r = i / kStep, c = c0 + i % kStep;
            xs[r][i % kStep] = c < p.k ? element(bf16, fill, p.x_seed, p.row0 + row + r, c) : 0.0f;
        }
        for (u32 i = threadIdx.x; i < kTileCols * kStep; i += 256) {
            const u32 r = i / kStep, c = c0 + i % kStep;
            ws[r][i % kStep] = c < p.k ? element(bf16, fill, p.w_seed, p.col0 + col + r, c) : 0.0f;
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
                        // Products of 16-bit floats are exact in fp32.
                        const float product = x[i] * w[j];
                        segment[i][j] += product;
                        magnitude[i][j] += fabsf(product);
                    }
                }
            }
            in_segment += 8;
            if (in_segment == p.segment || c0 + c + 8 >= p.k) {
                in_segment = 0;
                const bool to_mate = source % p.per_node != p.own % p.per_node;
                const bool node_ends = (source + 1) % p.per_node == 0;
                const bool to_node = node_ends && source / p.per_node != p.own / p.per_node;
                ++source;
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
#pragma unroll
                    for (u32 j = 0; j < 2; ++j) {
                        // Integer partials are exact in fp32, so their rounding is known; that of
                        // others is what the bound allows for.
                        const auto sent = [&](double part) {
                            partials[i][j] += fabsf(static_cast<float>(part));
                            return fill == Fill::kSmallInts ? widen(bf16, round_to(bf16, static_cast<float>(part))) : part;
                        };
                        node[i][j] += to_mate ? sent(segment[i][j]) : segment[i][j];
                        segment[i][j] = 0.0;
                        if (!node_ends) continue;
                        sum[i][j] += to_node ? sent(node[i][j]) : node[i][j];
                        node[i][j] = 0.0;
                    }
                }
            }
        }
    }

    const float u = bf16 ? 1.0f / 256.0f : 1.0f / 2048.0f;
    const float eps = 5.9604645e-8f;  // 2^-24
    // A node's sum is rounded with what was rounded before in it.
    const float per_sent = p.per_node > 1 ? u * (1.0f + u) : u;
    const Activation activation = static_cast<Activation>(p.activation);
    const bool smooth = activation == Activation::kGelu || activation == Activation::kSilu;
    float max_error = 0.0f, max_reference = 0.0f, max_ratio = 0.0f;
    VerifyReport* report = reinterpret_cast<VerifyReport*>(p.report);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            const u32 r = row + ti + 16 * i, c = col + tj + 16 * j;
            if (r >= p.rows || c >= p.cols) continue;
            const u16 bits = reinterpret_cast<const u16*>(p.y)[r * p.row_stride + c];
            const float y = widen(bf16, bits);
            double whole = sum[i][j];
            float inner = fill == Fill::kSmallInts ? 0.0f : sqrtf(static_cast<float>(p.k)) * eps * magnitude[i][j] + per_sent * partials[i][j];
            if (p.bias != 0) {
                whole += element(bf16, fill, p.bias_seed, 0, p.col0 + c);
                if (fill != Fill::kSmallInts) inner += eps * (fabsf(static_cast<float>(whole)) + inner);
            }
            float slope;
            const double expected = activated(activation, whole, slope);
            if (smooth) inner = slope * inner + 7.0f * eps * (fabsf(static_cast<float>(whole)) + inner);
            const float reference = static_cast<float>(expected);
            const float error = static_cast<float>(fabs(static_cast<double>(y) - expected));
            bool ok;
            if (fill == Fill::kSmallInts && !smooth) {
                ok = y == widen(bf16, round_to(bf16, reference));
            } else {
                const float bound = u * (fabsf(reference) + inner) + inner;
                ok = error <= bound;
                max_ratio = fmaxf(max_ratio, error / bound);
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
    atomicMax(&report->max_ratio, __float_as_uint(max_ratio));
}

// Occupies one thread of the device for `ns`.
extern "C" __global__ void flux_spin(u64 ns) {
    const u64 start = ptx::global_timer_ns();
    while (ptx::global_timer_ns() - start < ns) ptx::sleep_ns(64);
}
