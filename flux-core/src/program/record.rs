//! The records of a tile program, in the layout that the CUDA kernel reads.
//!
//! Invariant: these structs are mirrored word for word in `flux-kernels/cuda/program.cuh`; both
//! sides assert the sizes.

use bytemuck::{Pod, Zeroable};

/// `raise` and `counter` of an item that raises nothing, `part` of one that neither lends nor
/// borrows, `slot` of one that has none.
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
    /// Rounded and stored as a partial tile into a slot of rank `dest`; where the item has
    /// partials, after they were added, in order and in fp32.
    pub const SEND: u32 = 1;
    /// The partial tiles of others are added in the order of their slots, in fp32, the
    /// [early](crate::program::TileProgram::early) ones during the multiplication; the sum is
    /// rounded once and stored to the caller's `y`.
    pub const REDUCE: u32 = 2;
    /// Left in fp32 in a part slot of this rank's own workspace, for the item that finishes the
    /// tile.
    pub const PARTIAL: u32 = 3;
    /// Rounded; each row is stored at the rank that owns it, the own rank included, in this rank's
    /// place there, and the signal is raised on the pad of every rank that owns one of the rows;
    /// where all tiles of a rank are one chunk, of every rank.
    pub const SCATTER: u32 = 4;
    /// There are none: the rows that all ranks have scattered are added in rank order, in fp32,
    /// rounded once and stored to the caller's `y`.
    pub const REDUCE_ROWS: u32 = 5;
}

/// A piece of work of one rank: what to await, multiply, store and raise. 96 bytes.
///
/// Most items are an output tile each. Where `k` is split a tile is several items, of which each
/// multiplies a part of `k`: partial items, and after them in the program the fix-up item, which adds their
/// parts to its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct WorkItem {
    /// [`source::CALLER`] or [`source::GATHER`].
    pub a_source: u32,
    /// Shard of operand A: of the caller's `x` (0 for AllGather-GEMM, the shard for
    /// GEMM-ReduceScatter), or the place in the gather buffer; 0 in a flattened program, whose
    /// operand A is one matrix.
    pub a_outer: u32,
    /// First row within the shard; in a flattened program within all rows, but for a [`sink::REDUCE_ROWS`].
    pub row: u32,
    /// Rows of the tile that exist, at most the tile's `m`; of a [`sink::REDUCE_ROWS`] any number.
    pub rows: u32,
    /// First output column, and first row of `w`.
    pub col: u32,
    /// Columns of the tile that exist, at most the tile's `n`.
    pub cols: u32,
    /// One of [`sink`].
    pub sink: u32,
    /// Shard of the output: of the caller's `y` (the shard for AllGather-GEMM, 0 for
    /// GEMM-ReduceScatter and in a flattened program).
    pub out_outer: u32,
    /// Rank that gets the result: for a send the one whose slot it goes to, else the own one.
    pub dest: u32,
    /// For a send, the slot at `dest`.
    pub slot: u32,
    /// Number of partial tiles that a reduction or a send adds, or of ranks whose rows a reduction adds.
    pub partials: u32,
    /// Signal of `dest`'s pad (of a [`sink::SCATTER`], of the pads of all who
    /// [hear](crate::program::TileProgram::signalled_ranks) it) that this item's chunk raises, or
    /// [`NONE`].
    pub raise: u32,
    /// Local counter of the chunk's finished items, or [`NONE`] where the chunk is this one item.
    pub counter: u32,
    /// Items of the chunk; the one that completes the count raises.
    pub raise_after: u32,
    /// First entry of the await list that is awaited during the multiplication, in ascending order
    /// of [`Await::k_step`]: before rows of A are read, or before partial tiles are added on the
    /// way.
    pub await_first: u32,
    /// Entries awaited so.
    pub await_count: u32,
    /// First entry of the await list that is awaited after the multiplication, before parts,
    /// partial tiles or scattered rows are read.
    pub late_first: u32,
    /// Entries awaited after the multiplication.
    pub late_count: u32,
    /// First step along `k`, in steps of the tile's `k`, that is multiplied.
    pub k_first: u32,
    /// Steps along `k` that are multiplied; 0 for a [`sink::REDUCE_ROWS`].
    pub k_steps: u32,
    /// For a [`sink::PARTIAL`], the part slot that it fills. For a fix-up item, the first of those that it
    /// adds, in order. Else [`NONE`].
    pub part: u32,
    /// Part slots that a fix-up item adds.
    pub parts: u32,
    /// Entries of the await list that stand together, with one `k_step`: those of a slice. 0 where
    /// there are none.
    pub await_group: u32,
    /// First slot here of the partial tiles that are added, or [`NONE`]; the next source's lies
    /// `slots_per_source` further.
    pub partial_slot: u32,
}

impl Default for WorkItem {
    /// An item that awaits, lends and raises nothing.
    fn default() -> Self {
        Self { slot: NONE, raise: NONE, counter: NONE, part: NONE, partial_slot: NONE, ..Self::zeroed() }
    }
}

/// One entry of the await list: a signal of the own pad, and who raises it. 12 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Await {
    /// Index of the signal on the own pad.
    pub signal: u32,
    /// Rank that raises it; it is named when the wait times out.
    pub peer: u32,
    /// The step along `k`, counted from the first step of all, before which it is awaited; 0 for
    /// what is awaited after the multiplication.
    pub k_step: u32,
}

/// One copy of a mover: some columns of some rows of this rank's shard into a gather buffer, then a
/// signal there. 32 bytes.
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
    /// First of the columns, elements along `k`, that are copied of each row.
    pub col: u32,
    /// Columns.
    pub cols: u32,
    /// Signal of the destination's pad, raised when they are there.
    pub raise: u32,
    /// Step of the schedule: at one step the ranks write to different destinations.
    pub step: u32,
}

/// What a rank does with rows that came from its rail in another node: it gives them to a intra-node peer, so
/// that they cross nodes once for all of them.
///
/// No kernel reads it: who carries chunks does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Forward {
    /// Place of the rows in the own gather buffer.
    pub from: u32,
    /// The signal that announces them, and who brings them.
    pub awaits: Await,
    /// Where they go, and what is raised there.
    pub to: Transfer,
}

const _: () = assert!(size_of::<WorkItem>() == 96 && size_of::<Await>() == 12 && size_of::<Transfer>() == 32);
