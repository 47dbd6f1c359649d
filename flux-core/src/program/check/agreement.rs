//! Rules: a program is a rank's of its world, for the workspace of its layout. The programs are
//! those of all ranks of one call, in rank order.

use super::Violation;
use crate::program::TileProgram;
use crate::tile::TileGrid;
use crate::{Rank, SumsTo};

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let Some(first) = programs.first() else {
        return Err(Violation::Count { programs: 0, world: 1 });
    };
    let world = first.problem.world().index();
    for (index, (rank, p)) in (0..).map(Rank::new).zip(programs).enumerate() {
        let same = [
            (p.rank == rank, "rank"),
            (p.problem == first.problem, "problem"),
            (p.tile == first.tile, "tile"),
            (p.signals == first.signals, "signals"),
            (p.counters == first.counters, "counters"),
            (p.split_k_slots == first.split_k_slots, "split-K slots"),
            (p.rows == first.rows, "row mapping"),
            (p.nodes == first.nodes, "nodes"),
        ];
        all_hold(|what| Violation::Disagreement { index, what }, &same)?;
    }
    if programs.len() == world {
        Ok(())
    } else {
        Err(Violation::Count { programs: programs.len(), world })
    }
}

/// Checks what a program says of the call as a whole.
pub(super) fn check_rank(p: &TileProgram) -> Result<(), Violation> {
    let (world, index) = (p.problem.world(), p.rank.index());
    let of_rank = |what| Violation::Header { rank: p.rank, what };
    all_hold(
        of_rank,
        &[(index < world.index(), "rank"), (![p.tile.m, p.tile.n, p.tile.k].contains(&0), "tile")],
    )?;
    let has_slots = p.problem.op().reduces() && !p.rows.is_flattened();
    let slots = if has_slots { TileGrid::of_shard(&p.problem, p.tile).tiles() } else { 0 };
    let fits = [
        // A world of 1 has nothing to flatten, and no buffer for it.
        (!(p.rows.is_flattened() && world.index() == 1), "row mapping"),
        (!p.rows.has_two_exchanges() || p.problem.op().sums_to() == SumsTo::All, "row mapping"),
        // Flattened rows go to all ranks alike.
        (p.nodes.world() == world && !(p.rows.is_flattened() && p.nodes.are_mixed()), "nodes"),
        // The workspace has slots for the tiles of the layout, whatever the program says.
        (u64::from(p.slots_per_source) == slots, "slots per source"),
    ];
    all_hold(of_rank, &fits)
}

fn all_hold(
    violation: impl Fn(&'static str) -> Violation,
    rules: &[(bool, &'static str)],
) -> Result<(), Violation> {
    rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |&(_, what)| Err(violation(what)))
}
