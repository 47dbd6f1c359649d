//! The records of a tile program, in the layout that the CUDA kernel reads.
//!
//! Invariant: `flux-kernels/src/abi` generates the CUDA structs from these fields, and both sides
//! assert the sizes.

use bytemuck::{NoUninit, Pod, Zeroable};

/// Most items, signals or row awaits of one program: 384 MiB of items.
pub const MAX_ITEMS: u64 = 1 << 22;

/// Value of a `raise`, `counter`, `part`, `slot` or `partial_slot` that is not used.
pub const NONE: u32 = u32::MAX;

/// Where an item's rows of operand A are.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, NoUninit, Zeroable)]
pub enum RowSource {
    /// The caller's `x`, in place.
    Caller = 0,
    /// This rank's gather buffer, which peers fill.
    Gather = 1,
}

impl RowSource {
    /// All of them; a number is its place.
    pub const ALL: [Self; 2] = [Self::Caller, Self::Gather];
}

/// Where an item's accumulators go.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, NoUninit, Zeroable)]
pub enum Sink {
    /// Rounded and stored to the caller's `y`.
    Store = 0,
    /// Rounded and stored as a partial tile into a slot of rank `dest`, after the item's own
    /// partials are added in order, in fp32.
    Send = 1,
    /// Partial tiles are added in the order of their slots, in fp32, the first
    /// [`in_mainloop`](crate::program::TileProgram::in_mainloop) of them during the multiplication.
    /// The sum is rounded once and stored to the caller's `y`. For GEMM-AllReduce it is also stored
    /// among the results of every peer, where the signal is raised.
    Reduce = 2,
    /// Stored in fp32 in a split-K slot of this rank, for the tile's fix-up item.
    Partial = 3,
    /// Rounded; each row is stored in this rank's place at its owners, the own rank included: the
    /// rank of its shard, or for GEMM-AllReduce in one exchange every rank. The signal is raised at
    /// every owner of a row, or at every rank if all tiles are one chunk.
    Scatter = 4,
    /// No accumulators: scattered rows of all ranks are added in rank order, in fp32, rounded once
    /// and stored to the caller's `y`. For GEMM-AllReduce in two exchanges they are also stored
    /// among the results of every peer, where the signal is raised.
    ReduceRows = 5,
    /// No accumulators: a peer's finished rows are copied from the own results to the caller's `y`.
    Copy = 6,
}

impl Sink {
    /// All of them; a number is its place.
    pub const ALL: [Self; 7] = [
        Self::Store,
        Self::Send,
        Self::Reduce,
        Self::Partial,
        Self::Scatter,
        Self::ReduceRows,
        Self::Copy,
    ];
}

/// A piece of work of one rank: what to await, multiply, store and raise. 96 bytes.
///
/// Most items are one output tile. A tile with split `k` is several items: partial items, then the
/// fix-up item, which adds their parts to its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, NoUninit, Zeroable)]
pub struct WorkItem {
    /// Where its rows of A are.
    pub a_source: RowSource,
    /// Shard of the caller's `x` (0 for AllGather-GEMM), or place in the gather buffer; 0 with
    /// flattened rows.
    pub a_outer: u32,
    /// First row within the shard; within all rows if they are flattened, except for
    /// [`Sink::ReduceRows`], and for [`Sink::Copy`].
    pub row: u32,
    /// Existing rows of the tile, at most its `m`; any number for [`Sink::ReduceRows`].
    pub rows: u32,
    /// First output column, and first row of `w`.
    pub col: u32,
    /// Existing columns of the tile, at most its `n`.
    pub cols: u32,
    /// Where its accumulators go.
    pub sink: Sink,
    /// Shard of the caller's `y` for AllGather-GEMM; 0 for GEMM-ReduceScatter and with flattened
    /// rows.
    pub out_outer: u32,
    /// Rank of the result: the receiver of a [`Sink::Send`], else the own rank.
    pub dest: u32,
    /// Slot at `dest` of a [`Sink::Send`].
    pub slot: u32,
    /// Partial tiles that the item adds, or ranks whose rows a reduction adds.
    pub partials: u32,
    /// Signal that this item's chunk raises on the pads of its
    /// [`signalled_ranks`](crate::program::TileProgram::signalled_ranks), or [`NONE`].
    pub raise: u32,
    /// Local counter of the chunk's finished items, or [`NONE`] if the item is the chunk.
    pub counter: u32,
    /// Items of the chunk; the last one raises.
    pub raise_after: u32,
    /// First await of the mainloop, in ascending order of [`Await::k_step`]: for rows of A, or for
    /// partial tiles.
    pub await_first: u32,
    /// Awaits of the mainloop.
    pub await_count: u32,
    /// First await after the multiplication: for parts, partial tiles or scattered rows.
    pub late_first: u32,
    /// Awaits after the multiplication.
    pub late_count: u32,
    /// First step along `k` that is multiplied.
    pub k_first: u32,
    /// Steps that are multiplied; 0 for [`Sink::ReduceRows`] and [`Sink::Copy`].
    pub k_steps: u32,
    /// Split-K slot that a [`Sink::Partial`] fills, or the first that a fix-up item adds; else
    /// [`NONE`].
    pub part: u32,
    /// Split-K slots that a fix-up item adds.
    pub parts: u32,
    /// Awaits that share one `k_step`, those of a slice; 0 without mainloop awaits.
    pub await_group: u32,
    /// First slot of the partial tiles that the item adds, or [`NONE`]; each next source is
    /// `slots_per_source` further.
    pub partial_slot: u32,
}

impl Default for WorkItem {
    /// An item that awaits, adds and raises nothing.
    fn default() -> Self {
        Self {
            slot: NONE,
            raise: NONE,
            counter: NONE,
            part: NONE,
            partial_slot: NONE,
            ..Self::zeroed()
        }
    }
}

/// An entry of the await list: a signal of the own pad. 12 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct Await {
    /// Index of the signal on the own pad.
    pub signal: u32,
    /// Rank that raises it, which a timeout names.
    pub peer: u32,
    /// Step along `k`, from the first of all, before which it is awaited; 0 after the
    /// multiplication.
    pub k_step: u32,
}

/// A copy of a mover: columns of rows of this rank's shard into a gather buffer, then a signal. 32
/// bytes.
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
    /// First column, in elements along `k`.
    pub col: u32,
    /// Columns.
    pub cols: u32,
    /// Signal of the destination's pad that announces the rows.
    pub raise: u32,
    /// Step of the schedule; at one step the ranks write to different destinations.
    pub step: u32,
}

/// A copy of rows that came along the rail from another node to an intra-node peer. So rows cross
/// nodes once. Movers read it, kernels do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Forward {
    /// Place of the rows in the own gather buffer.
    pub from: u32,
    /// The signal that announces the rows.
    pub awaits: Await,
    /// The copy, and the signal that it raises.
    pub to: Transfer,
}

const _: () =
    assert!(size_of::<WorkItem>() == 96 && size_of::<Await>() == 12 && size_of::<Transfer>() == 32);
