//! What every reader of tile programs relies on, as rules that can be checked.
//!
//! Invariant: a rule may read the programs only after the rules before it have held, so none
//! panics, whatever the programs are.

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

/// Checks the programs of all ranks of one call, given in rank order. What then holds:
///
/// - all are for the same problem, tile and workspace, and no index points outside of it;
/// - each item multiplies the rows that it stores, and is of the form that the operation has; only
///   what adds partial results counts them, and all tiles come before all reductions;
/// - each rank computes each element of each shard of its output exactly once, each step along `k`
///   of it once, and reductions each element of its own shard once where rows are scattered;
/// - each item is a tile of the grid that the layout has, and a reduction takes the columns of a column
///   of tiles;
/// - an item that adds partial tiles early adds all that the program has early, and multiplies all
///   of `k`;
/// - a counter counts the items of one chunk;
/// - every awaited signal is raised once in a call, by the rank that the await names, and every
///   raised signal is awaited;
/// - no two writers have a slot, a part slot or an element of a gather place in common;
/// - each part slot has one partial item and one reader, which awaits the partial items and adds the parts of
///   its own tile in the order of `k`;
/// - whatever an item reads of its peers' data was announced by a signal that it awaits, each
///   column of A, and each partial tile that is added early, before its step, the others after the
///   multiplication, in the order in which they are added; and so was what a mover passes on;
/// - what crosses nodes stays on its rail;
/// - no rank waits on work that comes after its own, for any number of workers;
/// - at each step the ranks send to different destinations. That is a rule of speed, and does not
///   hold for what is scattered: tiles of flattened rows are small problems', whose rows go to
///   several owners at once, and in an order that is the same on every rank each reduction's rows come
///   early.
///
/// # Errors
/// The first rule that is broken, as a [`Violation`] that names where.
pub fn verify(programs: &[TileProgram]) -> Result<(), Violation> {
    agreement::check(programs)?;
    for program in programs {
        bounds::check(program)?;
        form::check(program)?;
        in_mainloop::check(program)?;
        cover::check(program)?;
        grid::check(program)?;
        counters::check(program)?;
    }
    signals::check(programs)?;
    writers::check(programs)?;
    programs.iter().try_for_each(parts::check)?;
    reads::check(programs)?;
    order::check(programs)?;
    destinations::check(programs)
}
