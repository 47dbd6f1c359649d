// The consumers: warps that multiply the stages into their parts of the tile's accumulators, add
// split-K partials and peers' partial tiles in a fixed order, and store the result from registers.
//
// The largest tiles leave 40 registers beside the accumulators. So through the mainloop a thread
// keeps only the item's number and its places in ring and barriers, and works out the rest anew.

#pragma once
#include "common/copy.cuh"
#include "common/epilogue.cuh"
#include "common/progress.cuh"
#include "common/raise.cuh"
#include "common/reduce_rows.cuh"
#include "common/shards.cuh"
#include "common/trace.cuh"
#include "common/wait.cuh"
#include "common/weights.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "sm80/config.cuh"
#include "sm80/output.cuh"
#include "sm80/scales.cuh"

namespace flux {

template <class C>
struct Consumer {
    // How promoted sums of a step are added.
    using Steps = typename Either<C::kScalesBlocks, ScaledSteps<C>, PlainSteps<C>>::Type;

    const Params& p;
    const Shared<C> smem;
    RingState<C::kStages> ring;
    u32 announced_phase = 0;

    __device__ __forceinline__ void run(const Walk& walk) {
        u32 number = 0;
        for (; walk.item(number) < walk.count; ++number) {
            // Each phase finds the item anew and loads the fields that it needs: the registers hold
            // accumulators.
            const auto index = [&] { return ptx::cta_of_grid() + ptx::copied_here(number) * gridDim.x; };
            const auto item = [&]() -> const WorkItem& { return p.items[index()]; };
            if (C::kScatters && item().sink == static_cast<u32>(Sink::kReduceRows)) break;
            Accumulators<C> acc;
            multiply(item, acc);
            if constexpr (C::kScalesSums) scale_sums<C>(p, smem, epoch(), item(), acc);
            mark(index, &ItemStamps::multiplied);
            if (item().parts != 0 && threadIdx.x == 0) ptx::store_release_cta_shared(smem.multiplied(), number + 1);
            add_split_k_partials(item, number, acc);
            if constexpr (C::kSendsPartials) {
                add_peer_partials(item(), number, acc);
                if (item().partials != 0) mark(index, &ItemStamps::partials_there);
            }
            mark(index, &ItemStamps::summed);
            if (finishes<C>(item())) {
                const Part<C> part;
                finish_tile<C>(p, index(), part.warp % C::kWarpsN, part.lane, part.row(), acc);
            }
            write(item(), acc);
            mark(index, &ItemStamps::written);
            if (item().raise != kNone) {
                announce();
            } else {
                mark(index, &ItemStamps::sent);
            }
        }
        if constexpr (C::kScatters) reduce_scattered_rows(walk.item(number), walk);
        if constexpr (C::kSendsPartials) {
            if (p.copy_count != 0) Copier<C>{p, smem, epoch(), threadIdx.x % 32}.behind_gemm(threadIdx.x / 32);
        }
    }

private:
    __device__ __forceinline__ u32 epoch() const { return static_cast<u32>(ptx::load_acquire_cta_shared(smem.epoch())); }

    // Multiplies at least one stage. Sums of 8-bit products leave the tensor cores, which keep fewer
    // bits than fp32 has, every stage, those of a part of the columns at a time.
    template <class Item>
    __device__ __forceinline__ void multiply(Item item, Accumulators<C>& acc) {
        u32 left = item().k_steps;
        // This lane's row of the first m16 block, and of the first pair of n8 blocks, with the
        // swizzled chunk of step 0; a step moves it by two chunks, which flips two bits.
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const u32 lane_a = (warp / C::kWarpsN * C::kRows + lane % 16) * 128 + (lane / 16 ^ lane % 8) * 16;
        const u32 col = warp % C::kWarpsN * C::kCols;
        const u32 lane_b = C::kBytesA + (C::kWeightsKn ? col / 16 * C::kWeightStripBytes + lane % 16 * 32 + (lane / 16 ^ lane / 4 % 2) * 16
                                                       : (col + lane / 16 * 8 + lane % 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16);
        set_to_zero(acc);
        Steps steps(p, smem, item);
#pragma unroll 1
        for (; left != 0; --left) {
            ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
            if constexpr (C::kPromotes) {
                steps.load();
#pragma unroll
                for (u32 pair = 0; pair < C::kPairs; pair += C::kPartPairs) {
                    float sums[C::kBlocks][C::kPartPairs * 8];
                    set_to_zero(sums);
                    multiply_stage(lane_a, lane_b, pair, sums);
                    if (pair + C::kPartPairs == C::kPairs) give_stage_back(lane);
                    steps.add(pair, sums, acc);
                }
            } else {
                multiply_stage(lane_a, lane_b, 0, acc);
                give_stage_back(lane);
            }
        }
    }

    template <u32 N>
    __device__ __forceinline__ static void set_to_zero(float (&sums)[C::kBlocks][N]) {
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 n = 0; n < N; ++n) sums[block][n] = 0.0f;
        }
    }

    // Adds the products of a stage to the sums of pairs of n8 blocks from number `first` on.
    // Fragments of B are loaded a pair ahead of their products. Those of A follow the last products
    // that use the ones before: a second set would not fit beside the accumulators, and the
    // multiprocessor's other consumers fill the gap.
    template <u32 N>
    __device__ __forceinline__ void multiply_stage(u32 lane_a, u32 lane_b, u32 first, float (&sums)[C::kBlocks][N]) const {
        const u32 base = smem.a(ring.stage);
        // With steps of 8-bit operands side by side the compiler spills, most where it makes
        // conversions and fp16 products of theirs (compute capability 9.0 and 10.0).
        constexpr bool kScaled = C::kScalesSums || C::kScalesBlocks;
        constexpr u32 kUnrolled = kScaled ? 1 : C::kProducts;
#pragma unroll(kUnrolled)
        for (u32 step = 0; step < C::kProducts; ++step) {
            u32 a[C::kBlocks][4];
#pragma unroll
            for (u32 block = 0; block < C::kBlocks; ++block) ptx::load_matrix_x4(a[block], base + (lane_a ^ step * 32) + block * 2048);
#pragma unroll
            for (u32 pair = 0; pair < N / 8; ++pair) {
                // Keeps the fragments of a pair back: all pairs of a warp follow.
                if constexpr (kScaled && !C::kPromotes) __syncwarp();
                u32 b[4];
                if constexpr (C::kWeightsKn) {
                    ptx::load_matrix_x4_transposed(b, base + lane_b + (first + pair) * C::kWeightStripBytes + step * 512);
                } else {
                    ptx::load_matrix_x4(b, base + (lane_b ^ step * 32) + (first + pair) * 2048);
                }
#pragma unroll
                for (u32 block = 0; block < C::kBlocks; ++block) {
                    ptx::mma_16x8(typename C::Operand{}, &sums[block][pair * 8], a[block], b[0], b[1]);
                    ptx::mma_16x8(typename C::Operand{}, &sums[block][pair * 8 + 4], a[block], b[2], b[3]);
                }
            }
        }
    }

    // When all lanes have read the stage.
    __device__ __forceinline__ void give_stage_back(u32 lane) {
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(smem.empty(ring.stage));
        ring.advance();
    }

    // Waits until the `n`-th of what the CTA's `number`-th item adds has arrived. Ends, because the
    // signaller ends all its waits.
    __device__ __forceinline__ void await_addend(u32 number, u32 n) const {
        while (ptx::load_acquire_cta_shared(smem.arrived()) <= progress(number, n)) {}
    }

    // Adds the split-K partials of the tile, in their order.
    template <class Item>
    __device__ __forceinline__ void add_split_k_partials(Item item, u32 number, Accumulators<C>& acc) const {
#pragma unroll 1
        for (u32 n = 0; n < item().parts; ++n) {
            await_addend(number, n);
            SplitKSlot<C>::add(SplitKSlot<C>::vectors(p, epoch(), item().part + n), acc);
        }
    }

    // Adds peers' partial tiles, in slot order, each as it arrives.
    __device__ __forceinline__ void add_peer_partials(const WorkItem& item, u32 number, Accumulators<C>& acc) const {
        const Slot<C> slots{p};
#pragma unroll 1
        for (u32 source = 0; source < item.partials; ++source) {
            await_addend(number, item.parts + source);
            // Made here: kept while it waits, it would take registers of accumulators.
            const u64 half = own_data(p) + (epoch() & 1) * p.half_stride;
            slots.add(half + (item.partial_slot + source * p.slots_per_source) * slots.bytes(), item.rows, acc);
        }
    }

    // Writes the accumulators where the item's sink says.
    __device__ __forceinline__ void write(const WorkItem& item, const Accumulators<C>& acc) const {
        if (item.sink == static_cast<u32>(Sink::kPartial)) {
            SplitKSlot<C>::store(SplitKSlot<C>::vectors(p, epoch(), item.part), acc);
            return;
        }
        if constexpr (C::kReduceScatter) {
            const u64 half = (epoch() & 1) * p.half_stride;
            if (item.sink == static_cast<u32>(Sink::kSend)) {
                const Slot<C> slots{p};
                // After a failed wait a peer may be gone, or in a new communicator.
                if (!is_poisoned()) slots.store(p.data[item.dest] + half + item.slot * slots.bytes(), item.rows, acc);
                return;
            }
            if (item.sink == static_cast<u32>(Sink::kScatter)) {
                if (!is_poisoned()) scatter(item, half, acc);
                return;
            }
            const Rounded<C> rounded(acc);
            store(item, rounded);
            if (is_shared<C>(item) && !is_poisoned()) store_at_peers(item, half, rounded);
        } else {
            store(item, Rounded<C>(acc));
        }
    }

    // As `poisoned`, by an address that is made here.
    __device__ __forceinline__ bool is_poisoned() const {
        return ptx::load_relaxed_gpu(reinterpret_cast<const u32*>(ptx::copied_here(reinterpret_cast<u64>(&p.control->poison)))) != 0;
    }

    // Stores rows in the caller's y.
    __device__ __forceinline__ void store(const WorkItem& item, const Rounded<C>& rounded) const {
        const u32 shard = is_shared<C>(item) ? p.rank : item.out_outer;
        const Weight& weight = WeightOf<C>(p, item.col).operands();
        const u64 first_row = first_row_of_shard(p, shard) + item.row;
        const u64 y = weight.y + first_row * weight.y_row_bytes + item.col / C::kColsPerOut * u64{C::Output::kBytes};
        store_rows<C>(item, rounded, [&](u32 row) -> u64 { return row < item.rows ? y + row * weight.y_row_bytes : 0; }, ptx::store_global_16);
    }

    // Stores rows of partial sums at the ranks that own them: one, or with a mask all of its ranks.
    __device__ __forceinline__ void scatter(const WorkItem& item, u64 half, const Accumulators<C>& acc) const {
        const u64 rows = half + static_cast<u64>(p.rank) * p.m_shard * p.source_row_bytes;
        const auto row_at = [&](u32 row) -> u64 {
            if (row >= item.rows) return 0;
            const RowOwner owner(p, item.row + row);
            const u64 data = p.scatter_mask == 0 ? p.data[owner.rank] : own_data(p);
            return data + rows + static_cast<u64>(owner.row) * p.source_row_bytes + item.col * u64{C::kPartialBytes};
        };
        const auto put = [&](u64 at, uint4 values) {
            if (p.scatter_mask == 0) {
                ptx::store_global_16(at, values);
            } else {
                put_at(p.scatter_mask, at, values);
            }
        };
        if constexpr (C::kPartialsF32) {
            store_rows_f32<C>(item, acc, row_at, put);
        } else {
            store_rows<C>(item, Rounded<C>(acc), row_at, put);
        }
    }

    // Stores a finished tile among the results of every peer.
    __device__ __forceinline__ void store_at_peers(const WorkItem& item, u64 half, const Rounded<C>& rounded) const {
        const u64 row = first_row_of_shard(p, p.rank) + item.row;
        const u64 own = own_data(p) + half + p.results_offset + row * p.result_row_bytes + item.col * u64{C::Output::kBytes};
        const auto row_at = [&](u32 row) -> u64 { return row < item.rows ? own + row * p.result_row_bytes : 0; };
        const u32 peers = ((1u << p.world) - 1) & ~(1u << p.rank);
        store_rows<C>(item, rounded, row_at, [&](u64 at, uint4 eight) { put_at(peers, at, eight); });
    }

    // Stores a vector at all of several ranks. `at` is in this rank's memory; in another rank's it
    // lies as far from the start.
    __device__ __forceinline__ void put_at(u32 ranks, u64 at, uint4 values) const {
#pragma unroll 1
        for (u32 left = ranks; left != 0; left &= left - 1) ptx::store_global_16(at + (p.data[__ffs(left) - 1] - own_data(p)), values);
    }

    // Leaves the item's signal to the signaller, once it has raised the one before.
    __device__ __forceinline__ void announce() {
        ptx::mbarrier_wait(smem.announced(), announced_phase ^ 1);
        announced_phase ^= 1;
        // Orders the lanes' stores before the arrival of one of them.
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(smem.stored());
    }

    // Reductions follow all tiles of the walk.
    __device__ __forceinline__ void reduce_scattered_rows(u32 i, const Walk& walk) const {
        if (i >= walk.count) return;
        ptx::mbarrier_wait(smem.rows_ready(), 0);
        // After a failed wait a peer may be gone, or in a new communicator.
        const bool live = ptx::named_barrier_all<1, 32 * C::kConsumerWarps>(!poisoned(p));
        for (; i < walk.count; i += walk.stride) {
            const WorkItem item = load_item(p, i);
            const auto index = [&] { return i; };
            mark(index, &ItemStamps::partials_there);
            reduce_rows<C>(p, epoch(), item, threadIdx.x, live);
            raise_shared_sum<C, 1>(p, epoch(), item, threadIdx.x, live);
            mark(index, &ItemStamps::written);
        }
    }

    // One thread stamps for all. The stamp's address is not kept through the mainloop.
    template <class Index>
    __device__ __forceinline__ void mark(Index index, u64 ItemStamps::* phase) const {
        if (C::kStampsItems && traces(p) && threadIdx.x == 0) stamp(p, ptx::copied_here(index()), phase);
    }
};

}  // namespace flux
