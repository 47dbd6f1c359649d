//! Byte layout of the memory that ranks share, and of a rank's private control block.
//!
//! Invariant: each word that another rank polls or writes lies on a [`LINE`] of its own and has one
//! writer in a call. Kernels take these constants from `flux-kernels/src/abi`.
//!
//! ```text
//! data    (symmetric)  [ half 0 ][ half 1 ]
//!
//! half                 [ gather buffer, slots or scattered rows ][ results, 1024-aligned ]
//!                      [ own split-K slots, 1024-aligned ]
//!
//! pad     (symmetric)  [ words about ranks 0..16 ][ signal 0 of half 0 ][ of half 1 ] ...
//!                      one u32 at the start of each line; the words about a rank are its reason to
//!                      give up, an unused u32, and for each half its call and the call's op
//! control (private)    [ epoch ][ ticket ][ poison ][ pushed ]
//!                      [ stores begun ][ stores ended ][ counters, dense u32 ]
//!
//! fault   (host)       [ FaultRecord ][ abort word ][ closed ]   of host and device
//! ```

use crate::rank::MAX_WORLD;
use crate::{Problem, SumsTo, TileShape};
use bytemuck::{Pod, Zeroable};

/// Bytes between words that different ranks write or poll.
pub const LINE: u64 = 128;

/// Offset, in a pad, of the word with the reason why `rank` has given up, or 0. When they connect,
/// `rank` also proves with it that it reaches the pad.
pub const fn broken_offset(rank: u32) -> u64 {
    rank as u64 * LINE
}

/// Offset, in a pad, of two words of `rank`: the number of its call of half `half`, and its
/// op-sequence hash, never 0.
///
/// Both words begin as 0, so a reader accepts the call number only with a hash.
pub const fn calling_offset(rank: u32, half: usize) -> u64 {
    broken_offset(rank) + 8 + half as u64 * 8
}

/// Offset, in a pad, of signal `index` of the calls that use half `half` of the data regions.
///
/// Each half has words of its own: another rank may raise the signal in the next call. A rank
/// that is a call ahead must not end a wait of this call.
pub const fn signal_offset(index: u32, half: usize) -> u64 {
    (MAX_WORLD as u64 + 2 * index as u64 + half as u64) * LINE
}

/// Bytes of the words about ranks at the start of a pad, which begin as 0. Signals begin as the
/// epoch before the first call's.
pub const BROKEN_BYTES: u64 = signal_offset(0, 0);

/// Bytes of a pad of `signals` signals.
pub const fn pad_bytes(signals: u32) -> u64 {
    signal_offset(signals, 0)
}

/// Offsets in the control block.
pub mod control {
    use super::LINE;
    /// The number of the call in progress, or of the next one between calls. It advances when no
    /// worker waits for peers.
    pub const EPOCH: u64 = 0;
    /// Workers that have left the call; the last one closes it.
    pub const TICKET: u64 = LINE;
    /// Non-zero after a wait of this rank has failed: every other wait gives up.
    pub const POISON: u64 = 2 * LINE;
    /// The last epoch whose transfers an external mover has read from the caller's `x`.
    pub const PUSHED: u64 = 3 * LINE;
    /// Stores through host memory that workers have begun, over all calls. The in-flight limit
    /// keeps them from delaying loads.
    pub const STORES_BEGUN: u64 = 4 * LINE;
    /// Stores that have ended.
    pub const STORES_ENDED: u64 = 5 * LINE;
    /// First chunk counter, 4 bytes each.
    pub const COUNTERS: u64 = 6 * LINE;
    /// Bytes of a control block of `counters` counters.
    pub const fn bytes(counters: u32) -> u64 {
        COUNTERS + counters as u64 * 4
    }
}

/// Offset of the abort word in the fault block.
pub const ABORT_OFFSET: u64 = LINE;
/// Offset, in the fault block, of the number of the last sequential call whose kernel has closed.
pub const CLOSED_OFFSET: u64 = 2 * LINE;
/// Bytes of the fault block.
pub const FAULT_BYTES: u64 = 3 * LINE;

/// What a failed wait leaves in memory that the host can read while the device is busy. 64 bytes.
///
/// `state` is written last, with release order; the other fields are valid once it is non-zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct FaultRecord {
    /// 0: nothing happened; 1: the record is complete.
    pub state: u32,
    /// [`fault::TIMEOUT`], [`fault::ABORTED`] or [`fault::DISAGREED`].
    pub code: u32,
    /// The kind of wait: [`fault::SIGNAL`], [`fault::PUSHED`] or [`fault::CALL`].
    pub wait: u32,
    /// The rank that waited, or the rank whose failure ended the wait.
    pub rank: u32,
    /// The rank that should have written the word.
    pub peer: u32,
    /// Index of the awaited signal.
    pub signal: u32,
    /// The expected epoch, or the own op if the peer is in another.
    pub expected: u32,
    /// The last value seen, or the peer's op if it is in another.
    pub seen: u32,
    /// Epoch of the call.
    pub epoch: u32,
    /// The reason, if an abort word or a failed peer ended the wait.
    pub abort: u32,
    /// Reserved, zero.
    pub reserved: [u32; 6],
}

/// Values of the fields of a [`FaultRecord`].
pub mod fault {
    /// The deadline passed.
    pub const TIMEOUT: u32 = 1;
    /// The abort word was set.
    pub const ABORTED: u32 = 2;
    /// A peer is in a call of another op.
    pub const DISAGREED: u32 = 3;
    /// Reason of a rank that gave up because a peer is in a call of another op.
    pub const IN_ANOTHER_OP: u32 = 0xffff_0009;
    /// Reason of a rank that gave up at the deadline.
    pub const TIMED_OUT: u32 = 0xffff_0008;
    /// A chunk or partial tile did not arrive.
    pub const SIGNAL: u32 = 1;
    /// The own mover did not finish.
    pub const PUSHED: u32 = 2;
    /// The peer has not announced its call.
    pub const CALL: u32 = 3;
}

const _: () = assert!(size_of::<FaultRecord>() == 64);

/// Workspace that a call needs; a communicator holds the largest of its ops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WorkspaceSize {
    /// Bytes of one half of the data region: the gather buffer or the slots of one epoch.
    pub half_bytes: u64,
    /// Signals on the pad.
    pub signals: u32,
    /// Local chunk counters.
    pub counters: u32,
}

impl WorkspaceSize {
    /// Alignment of the halves, for tensor maps and the driver's allocation granularity.
    pub const ALIGN: u64 = 1 << 21;

    /// A size that covers both.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self {
            half_bytes: self.half_bytes.max(other.half_bytes),
            signals: self.signals.max(other.signals),
            counters: self.counters.max(other.counters),
        }
    }

    /// Distance between the halves: `half_bytes` rounded up to [`Self::ALIGN`]. It saturates.
    pub const fn half_stride(&self) -> u64 {
        match self.half_bytes.checked_next_multiple_of(Self::ALIGN) {
            Some(stride) => stride,
            None => u64::MAX,
        }
    }

    /// Bytes of the data region.
    pub const fn data_bytes(&self) -> u64 {
        self.half_stride().saturating_mul(2)
    }

    /// Device bytes in all: data, pad and control block.
    pub const fn total_bytes(&self) -> u64 {
        self.data_bytes()
            .saturating_add(pad_bytes(self.signals))
            .saturating_add(control::bytes(self.counters))
    }
}

/// Bytes of a shard's place in the gather buffer: `m_shard` rows of
/// [`gathered_columns`](Problem::gathered_columns), dense.
pub const fn gather_place_bytes(problem: &Problem) -> u64 {
    problem.m_shard() as u64 * problem.gathered_row_bytes()
}

/// Offset of place `place` in the gather buffer. With flattened rows the shards follow each other
/// without gaps, and some have one row less than a place.
pub const fn gather_place_offset(problem: &Problem, rows: RowLayout, place: u32) -> u64 {
    let bytes = place as u64 * gather_place_bytes(problem);
    let missing = if rows.is_flattened() { place.saturating_sub(problem.full_shards()) } else { 0 };
    bytes - missing as u64 * problem.gathered_row_bytes()
}

/// Rows that a warp sends of a partial tile.
const STRIP: u32 = 16;

/// Bytes of one slot: a whole tile of partial sums. Tiles of 64 and 128 rows hold only the rows of
/// a smaller shard, rounded up to strips of 16.
///
/// The order of the elements is private to the executor.
///
/// ```
/// use flux_core::layout::slot_bytes;
/// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
/// let world = WorldSize::new(4).unwrap();
/// let of_rows = |m| Problem::new(OpKind::GemmReduceScatter, m, 1024, 1024, DType::Bf16, world);
/// let tile = TileShape::new(128, 256, 64);
/// assert_eq!(slot_bytes(&of_rows(512)?, tile), 128 * 256 * 2);
/// assert_eq!(slot_bytes(&of_rows(300)?, tile), 80 * 256 * 2); // shards of 75
/// # Ok::<(), flux_core::ProblemError>(())
/// ```
pub const fn slot_bytes(problem: &Problem, tile: TileShape) -> u64 {
    let few = tile.m <= 128 && !tile.swaps_ab() && problem.m_shard() < tile.m;
    let rows = if few { problem.m_shard().next_multiple_of(STRIP) } else { tile.m };
    rows as u64 * tile.n as u64 * problem.numerics().partial_bytes() as u64
}

/// How tiles are cut over the rows of a call, and how the rows lie in a half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowLayout {
    /// A tile has rows of one shard. There is a gather place for each peer, or slots of partial
    /// tiles.
    #[default]
    PerShard,
    /// Tiles are cut over all `m` rows, and row indices are of all shards. There is a place for
    /// each rank, in rank order. In a GEMM-AllReduce every rank adds all rows.
    Flattened,
    /// As [`Flattened`](Self::Flattened), but a rank of a GEMM-AllReduce adds the rows of its shard
    /// and stores the sums among the results of every peer, which lie behind.
    FlattenedTwoExchanges,
}

impl RowLayout {
    /// Whether tiles are cut over all rows.
    pub const fn is_flattened(self) -> bool {
        !matches!(self, Self::PerShard)
    }

    /// Whether the sums of flattened rows are exchanged, too.
    pub const fn has_two_exchanges(self) -> bool {
        matches!(self, Self::FlattenedTwoExchanges)
    }
}

/// Bytes of a source's place among scattered rows: those that one rank adds, `n` partial sums each,
/// dense. In two exchanges they are the rows of a shard.
pub const fn scatter_place_bytes(problem: &Problem, rows: RowLayout) -> u64 {
    let rows = if rows.has_two_exchanges() { problem.m_shard() } else { problem.most_y_rows() };
    rows as u64 * problem.n_shard() as u64 * problem.numerics().partial_bytes() as u64
}

/// Bytes of one split-K slot: a whole tile in fp32, in an order that is private to the executor.
pub const fn split_k_slot_bytes(tile: TileShape) -> u64 {
    tile.m as u64 * tile.n as u64 * 4
}

/// Alignment of the split-K slots in a half.
pub const SPLIT_K_ALIGN: u64 = 1024;

/// Offset of the first split-K slot in a half, behind everything that peers write.
pub const fn split_k_offset(problem: &Problem, tile: TileShape, rows: RowLayout) -> u64 {
    shared_bytes(problem, tile, rows).next_multiple_of(SPLIT_K_ALIGN)
}

/// Bytes of one half for `problem`: what peers write, then the split-K slots.
pub const fn half_bytes(
    problem: &Problem,
    tile: TileShape,
    rows: RowLayout,
    split_k_slots: u32,
) -> u64 {
    if split_k_slots == 0 {
        return shared_bytes(problem, tile, rows);
    }
    // Saturates: allocation refuses such a size.
    split_k_offset(problem, tile, rows)
        .saturating_add(split_k_slot_bytes(tile).saturating_mul(split_k_slots as u64))
}

/// Bytes of a half that peers write: a place or the slots of each peer, or with flattened rows a
/// place of each rank.
const fn shared_bytes(problem: &Problem, tile: TileShape, rows: RowLayout) -> u64 {
    let (world, peers) = (problem.world().get() as u64, problem.world().peers() as u64);
    match (problem.op().sums_to(), rows) {
        (SumsTo::Nothing, RowLayout::PerShard) => peers * gather_place_bytes(problem),
        (SumsTo::Nothing, _) => world * gather_place_bytes(problem),
        (_, RowLayout::Flattened) => world * scatter_place_bytes(problem, rows),
        (SumsTo::Rows, _) => slots_bytes(problem, tile),
        (SumsTo::All, _) if peers == 0 => 0,
        (SumsTo::All, _) => results_offset(problem, tile, rows) + results_bytes(problem),
    }
}

/// Bytes of the slots of all peers.
const fn slots_bytes(problem: &Problem, tile: TileShape) -> u64 {
    let tiles =
        (problem.m_shard().div_ceil(tile.m) as u64) * (problem.n_shard().div_ceil(tile.n) as u64);
    problem.world().peers() as u64 * tiles * slot_bytes(problem, tile)
}

/// Offset, in a half, of the results that peers leave for a GEMM-AllReduce in two exchanges: row
/// `r` of all `m` begins `r * n` elements behind it.
pub const fn results_offset(problem: &Problem, tile: TileShape, rows: RowLayout) -> u64 {
    let partials = match rows {
        RowLayout::PerShard => slots_bytes(problem, tile),
        RowLayout::Flattened | RowLayout::FlattenedTwoExchanges => {
            problem.world().get() as u64
                * scatter_place_bytes(problem, RowLayout::FlattenedTwoExchanges)
        }
    };
    partials.next_multiple_of(SPLIT_K_ALIGN)
}

/// Bytes of all rows of the result.
const fn results_bytes(problem: &Problem) -> u64 {
    problem.m() as u64 * problem.n_shard() as u64 * problem.numerics().output.bytes() as u64
}
