//! The fused kernel's parameters.

use super::mirrored;
use bytemuck::{Pod, Zeroable};
use cudarc::driver::sys::CUtensorMap;
use flux_core::problem::MAX_WEIGHTS;
use flux_core::rank::MAX_WORLD;

/// Tensor maps of a weight and of its result.
pub(crate) const MAPS_OF_WEIGHT: usize = 3;

mirrored! {
    /// A weight of an op, with its bias and result. Addresses are those of column 0, as items count
    /// columns: the first weight's are the operands' own.
    #[derive(Clone, Copy, Debug, Pod, Zeroable)]
    pub(crate) struct Weight {
        pub(crate) w: u64,
        /// Bytes between its rows.
        pub(crate) w_row_bytes: u64,
        pub(crate) y: u64,
        /// Bytes between its rows.
        pub(crate) y_row_bytes: u64,
        /// One element for each column; 0 for none, as of every other weight.
        pub(crate) bias: u64,
        /// The scale of its row 0, which may be one of all rows; 0 where operands have none.
        pub(crate) scale: u64,
        /// Bytes from a row's scale to the next row's, or from those of 128 rows to the next.
        pub(crate) scale_row_bytes: u64,
        /// Its first column, as items count columns; no item has one where there is no weight.
        pub(crate) start: u32,
        /// Keeps the size a multiple of 8 bytes.
        pub(crate) padding: u32,
    }
}

mirrored! {
    /// The parameters of one launch. `W` is the world size; a half is one of the two buffers of a
    /// data region, of even and of odd epochs.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Params {
        /// The caller's x, `[1, full_shards or 1, m_shard, k_local]`; flattened `[1, 1, m,
        /// k_local]`.
        pub(crate) a_caller: CUtensorMap = "TensorMap a_caller",
        /// The own gather buffer, `[2 halves, W - 1 shard slots, m_shard, k_local]`; flattened
        /// `[2, 1, m, k_local]`.
        pub(crate) a_gather: CUtensorMap = "TensorMap a_gather",
        /// The caller's w, `[n_local, k_local]`. Gated `[n_local / 16, 2, 8, k_local]`: the gates
        /// of eight columns of y, and their ups.
        pub(crate) b: CUtensorMap = "TensorMap b",
        /// The caller's y, `[full_shards or 1, m_shard, n_local]`; flattened `[1, m, n_local]`.
        /// Gated half as many columns.
        pub(crate) y: CUtensorMap = "TensorMap y",
        /// The shards behind the full ones, with one row less, of the operand that has all rows: y
        /// of AllGather-GEMM, else x.
        pub(crate) short_shards: CUtensorMap = "TensorMap short_shards",
        /// Maps of one op alone. GEMM-AllReduce: the own rows among each rank's results, `[2
        /// halves, own rows, n_local]`, where finished tiles are shared. AllGather-GEMM: `b`, `y`
        /// and `short_shards` of each further weight.
        pub(crate) op_maps: [CUtensorMap; MAX_WORLD] = "TensorMap op_maps[kMaxWorld]",
        /// Every rank's data region, as mapped here.
        pub(crate) data: [u64; MAX_WORLD] = "u64 data[kMaxWorld]",
        /// Every rank's pad, as mapped here.
        pub(crate) pad: [u64; MAX_WORLD] = "u64 pad[kMaxWorld]",
        pub(crate) items: u64 = "const WorkItem* items",
        pub(crate) awaits: u64 = "const Await* awaits",
        pub(crate) transfers: u64 = "const Transfer* transfers",
        pub(crate) control: u64 = "Control* control",
        pub(crate) fault: u64 = "Fault* fault",
        /// Bytes between the halves of a data region.
        pub(crate) half_stride: u64,
        /// Longest time of one wait.
        pub(crate) deadline_ns: u64,
        /// The caller's x, for the mover.
        pub(crate) x: u64,
        /// Bytes between its rows.
        pub(crate) x_row_bytes: u64,
        /// Scales of the caller's x; 0 where operands have none.
        pub(crate) scale_x: u64,
        /// Bytes between its rows; 0 where all have one scale.
        pub(crate) scale_x_row_bytes: u64,
        /// Bytes of a row of x with its scales, and between rows of a gather buffer.
        pub(crate) row_bytes: u64,
        /// Bytes between the shard slots of a gather buffer.
        pub(crate) shard_slot_bytes: u64,
        /// The weights, with their results.
        pub(crate) weights: [Weight; MAX_WEIGHTS] = "Weight weights[kMaxWeights]",
        /// Offset of peers' results in a half, dense rows of all `m`.
        pub(crate) results_offset: u64,
        /// Offset of the split-K workspace slots in a half.
        pub(crate) split_k_offset: u64,
        /// Memory of this GPU where CTAs stage a partial tile, or the first consumer's part of one.
        pub(crate) global_staging: u64,
        /// Rows that are added to those of the result, `n_local` columns each; 0 for none.
        pub(crate) residual: u64,
        /// Bytes between them.
        pub(crate) residual_row_bytes: u64,
        /// The buffer of peers' scattered rows: the own data region, or host memory.
        pub(crate) scatter_buffer: u64,
        pub(crate) rank: u32,
        pub(crate) world: u32,
        pub(crate) item_count: u32,
        /// The row, as items count those of y, of the residual's first.
        pub(crate) residual_first: u32,
        /// Rows of the residual.
        pub(crate) residual_rows: u32,
        /// Copies of peers' results, which follow the items.
        pub(crate) copy_count: u32,
        pub(crate) transfer_count: u32,
        pub(crate) slots_per_source: u32,
        /// Whether copy engines read the caller's x: the call ends when they have.
        pub(crate) await_pushed: u32,
        /// Between pieces that the mover pushes, from the second destination on, or of a partial
        /// tile.
        pub(crate) gap_ns: u32,
        /// CTAs whose storers scatter a tile at once, while the next is multiplied; 0 where
        /// consumers scatter their rows.
        pub(crate) in_flight_limit: u32,
        /// Rows of the largest shard. Scattered rows that every rank owns are one shard.
        pub(crate) m_shard: u32,
        /// Shards with so many rows, the first ones.
        pub(crate) full_shards: u32,
        /// Rows of the own shard.
        pub(crate) own_rows: u32,
        /// Shard slots of the gather buffer that begin where their number says; each later one
        /// begins a row earlier.
        pub(crate) full_slots: u32,
        /// The ranks at which every row is stored that is scattered; 0 where its shard's rank owns
        /// it.
        pub(crate) scatter_mask: u32,
        /// Bytes from a gathered row to its scales; 0 where it carries none.
        pub(crate) gathered_scales: u32,
        /// Columns of x and of w.
        pub(crate) k_local: u32,
        /// Of [`Activation::ALL`](crate::Activation::ALL).
        pub(crate) activation: u32,
        /// Rows of gated weights from a gate to the next.
        pub(crate) gate_step: u32,
        /// Rows of gated weights from a gate to its up.
        pub(crate) up_offset: u32,
        /// Bytes between scattered rows at their owner.
        pub(crate) source_row_bytes: u32,
        /// Bytes between rows of peers' results.
        pub(crate) result_row_bytes: u32,
        /// Whether every tile waits for the first transfers.
        pub(crate) push_together: u32,
        /// Partial tiles that the mainloop adds, of an item that adds any.
        pub(crate) in_mainloop: u32,
        /// The step along k before which the first of them is added.
        pub(crate) in_mainloop_first: u32,
        /// Steps from one to the next.
        pub(crate) in_mainloop_gap: u32,
        /// This rank's op-sequence hash; 0 where kernels compare none.
        pub(crate) op_hash: u32,
        /// Whether a library's collective comes before or behind the kernel: an abort of the host
        /// then fails the call, and the kernel stamps that it has closed it.
        pub(crate) sequential: u32,
        /// Whether no launch ahead on the stream writes weights.
        pub(crate) constant_weights: u32,
        /// Rows of a box of x in a stage.
        pub(crate) box_rows: u32,
        /// Keeps what follows at multiples of 8 bytes.
        pub(crate) padding: u32,
        /// By item, of a call that records them; else 0.
        pub(crate) item_stamps: u64 = "ItemStamps* item_stamps",
        /// By CTA, of the same calls.
        pub(crate) worker_stamps: u64 = "WorkerStamps* worker_stamps",
    }
}

// SAFETY: words only; a tensor map is an array of them.
unsafe impl Zeroable for Params {}
