// Copies peers' finished rows from the own results to the caller's y.
//
// Copies are the last records of the program, and each awaits one signal. The mover's warp makes
// the first ones of a CTA beside the GEMM; consumers that have no tile and no reduction left make
// the others. Who has seen its last signal arrives at `copied`, before which no CTA closes the
// call.

#pragma once
#include "common/wait.cuh"
#include "common/walk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"

namespace flux {

template <class C>
struct Copier {
    static constexpr u32 kAhead = 4;  // vectors of a thread in flight: the mover's warp has few registers
    static constexpr u32 kWarps = 4 * C::kConsumers;

    const Params& p;
    const Shared<C>& smem;
    const u32 epoch, lane;

    // Warps that arrive at `copied`.
    static constexpr u32 kArrivals = 1 + kWarps;

    // By the mover's warp.
    __device__ __forceinline__ void beside_gemm() const { copy(0, first_of_consumers(), 0, 1); }

    // By warp `warp` of the consumers.
    __device__ __forceinline__ void behind_gemm(u32 warp) const { copy(first_of_consumers(), count(), warp, kWarps); }

private:
    __device__ __forceinline__ u32 count() const {
        return p.copy_count <= blockIdx.x ? 0 : (p.copy_count - 1 - blockIdx.x) / gridDim.x + 1;
    }

    // The copies of the last wave's tiles come when the consumers are idle, and those of a call of
    // one wave all do. A quarter stands for the last wave, by choice: no record compares others.
    __device__ __forceinline__ u32 first_of_consumers() const {
        // Sums of flattened rows come when the GEMM is over.
        if (p.slots_per_source == 0) return 0;
        const u32 all = count(), late = ceil_div(all, 4) < 2 ? 2 : ceil_div(all, 4);
        return all <= late ? 0 : all - late;
    }

    // Makes the copies `first` to `end` of this CTA, of each the part of one of `parts` warps.
    __device__ __forceinline__ void copy(u32 first, u32 end, u32 part, u32 parts) const {
#pragma unroll 1
        for (u32 n = first; n < end; ++n) {
            const WorkItem item = load_item(p, p.item_count + blockIdx.x + n * gridDim.x);
            // After a failed wait garbage within bounds is copied: the call is reported as failed.
            if (lane == 0) await_late(p, epoch, item, 0);
            // Orders what lane 0 has acquired before the other lanes' loads.
            __syncwarp();
            copy_rows(item, part, parts);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(smem.copied());
    }

    __device__ __forceinline__ void copy_rows(const WorkItem& item, u32 part, u32 parts) const {
        const u64 from = half_of(p, p.data[p.rank], epoch) + p.results_offset;
        const u32 per_row = item.cols / C::Output::kPerVector, all = item.rows * per_row, stride = 32 * parts;
#pragma unroll 1
        for (u32 v = part * 32 + lane; v < all; v += kAhead * stride) {
            uint4 eight[kAhead];
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                // A vector that does not exist repeats the last one: registers that only some
                // threads write would be kept through the mainloop.
                const u32 at = least(v + i * stride, all - 1);
                eight[i] = ptx::load_global_16(from + row(item, at, per_row) * p.result_row_bytes + col_bytes(item, at, per_row));
            }
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                const u32 at = v + i * stride;
                if (at < all) ptx::store_global_16(p.weights[0].y + row(item, at, per_row) * p.weights[0].y_row_bytes + col_bytes(item, at, per_row), eight[i]);
            }
        }
    }

    __device__ __forceinline__ static u64 row(const WorkItem& item, u32 vector, u32 per_row) { return item.row + vector / per_row; }
    __device__ __forceinline__ static u64 col_bytes(const WorkItem& item, u32 vector, u32 per_row) {
        return (item.col + vector % per_row * C::Output::kPerVector) * u64{C::Output::kBytes};
    }
};

}  // namespace flux
