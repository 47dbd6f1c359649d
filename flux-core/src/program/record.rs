//! The records of a tile program, in the layout that the CUDA kernel reads.
//!
//! Invariant: these structs are mirrored word for word in `flux-kernels/cuda/program.cuh`; both sides assert the sizes.

use bytemuck::{Pod, Zeroable};

/// `raise` and `counter` of an item that raises nothing.
pub const NONE: u32 = u32::MAX;

/// Where an item's rows of operand A are read.
pub mod source {
    /// In place from the caller's `x`.
    pub const CALLER: u32 = 0;
    /// From this rank's gather buffer, which peers fill.
    pub const GATHER: u32 = 1;
}

/// What becomes of an item's accumulators.
pub mod sink {
    /// Rounded and stored to the caller's `y`.
    pub const STORE: u32 = 0;
    /// Rounded and stored as a partial tile into a slot of rank `dest`.
    pub const SEND: u32 = 1;
    /// The peers' partial tiles are added in rank order, in fp32; the sum is rounded once and stored to the caller's `y`.
    pub const REDUCE: u32 = 2;
}

/// One output tile of one rank: what to await, multiply, store and raise. 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct WorkItem {
    /// [`source::CALLER`] or [`source::GATHER`].
    pub a_source: u32,
    /// Shard of operand A: of the caller's `x` (0 for AllGather-GEMM, the shard for GEMM-ReduceScatter), or the place in the gather buffer.
    pub a_outer: u32,
    /// First row within the shard.
    pub row: u32,
    /// Rows of the tile that exist, at most the tile's `m`.
    pub rows: u32,
    /// First output column, and first row of `w`.
    pub col: u32,
    /// Columns of the tile that exist, at most the tile's `n`.
    pub cols: u32,
    /// [`sink::STORE`], [`sink::SEND`] or [`sink::REDUCE`].
    pub sink: u32,
    /// Shard of the output: of the caller's `y` (the shard for AllGather-GEMM, 0 for GEMM-ReduceScatter).
    pub out_outer: u32,
    /// Rank that owns the output rows.
    pub dest: u32,
    /// For a send, the slot at `dest`. For a reduction, the first slot here; the next source's lies `slots_per_source` further.
    pub slot: u32,
    /// Number of partial tiles that a reduction adds.
    pub partials: u32,
    /// Signal of `dest`'s pad that this item's chunk raises, or [`NONE`].
    pub raise: u32,
    /// Local counter of the chunk's finished items, or [`NONE`] where the chunk is this one item.
    pub counter: u32,
    /// Items of the chunk; the one that completes the count raises.
    pub raise_after: u32,
    /// First entry of the await list. An item awaits them before it reads A, a reduction before it reads partials.
    pub await_first: u32,
    /// Entries of the await list.
    pub await_count: u32,
}

/// One entry of the await list: a signal of the own pad, and who raises it. 8 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Await {
    /// Index of the signal on the own pad.
    pub signal: u32,
    /// Rank that raises it; it is named when the wait times out.
    pub peer: u32,
}

/// One copy of a mover: rows of this rank's shard into a peer's gather buffer, then a signal there. 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Transfer {
    /// Destination rank.
    pub dest: u32,
    /// Place of this rank's shard in the destination's gather buffer.
    pub place: u32,
    /// First row within the shard.
    pub row: u32,
    /// Rows.
    pub rows: u32,
    /// Signal of the destination's pad, raised when the rows are there.
    pub raise: u32,
    /// Step of the schedule: at one step the ranks write to different destinations.
    pub step: u32,
}

const _: () = assert!(size_of::<WorkItem>() == 64 && size_of::<Await>() == 8 && size_of::<Transfer>() == 24);
