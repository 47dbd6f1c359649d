//! The rules that every reader of tile programs relies on.
//!
//! Invariant: a rule runs after the rules before it have held, so none panics, whatever the
//! programs are.

mod agreement;
mod bounds;
mod counters;
mod cover;
mod destinations;
mod form;
mod grid;
mod in_mainloop;
mod order;
mod parts;
mod reads;
mod rect;
mod signals;
mod violation;
mod writers;

pub use violation::{Output, Record, Violation};

use super::TileProgram;

/// Checks the programs of all ranks of one call, in rank order:
///
/// - All have the same problem, tile and workspace, and every index is in bounds.
/// - Each record has the form of its operation, only items that add partial results count them, and
///   reductions follow all tiles.
/// - An item with mainloop partial tiles adds all that the program counts, and multiplies all of
///   `k`.
/// - Each rank computes each element of its outputs once, and each step along `k` of it once.
/// - Each item is a tile of the grid; a reduction has the columns of a column of tiles.
/// - A counter counts the items of one chunk.
/// - Every awaited signal is raised once in a call, by the rank that the await names. Every raised
///   signal is awaited.
/// - No two writers share a slot, a split-K slot or an element of a gather place.
/// - Each split-K slot has one partial item and one reader of the same tile, which adds parts in
///   the order of `k`.
/// - An item awaits a signal for everything that it reads of peers' data, before the step that
///   reads it; so does a mover that forwards.
/// - Traffic between nodes stays on its rail.
/// - No rank waits on work that comes after its own, for any number of workers.
/// - At each step the ranks send to different destinations, except for scattered rows.
///
/// # Errors
/// The first broken rule and its place, as a [`Violation`].
pub fn verify(programs: &[TileProgram]) -> Result<(), Violation> {
    agreement::check(programs)?;
    programs.iter().try_for_each(verify_rank)?;
    signals::check(programs)?;
    writers::check(programs)?;
    programs.iter().try_for_each(parts::check)?;
    reads::check(programs)?;
    order::check(programs)?;
    destinations::check(programs)
}

/// Checks one rank's program by the rules of [`verify`] that need no other rank's program.
///
/// No index leaves the problem, the world or the workspace, and no two items store one element of
/// `y`.
///
/// # Errors
/// As [`verify`].
pub fn verify_rank(program: &TileProgram) -> Result<(), Violation> {
    agreement::check_rank(program)?;
    bounds::check(program)?;
    form::check(program)?;
    in_mainloop::check(program)?;
    cover::check(program)?;
    grid::check(program)?;
    counters::check(program)
}
