// The tile program's records and the parameters of a launch, word for word as the host lays them
// out (`flux-core/src/program/record.rs`, `flux-core/src/layout.rs`,
// `flux-kernels/src/cuda/params.rs`).
#pragma once
#include "types.cuh"

namespace flux {

constexpr u32 kNone = 0xFFFFFFFFu;
constexpr u32 kMaxWorld = 16;
constexpr u32 kLine = 128;

enum class Source : u32 { kCaller = 0, kGather = 1 };
enum class Sink : u32 { kStore = 0, kSend = 1, kReduce = 2, kPartial = 3, kScatter = 4, kReduceRows = 5 };
enum class Activation : u32 { kNone = 0, kGelu = 1, kSilu = 2, kRelu = 3 };  // epilogue.rs

struct WorkItem {
    u32 a_source, a_outer, row, rows;
    u32 col, cols, sink, out_outer;
    u32 dest, slot, partials, raise;
    u32 counter, raise_after, await_first, await_count;
    u32 late_first, late_count, k_first, k_steps;
    u32 part, parts, await_group, partial_slot;
};
static_assert(sizeof(WorkItem) == 96, "record.rs");

struct Await {
    u32 signal, peer, k_step;
};
static_assert(sizeof(Await) == 12, "record.rs");

struct Transfer {
    u32 dest, place, row, rows, col, cols, raise, step;
};
static_assert(sizeof(Transfer) == 32, "record.rs");

// Private to the rank; each word on a line of its own.
struct Control {
    u32 epoch, op_hash, pad0[30];  // no kernel reads what messages say of the ops
    u32 ticket, pad1[31];
    u32 poison, pad2[31];
    u32 pushed, pad3[31];
    u32 stores_begun, pad4[31];
    u32 stores_ended, pad5[31];
    u32 counters[1];
};
static_assert(sizeof(Control) == 6 * kLine + 4, "layout.rs");

// In pinned host memory.
struct Fault {
    u32 state, code, wait, rank, peer, signal, expected, seen, epoch, abort, reserved[22];
    u32 abort_word;
};
static_assert(sizeof(Fault) == kLine + 4, "layout.rs");

enum class FaultCode : u32 { kTimeout = 1, kAborted = 2, kDisagreed = 3 };
constexpr u32 kTimedOut = 0xFFFF0008;     // why a rank whose wait passed its deadline has given up
constexpr u32 kInAnotherOp = 0xFFFF0009;  // why one has whose peer is in a call of another op
enum class FaultWait : u32 { kSignal = 1, kPushed = 2, kCall = 3 };

// Times in nanoseconds of %globaltimer; only kernels that are instantiated to trace write them.
struct ItemStamps {
    u64 opened, rows_there, loaded, partials_there, multiplied, summed, written, sent;
};
static_assert(sizeof(ItemStamps) == 64, "trace.rs");

struct WorkerStamps {
    u64 entered, left;
    u32 multiprocessor, reserved;
    u64 push_begun, first_delivered, last_delivered, first_rows;
};
static_assert(sizeof(WorkerStamps) == 56, "trace.rs");

struct Params {
    TensorMap a_caller;  // [1, W or 1, m_shard, k_local] of the caller's x; flattened: [1, 1, m, k_local]
    TensorMap a_gather;  // [2 halves, W - 1 places, m_shard, k_local] of the own gather buffer; flattened: [2, 1, m, k_local]
    TensorMap b;         // [n_local, k_local] of the caller's w
    TensorMap y;         // [W or 1, m_shard, n_local] of the caller's y; flattened: [1, m, n_local]

    u64 data[kMaxWorld];  // every rank's data region, as mapped here
    u64 pad[kMaxWorld];   // every rank's pad, as mapped here
    const WorkItem* items;
    const Await* awaits;
    const Transfer* transfers;
    Control* control;
    Fault* fault;
    u64 half_stride;       // bytes between the halves of a data region
    u64 deadline_ns;       // of one wait
    u64 x;                 // the caller's x, for the mover
    u64 x_row_bytes;       // distance of its rows
    u64 row_bytes;         // bytes of a row that are moved, and distance of rows in a gather buffer
    u64 shard_slot_bytes;       // distance of places in a gather buffer
    u64 y_address;         // the caller's y, for sums that are folded
    u64 y_row_bytes;       // distance of its rows
    u64 split_k_offset;    // of the part slots in a half
    u64 global_staging;    // memory of this GPU for the parts of tiles that CTAs lay aside
    u64 bias;              // [n_local], added to every row of the result; 0 for none
    u64 scatter_buffer;    // where other ranks' scattered rows come: the own data region, or memory of the host

    u32 rank, world;
    u32 item_count, transfer_count;
    u32 slots_per_source;
    u32 await_pushed;      // copy engines read the caller's x; the call ends when they have
    u32 gap_ns;            // between pieces that the mover pushes, from the second destination on, or of a partial tile
    u32 in_flight_limit;             // CTAs whose storers scatter a tile at once, while the next is multiplied; 0 where consumers scatter their rows themselves
    u32 m_shard;           // rows of a shard
    u32 source_row_bytes;  // distance of rows that are scattered, at their owner
    u32 activation;        // after the bias; AllGather-GEMM only
    u32 push_together;     // the first transfers are what every tile waits for
    u32 in_mainloop;       // partial tiles that are added along k, of an item that adds any
    u32 in_mainloop_first; // the step along k before which the first of them is added
    u32 in_mainloop_gap;   // steps from one to the next
    u32 op_hash;           // the op's number or op-sequence hash, compared on pads; 0 where the transport compares
    u32 after_collective;  // whether a collective brought the operands, which the host may have aborted

    ItemStamps* item_stamps;      // by item, where the kernel traces
    WorkerStamps* worker_stamps;  // by CTA, where the kernel traces
};
static_assert(sizeof(Params) == 1024, "params.rs");

// Why `rank` has given up, 0 while it has not: on every peer's pad, written by `rank`.
__device__ __forceinline__ u32* broken_word(u64 pad, u32 rank) {
    return reinterpret_cast<u32*>(pad + static_cast<u64>(rank) * kLine);
}

// Which call `rank` is in, on every peer's pad, written by `rank`: its number in the lower half,
// and in the upper its op.
__device__ __forceinline__ u64* calling_words(u64 pad, u32 rank, u32 epoch) {
    return reinterpret_cast<u64*>(pad + static_cast<u64>(rank) * kLine + 8 + (epoch & 1) * 8);
}

// Each half has words of its own: one signal may be raised by other ranks in an op than in the
// next, and a rank that is a call ahead must not be taken for one that is awaited now.
__device__ __forceinline__ u32* signal_word(u64 pad, u32 index, u32 epoch) {
    return reinterpret_cast<u32*>(pad + (static_cast<u64>(kMaxWorld) + 2 * static_cast<u64>(index) + (epoch & 1)) * kLine);
}

// Partial tiles that the item adds while it multiplies, between steps along k; it adds the others
// after.
__device__ __forceinline__ u32 in_mainloop_partials(const Params& p, const WorkItem& item) {
    return item.partials != 0 ? p.in_mainloop : 0;
}

}  // namespace flux
