//! What lies in a half of the data region: gathered rows or partial sums of peers, results, and
//! split-K slots.

use crate::{Problem, SumsTo, TileShape};

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
