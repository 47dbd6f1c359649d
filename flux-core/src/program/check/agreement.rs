//! Rule: the programs are those of all ranks of one call, in rank order, for the same workspace.

use super::Violation;
use crate::Rank;
use crate::program::TileProgram;
use crate::tile::TileGrid;

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let Some(first) = programs.first() else {
        return Err(Violation::Count { programs: 0, world: 1 });
    };
    let world = first.problem.world().index();
    // The workspace has slots for the tiles of the layout, whatever the program says.
    let slots = match first.problem.op() {
        _ if [first.tile.m, first.tile.n, first.tile.k].contains(&0) => return Err(Violation::Disagreement { index: 0, what: "tile" }),
        op if op.reduces() && !first.rows.is_flattened() => TileGrid::of_shard(&first.problem, first.tile).tiles(),
        _ => 0,
    };
    for (index, (rank, p)) in (0..).map(Rank::new).zip(programs).enumerate() {
        let same = [
            (p.rank == rank, "rank"),
            (p.problem == first.problem, "problem"),
            (p.tile == first.tile, "tile"),
            (p.signals == first.signals, "signals"),
            (p.counters == first.counters, "counters"),
            (p.split_k_slots == first.split_k_slots, "split-K slots"),
            // A world of 1 has nothing to flatten, and no buffer for it.
            (p.rows == first.rows && !(p.rows.is_flattened() && world == 1), "row mapping"),
            // Flattened rows go to all ranks alike.
            (p.nodes == first.nodes && p.nodes.world() == p.problem.world() && !(p.rows.is_flattened() && p.nodes.are_mixed()), "nodes"),
            (u64::from(p.slots_per_source) == slots, "slots per source"),
        ];
        for (same, what) in same {
            if !same {
                return Err(Violation::Disagreement { index, what });
            }
        }
    }
    if programs.len() == world { Ok(()) } else { Err(Violation::Count { programs: programs.len(), world }) }
}
