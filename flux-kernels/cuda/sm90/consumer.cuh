// A consumer: a warpgroup that multiplies the stages into its part of the tile's accumulators. It
// adds split-K partials and peers' partial tiles in a fixed order, and leaves the rounded result in
// its staging buffer for the storer.

#pragma once
#include "sm90/config.cuh"
#include "common/accumulate.cuh"
#include "common/epilogue.cuh"
#include "common/reduce_rows.cuh"
#include "common/scatter.cuh"
#include "common/trace.cuh"
#include "sm90/partials.cuh"
#include "sm90/scales.cuh"
#include "sm90/swap_ab.cuh"
#include "common/wait.cuh"
#include "ptx/bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

namespace flux {

template <class C>
struct Consumer {
    static constexpr u32 kAccumulators = C::kAccumulators;
    // This consumer's rows of A and rows of B in a stage.
    static constexpr u32 kOffsetA = C::kSplitColumns ? 0 : C::kRows * C::kStepBytes;
    static constexpr u32 kOffsetB = C::kSplitColumns ? C::kCols * C::kStepBytes : 0;

    // How weights lie, and with that wgmma's operands.
    using Weights = typename Either<C::kWeightsKn, ptx::MnMajor<C::kBoxRowBytes>, ptx::KMajor>::Type;
    using OfM = typename Either<C::kSwapAB, Weights, ptx::KMajor>::Type;
    using OfN = typename Either<C::kSwapAB, ptx::KMajor, Weights>::Type;

    // How promoted sums of a step are added.
    using Steps = typename StepsOf<C, C::kScalesBlocks, (C::kBlocks > 1 && !C::kSwapAB)>::Type;

    const Params& p;
    const Shared<C> smem;
    const u32 epoch;
    const u32 index;   // which consumer
    const u32 thread;  // 0..128
    RingState<C::kStages> ring;
    RingState<C::kInMainloopPieces> in_mainloop;  // of pieces that the storer brings
    u32 out_phase = 0;
    // Descriptors of the first stage's operands, of wgmma's m and n. `from_lane` makes them
    // uniform, so the compiler computes what follows from them once a warp.
    u32 first_m = ptx::from_lane(C::kSwapAB ? weights_descriptor() : ptx::k_major_128b_descriptor(smem.a(0) + index * kOffsetA), 0);
    u32 first_n = ptx::from_lane(C::kSwapAB ? ptx::k_major_128b_descriptor(smem.a(0) + index * kOffsetA) : weights_descriptor(), 0);

    __device__ __forceinline__ void run(const Walk& walk) {
        // Not the walk's value, which would live in local memory across the change of registers.
        u32 i = ptx::from_lane(ptx::cta_of_grid(), 0);
        for (; i < walk.count; i = ptx::from_lane(i + walk.stride, 0)) {
            const WorkItem item = load_item(p, i);
            if constexpr (C::kScatters) {
                if (item.sink == static_cast<u32>(Sink::kReduceRows)) break;
            }
            float acc[C::kBlocks][kAccumulators];
            multiply(item, acc);
            if constexpr (C::kScalesSums) scale_sums<C>(p, smem, epoch, load_item(p, i), index, thread, acc);
            mark(i, &ItemStamps::multiplied);
            if (item.parts != 0) add_split_k_partials(item.parts, acc);
            if constexpr (C::kSendsPartials) {
                if (item.partials != 0) add_peer_partials(item, acc);
            }
            mark(i, &ItemStamps::summed);
            if (finishes<C>(item)) finish_tile<C>(p, i, index, thread, C::kSplitColumns ? 0 : index * C::kRows, acc);
            hand_over(item, i, acc);
            if constexpr (C::kLockstep) ptx::named_barrier_sync<3, 128 * C::kConsumers>();
        }
        if constexpr (C::kScatters) reduce_scattered_rows(i, walk);
    }

private:
    // Of this consumer's weights in the first stage.
    __device__ __forceinline__ u32 weights_descriptor() const {
        const u32 address = smem.b(0) + index * kOffsetB;
        if constexpr (C::kWeightsKn) {
            return Weights::descriptor(address);
        } else {
            return ptx::k_major_128b_descriptor(address);
        }
    }

    // Issues the products of the next stage, added to the sums; the `First` stage of a tile sets
    // them. Arrives at `read`, the barrier of the stage before, when that stage's products are
    // done.
    template <bool First>
    __device__ __forceinline__ void issue_stage(u32 read, float (&acc)[C::kBlocks][kAccumulators]) const {
        constexpr u32 kGroup = C::kProducts / C::kWgmmaGroups;
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        const u32 m = ptx::advance_descriptor(first_m, ring.stage * C::kStageBytes);
        const u32 n = ptx::advance_descriptor(first_n, ring.stage * C::kStageBytes);
        pin(acc);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < C::kProducts; ++k) {
#pragma unroll
            for (u32 block = 0; block < C::kBlocks; ++block) {
                ptx::Wgmma<C::kWgmmaN, typename C::Operand>::template mma<OfM, OfN>(acc[block], ptx::advance_descriptor(m, block * 64 * 128 + k * OfM::kStepBytes),
                                                                          ptx::advance_descriptor(n, k * OfN::kStepBytes), !First || k != 0);
            }
            if ((k + 1) % kGroup != 0) continue;
            ptx::wgmma_commit();
            pin(acc);
            if (!First && k + 1 == kGroup) {
                ptx::wgmma_wait<1>();
                if (thread == 0) ptx::mbarrier_arrive(read);
                pin(acc);
            }
        }
    }

    // Issues the products of a block of the next stage: sums that leave the tensor cores, which keep
    // some 13 bits of a sum.
    __device__ __forceinline__ void issue_promoted(u32 block, float (&sums)[kAccumulators]) const {
        const u32 m = ptx::advance_descriptor(first_m, ring.stage * C::kStageBytes);
        const u32 n = ptx::advance_descriptor(first_n, ring.stage * C::kStageBytes);
        ptx::pin_registers(sums);
        ptx::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < C::kProducts; ++k) {
            ptx::Wgmma<C::kWgmmaN, typename C::Operand>::template mma<OfM, OfN>(sums, ptx::advance_descriptor(m, block * 64 * 128 + k * OfM::kStepBytes),
                                                                                ptx::advance_descriptor(n, k * OfN::kStepBytes), k != 0);
        }
        ptx::wgmma_commit();
    }

    // Multiplies the next stage and advances. The products of an m64 block are added before those
    // of the next are issued: there are registers for one. Meanwhile the other consumer's are
    // multiplied.
    __device__ __forceinline__ void promote_stage(Steps& steps, float (&acc)[C::kBlocks][kAccumulators]) {
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
            float sums[kAccumulators];
            issue_promoted(block, sums);
            steps.template load<0>(block);
            ptx::pin_registers(sums);
            ptx::wgmma_wait<0>();
            ptx::pin_registers(sums);
            if (block + 1 == C::kBlocks && thread == 0) ptx::mbarrier_arrive(smem.empty(ring.stage));
            steps.template add<0>(block, sums, acc[block]);
        }
        ring.advance();
    }

    // Issues the products of the next stage into `Set` and advances. Returns the barrier to arrive
    // at when they are done.
    template <u32 Set>
    __device__ __forceinline__ u32 issue_step(Steps& steps, float (&sums)[2][kAccumulators]) {
        ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        issue_promoted(0, sums[Set]);
        steps.template load<Set>(0);
        const u32 read = smem.empty(ring.stage);
        ring.advance();
        return read;
    }

    // Adds the sums of `Set` when all products but those of `Behind` steps are done.
    template <u32 Set, u32 Behind>
    __device__ __forceinline__ void add_step(u32 read, Steps& steps, float (&sums)[2][kAccumulators], float (&acc)[kAccumulators]) const {
        ptx::pin_registers(sums[Set]);
        ptx::wgmma_wait<Behind>();
        ptx::pin_registers(sums[Set]);
        if (thread == 0) ptx::mbarrier_arrive(read);
        steps.template add<Set>(0, sums[Set], acc);
    }

    // Issues the next step into `Set`, then adds the sums of the step ahead.
    template <u32 Set>
    __device__ __forceinline__ u32 follow_step(u32 read, Steps& steps, float (&sums)[2][kAccumulators], float (&acc)[kAccumulators]) {
        const u32 next = issue_step<Set>(steps, sums);
        add_step<1 - Set, 1>(read, steps, sums, acc);
        return next;
    }

    // Multiplies steps of one block, of which two are on their way at a time.
    __device__ __forceinline__ void multiply_in_pairs(u32 k_steps, Steps& steps, float (&acc)[kAccumulators]) {
        float sums[2][kAccumulators];
        u32 read = issue_step<0>(steps, sums);
        u32 step = 1;
#pragma unroll 1
        for (; step + 1 < k_steps; step += 2) {
            read = follow_step<1>(read, steps, sums, acc);
            read = follow_step<0>(read, steps, sums, acc);
        }
        if (step < k_steps) {
            read = follow_step<1>(read, steps, sums, acc);
            add_step<1, 0>(read, steps, sums, acc);
        } else {
            add_step<0, 0>(read, steps, sums, acc);
        }
    }

    // Issues the products of the next stage and advances. Returns the barrier to arrive at when
    // they are done; there is none of promoted sums.
    template <bool First>
    __device__ __forceinline__ u32 take_stage(u32 read, Steps& steps, float (&acc)[C::kBlocks][kAccumulators]) {
        if constexpr (C::kPromotes) {
            promote_stage(steps, acc);
            return 0;
        }
        issue_stage<First>(read, acc);
        const u32 next = smem.empty(ring.stage);
        ring.advance();
        return next;
    }

    // Waits until the sums so far are in registers.
    __device__ __forceinline__ void settle(float (&acc)[C::kBlocks][kAccumulators]) const {
        if constexpr (C::kPromotes) return;
        ptx::wgmma_wait<0>();
        pin(acc);
    }

    __device__ __forceinline__ static void pin(float (&acc)[C::kBlocks][kAccumulators]) {
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) ptx::pin_registers(acc[block]);
    }

    // Multiplies at least one step. At the power limit each instruction of the inner loop costs
    // time. In-mainloop partial tiles are added piece by piece, by one consumer some steps before
    // the other.
    __device__ __forceinline__ void multiply(const WorkItem& item, float (&acc)[C::kBlocks][kAccumulators]) {
        const u32 k_steps = ptx::from_lane(item.k_steps, 0);
        if constexpr (C::kPromotes) {
#pragma unroll
            for (u32 at = 0; at < C::kBlocks * kAccumulators; ++at) *accumulator(acc, at) = 0.0f;
        }
        // Gathered rows are there, and so are their scales.
        if constexpr (C::kScalesBlocks) ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
        Steps steps(p, smem, epoch, item, index, thread);
        if constexpr (C::kStepsInFlight == 2) {
            multiply_in_pairs(k_steps, steps, acc[0]);
            return;
        }
        u32 read = take_stage<true>(0, steps, acc);
        u32 step = 1;
        if constexpr (C::kSendsPartials && !C::kScalesSums && !C::kScalesBlocks) {
            const u32 in_mainloop = ptx::from_lane(in_mainloop_partials(p, item), 0);
#pragma unroll 1
            for (u32 source = 0; source < in_mainloop; ++source) {
                const u32 first = p.in_mainloop_first + index * kInMainloopLag + source * p.in_mainloop_gap;
#pragma unroll
                for (u32 piece = 0; piece < C::kPieces; ++piece) {
                    read = multiply_until(first + piece * (p.in_mainloop_gap / C::kPieces), step, read, steps, acc);
                    settle(acc);
                    add_in_mainloop_piece(piece, acc);
                    read = take_stage<false>(read, steps, acc);
                    ++step;
                }
            }
        }
        read = multiply_until(k_steps, step, read, steps, acc);
        settle(acc);
        if (!C::kPromotes && thread == 0) ptx::mbarrier_arrive(read);
    }

    __device__ __forceinline__ u32 multiply_until(u32 end, u32& step, u32 read, Steps& steps, float (&acc)[C::kBlocks][kAccumulators]) {
#pragma unroll 1
        for (; step < end; ++step) {
            read = take_stage<false>(read, steps, acc);
            // Of two groups one stays in flight; with one group, the stage before is done.
            if constexpr (C::kWgmmaGroups == 2) ptx::wgmma_wait<1>();
        }
        return read;
    }

    // Adds a piece of a peer's partial tile to the accumulators of the same positions.
    __device__ __forceinline__ void add_piece(u32 from, u32 piece, float (&acc)[C::kBlocks][kAccumulators]) const {
#pragma unroll
        for (u32 v = 0; v < C::piece_vectors(piece); ++v) {
            const uint4 vector = ptx::load_shared_16(from + v * 128 * 16 + thread * 16);
            const u32 number = piece * C::kPieceVectors + v;
            if constexpr (C::kPartialsF32) {
                add_four(vector, accumulator(acc, number * 4));
            } else {
                // They may be of two blocks; a pair never is.
                add_eight<C>(vector, [&](u32 i) { return accumulator(acc, number * 8 + i); });
            }
        }
    }

    // Accumulator `at` of all blocks.
    __device__ __forceinline__ static float* accumulator(float (&acc)[C::kBlocks][kAccumulators], u32 at) {
        return &acc[at / kAccumulators][at % kAccumulators];
    }

    // Adds the next piece, which the storer has loaded into the staging buffers.
    __device__ __forceinline__ void add_in_mainloop_piece(u32 piece, float (&acc)[C::kBlocks][kAccumulators]) {
        ptx::mbarrier_wait(smem.in_mainloop_full(in_mainloop.stage), in_mainloop.phase);
        add_piece(smem.in_mainloop_piece(in_mainloop.stage, index), piece, acc);
        sync_consumer();
        if (thread == 0) ptx::mbarrier_arrive(smem.in_mainloop_empty(in_mainloop.stage));
        in_mainloop.advance();
    }

    // Adds the partial tiles that the mainloop did not, in slot order, as the ring brings them.
    __device__ __forceinline__ void add_peer_partials(const WorkItem& item, float (&acc)[C::kBlocks][kAccumulators]) {
        for (u32 source = in_mainloop_partials(p, item); source < item.partials; ++source) {
#pragma unroll
            for (u32 piece = 0; piece < C::kPieces; ++piece) {
                ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
                add_piece(smem.a(ring.stage) + index * C::kPieceBytesPerConsumer, piece, acc);
                give_stage_back();
            }
        }
    }

    // Releases the stage once all threads of the warpgroup have read it.
    __device__ __forceinline__ void give_stage_back() {
        sync_consumer();
        if (thread == 0) ptx::mbarrier_arrive(smem.empty(ring.stage));
        ring.advance();
    }

    // Named barrier of this consumer's 128 threads; barrier 0 is __syncthreads.
    __device__ __forceinline__ void sync_consumer() const {
        if (index == 0) {
            ptx::named_barrier_sync<1, 128>();
        } else {
            ptx::named_barrier_sync<2, 128>();
        }
    }

    // One thread stamps for both consumers: they take the same stages at nearly the same time.
    __device__ __forceinline__ void mark(u32 item, u64 ItemStamps::* phase) const {
        if (traces(p) && index == 0 && thread == 0) stamp(p, item, phase);
    }

    // Writes row-major boxes with the swizzle that the tensor store undoes: the 16-byte chunks of a
    // row change places by the number of its 128-byte line.
    __device__ __forceinline__ void write_boxes(const float (&acc)[C::kBlocks][kAccumulators]) const {
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 row = warp * 16 + lane % 16;  // the row whose 16 bytes this lane addresses: blocks 0, 2 are the upper eight rows
        const u32 half = lane / 16;             // blocks 2, 3 are the next eight columns
        constexpr u32 kChunks = C::kBoxRowBytes / 16;
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
#pragma unroll
            for (u32 j = 0; j < C::kOutCols / 8; j += 2) {
                const u32 box = smem.out(index) + (block * C::kBoxes + j / kChunks) * C::kBoxBytes;
                const u32 chunk = (j % kChunks + half) ^ (row * C::kBoxRowBytes / 128 % kChunks);
                // Boxes of one chunk follow each other.
                const u32 at = kChunks == 1 ? box + half * C::kBoxBytes + row * 16 : box + row * C::kBoxRowBytes + chunk * 16;
                const auto pair = [&](u32 n) {
                    return C::Output::pack_2(result<C>(acc[block], j * 4 + n * 2), result<C>(acc[block], j * 4 + n * 2 + 1));
                };
                if (j + 1 < C::kOutCols / 8) {
                    ptx::store_matrix_x4(at, pair(0), pair(1), pair(2), pair(3));
                } else {
                    ptx::store_matrix_x2(at, pair(0), pair(1));
                }
            }
        }
    }

    // Writes a partial tile as threads hold it: vector v of thread t at (v * 128 + t) * 16. The
    // reader is the same thread of another rank, so every access is contiguous.
    __device__ __forceinline__ void write_slot(const float (&acc)[C::kBlocks][kAccumulators]) const {
#pragma unroll
        for (u32 v = 0; v < C::kVectors; ++v) {
            // A vector may span two blocks; a pair never does.
            const auto pair = [&](u32 at) {
                const float* d = &acc[at / kAccumulators][at % kAccumulators];
                return C::Output::pack_2(d[0], d[1]);
            };
            const uint4 four = {pair(v * 8), pair(v * 8 + 2), pair(v * 8 + 4), pair(v * 8 + 6)};
            ptx::store_shared_16(smem.out(index) + (v * 128 + thread) * 16, four);
        }
    }

    // Writes a partial tile in fp32 to global staging memory, as its slot holds it.
    __device__ __forceinline__ void write_staged_slot(const float (&acc)[C::kBlocks][kAccumulators]) const {
        const Slot<C> slots{p};
        const u32 vector_bytes = slots.vector_bytes(index);
        if (Slot<C>::kMayBeShort && thread * 16 >= vector_bytes) return;
        const u64 to = global_staging<C>(p) + slots.part(index) + thread * 16;
#pragma unroll
        for (u32 v = 0; v < C::kVectors; ++v) store_four(to + v * vector_bytes, v * 4, acc);
    }

    // Stores four accumulators from number `at` on.
    __device__ __forceinline__ static void store_four(u64 to, u32 at, const float (&acc)[C::kBlocks][kAccumulators]) {
        const float* d = &acc[at / kAccumulators][at % kAccumulators];
        ptx::store_global_16(to, {ptx::copied_bits(d[0]), ptx::copied_bits(d[1]), ptx::copied_bits(d[2]), ptx::copied_bits(d[3])});
    }

    // Writes a part of the dense rows in fp32: of every sixteen the upper or the lower eight.
    __device__ __forceinline__ void write_part(u32 part, const float (&acc)[C::kBlocks][kAccumulators]) const {
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 first_row = C::kSplitColumns ? 0 : index * C::kPartRows;
        const u32 first_col = C::kSplitColumns ? index * C::kCols : 0;
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
            const u32 to = smem.out_row(first_row + block * 32 + warp * 8 + lane / 4) + (first_col + lane % 4 * 2) * 4;
#pragma unroll
            for (u32 j = 0; j < C::kCols / 8; ++j) {
                const float* d = &acc[block][j * 4 + part * 2];
                ptx::store_shared_8(to + j * 32, ptx::copied_bits(d[0]), ptx::copied_bits(d[1]));
            }
        }
    }

    // Writes dense rows of the whole tile, for owners that take some of them.
    __device__ __forceinline__ void write_rows(const float (&acc)[C::kBlocks][kAccumulators]) const {
        const u32 warp = thread / 32, lane = thread % 32;
        const u32 first_row = C::kSplitColumns ? 0 : index * C::kRows;
        const u32 first_col = C::kSplitColumns ? index * C::kCols : 0;
#pragma unroll
        for (u32 block = 0; block < C::kBlocks; ++block) {
            const u32 row = smem.out_row(first_row + block * 64 + warp * 16 + lane % 16) + (first_col + lane / 16 * 8) * C::Output::kBytes;
#pragma unroll
            for (u32 j = 0; j < C::kCols / 8; j += 2) {
                const float* d = &acc[block][j * 4];
                ptx::store_matrix_x4(row + j * 8 * C::Output::kBytes, C::Output::pack_2(d[0], d[1]), C::Output::pack_2(d[2], d[3]),
                                     C::Output::pack_2(d[4], d[5]), C::Output::pack_2(d[6], d[7]));
            }
        }
    }

    // Writes a split-K partial: fp32 accumulators in thread order, four to a vector. The slot is
    // looked up here, as tiles of 256x192 have no register to keep it through the mainloop.
    __device__ __forceinline__ void write_partial(u32 i, const float (&acc)[C::kBlocks][kAccumulators]) const {
        const u64 half = half_of(p, p.data[p.rank], ptx::copied_here(epoch));
        const u64 dst = half + p.split_k_offset + static_cast<u64>(p.items[i].part) * C::kSplitKSlotBytes + index * (C::kSplitKSlotBytes / C::kConsumers) + thread * 16;
#pragma unroll
        for (u32 v = 0; v < C::kSplitKVectors; ++v) store_four(dst + v * 128 * 16, v * 4, acc);
    }

    // Adds the split-K partials of the tile, in their order.
    __device__ __forceinline__ void add_split_k_partials(u32 parts, float (&acc)[C::kBlocks][kAccumulators]) {
        for (u32 n = 0; n < parts; ++n) {
#pragma unroll
            for (u32 piece = 0; piece < C::kSplitKPieces; ++piece) {
                ptx::mbarrier_wait(smem.full(ring.stage), ring.phase);
                const u32 src = smem.a(ring.stage) + index * (C::split_k_piece_vectors(piece) * 128 * 16) + thread * 16;
#pragma unroll
                for (u32 v = 0; v < C::split_k_piece_vectors(piece); ++v) {
                    add_four(ptx::load_shared_16(src + v * 128 * 16), accumulator(acc, (piece * C::kSplitKPieceVectors + v) * 4));
                }
                give_stage_back();
            }
        }
    }

    __device__ __forceinline__ void write_rows_of_part(u32 part, const float (&acc)[C::kBlocks][kAccumulators]) const {
        if constexpr (C::kPartialsF32 && C::kSwapAB) {
            write_part_swapped<C>(smem, index, thread, part, acc);
        } else if constexpr (C::kPartialsF32) {
            write_part(part, acc);
        } else if constexpr (C::kSwapAB) {
            write_rows_swapped<C>(smem, index, thread, acc);
        } else {
            write_rows(acc);
        }
    }

    // Writes the accumulators where the item's sink says.
    __device__ __forceinline__ void write(const WorkItem& item, u32 i, const float (&acc)[C::kBlocks][kAccumulators]) const {
        if (item.sink == static_cast<u32>(Sink::kPartial)) {
            write_partial(i, acc);
            return;
        }
        if constexpr (C::kSendsPartials) {
            if (item.sink == static_cast<u32>(Sink::kSend)) {
                if constexpr (C::kPartialsF32) {
                    write_staged_slot(acc);
                } else {
                    write_slot(acc);
                }
                return;
            }
        }
        if constexpr (C::kScatters) {
            if (item.sink == static_cast<u32>(Sink::kScatter)) {
                // Loaded while the rows are written.
                const bool poison = poisoned(p);
#pragma unroll
                for (u32 part = 0; part < C::kScatterParts; ++part) {
                    // The part before has been read.
                    if (part != 0) sync_consumer();
                    write_rows_of_part(part, acc);
                    // The storer scatters them, within the in-flight limit.
                    if (C::kScatterParts == 1 && p.in_flight_limit != 0) return;
                    sync_consumer();
                    if (poison) {
                        ptx::store_release_cta_shared(smem.dropped_rows(), 1);
                        continue;
                    }
                    const Scatter<C> rows(p, smem, epoch, item, index, part);
                    for (u32 v = thread; v < Scatter<C>::kVectors; v += 128) rows.store(v);
                }
                return;
            }
        }
        if (!finishes<C>(item)) ptx::trap();  // a sink that this kernel does not know
        if constexpr (C::kSwapAB) {
            write_boxes_swapped<C>(smem, index, thread, acc);
        } else {
            write_boxes(acc);
        }
    }

    // Leaves this consumer's part of the item to the storer.
    __device__ __forceinline__ void hand_over(const WorkItem& item, u32 i, const float (&acc)[C::kBlocks][kAccumulators]) {
        if constexpr (C::kScatterParts > 1) {
            if (item.sink == static_cast<u32>(Sink::kScatter) && p.in_flight_limit != 0) {
                hand_over_parts(i, acc);
                return;
            }
        }
        ptx::mbarrier_wait(smem.out_empty(index), out_phase);
        write(item, i, acc);
        // Orders this thread's writes of the buffer before the bulk store that reads it.
        ptx::fence_proxy_async_shared();
        // Before the arrival, so that it is never later than the storer's stamp.
        mark(i, &ItemStamps::written);
        ptx::mbarrier_arrive(smem.out_full(index));
        out_phase ^= 1;
    }

    // Leaves this consumer's rows to the storer, which scatters each part before the next.
    __device__ __forceinline__ void hand_over_parts(u32 i, const float (&acc)[C::kBlocks][kAccumulators]) {
#pragma unroll
        for (u32 part = 0; part < C::kScatterParts; ++part) {
            ptx::mbarrier_wait(smem.out_empty(index), out_phase);
            write_rows_of_part(part, acc);
            if (part + 1 == C::kScatterParts) mark(i, &ItemStamps::written);
            ptx::mbarrier_arrive(smem.out_full(index));
            out_phase ^= 1;
        }
    }

    // Reductions follow all tiles of the walk.
    __device__ __forceinline__ void reduce_scattered_rows(u32 i, const Walk& walk) const {
        if (i >= walk.count) return;
        WorkItem item = load_item(p, i);
        ptx::mbarrier_wait(smem.rows_ready(), 0);
        // After a failed wait a peer may be gone, or in a new communicator.
        const bool live = ptx::named_barrier_all<3, 128 * C::kConsumers>(!poisoned(p));
        for (;;) {
            mark(i, &ItemStamps::partials_there);
            reduce_rows<C>(p, epoch, item, index * 128 + thread, live);
            raise_shared_sum<C, 3>(p, epoch, item, index * 128 + thread, live);
            mark(i, &ItemStamps::written);
            if ((i += walk.stride) >= walk.count) return;
            item = load_item(p, i);
        }
    }
};

}  // namespace flux
