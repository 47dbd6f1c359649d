//! A simulator: the tile programs of all ranks, walked event by event on a [`Machine`].
//!
//! Invariant: it knows no schedule. Items, their order, awaits and signals are read from the
//! records, as the kernel reads them; their times are the machine's.
//!
//! A worker multiplies a tile's steps along `k` as rows arrive, adds partial results, then finishes
//! the tile. A step takes the longest of its operations, shared memory and its wave's reads of
//! memory. A rank's link is two servers, one out and one in, each with one message at a time.
//!
//! Staged in host memory ([`Machine::host_staged`]), a message is a whole chunk. It goes on when
//! all of it has arrived in host memory; rows leave once for all their readers.
//!
//! `flux-bench/tests/records/simulated.rs` bounds the distance to the committed records from m =
//! 512 on. Limits:
//!
//! - **Power.** The clock is one number; a card at its power limit slows down in long calls.
//! - **L2.** Reads of L2 are free, so narrow tiles such as 128x128 are simulated too short.
//! - **Few rows.** Below m = 512 latencies are most of a call, and differences of some percent say
//!   nothing.
//! - **Contention.** Traffic beside the GEMM costs it waits, but no bandwidth.

mod clock;
mod events;
mod links;
mod pad;
mod phases;
mod result;
mod state;
mod waves;
mod worker;

#[cfg(test)]
mod tests;

pub use result::{RankTotals, SimulateError, Simulated};

use crate::machine::Machine;
use crate::plan::Mover;
use crate::program::TileProgram;
use std::time::Duration;

/// Simulates one call of the programs of all ranks, in rank order, over peer memory or through host
/// memory.
///
/// # Errors
/// [`SimulateError`]; programs that pass [`check::verify`](crate::program::check::verify) are never
/// stuck.
///
/// # Panics
/// If an index of a record points outside its list, which
/// [`check::verify`](crate::program::check::verify) rules out.
pub fn simulate(
    programs: &[TileProgram],
    machine: &Machine,
    mover: Mover,
) -> Result<Simulated, SimulateError> {
    let world = programs.first().map_or(0, |program| program.problem.world().get());
    if programs.len() != world as usize || programs.is_empty() {
        return Err(SimulateError::Programs { programs: programs.len(), world });
    }
    if programs.iter().any(|program| program.nodes.are_mixed()) {
        return Err(SimulateError::Nodes);
    }
    let (ranks, tracks): (Vec<_>, Vec<_>) =
        events::Simulation::new(programs, machine, mover).run()?.into_iter().unzip();
    let done = ranks.iter().map(|rank| rank.done).max().unwrap_or_default();
    Ok(Simulated { time: done.saturating_add(Duration::from_nanos(machine.end_ns)), ranks, tracks })
}
