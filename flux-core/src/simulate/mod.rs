//! What a call would take: the tile programs of all ranks, walked event by event on a machine that
//! is described by a few numbers.
//!
//! Invariant: it knows no schedule. Which items there are, in which order, what they await and
//! raise, is read from the records, as the kernel reads them; the time that each takes is the
//! [`Machine`]'s.
//!
//! A worker takes a tile's steps along `k`, none before what is awaited for it, then adds what is
//! added after, then finishes the tile; its steps take what their operations take, more where
//! shared memory bounds them ([`TileShape::step_percent`](crate::TileShape::step_percent)), or what
//! its wave reads of memory if that is more. A rank's link is two servers, one out and one in, each
//! of which carries a message after the other. Partial tiles leave when they are finished; the
//! shard of an AllGather-GEMM leaves transfer by transfer.
//!
//! Through memory of the host ([`Machine::through_host`]) a message is a chunk, which leaves when
//! it is whole and goes on when all of it is there; rows leave once for all who read them.
//!
//! `flux-bench/tests/simulated_results.rs` bounds how far medians of committed records are from it,
//! from m = 512 on. What it leaves out, and where that shows:
//!
//! - **Power.** The clock is one number, but a card at its power limit slows down in long calls.
//! - **L2.** What narrow tiles ask of L2, and rows beyond the last, cost nothing: plans with tiles
//!   of 128x128 are simulated too short.
//! - **Few rows.** Below m = 512, reading `w`, first rows and last signals are most of a call. A
//!   difference of some percent between two plans says nothing.
//! - **Traffic beside the GEMM** costs it nothing but waits: no contention and no pace.

mod call;
mod clock;
mod links;
mod pad;
mod phases;
mod state;
mod waves;
mod worker;

#[cfg(test)]
mod tests;

use crate::Rank;
use crate::machine::Machine;
use crate::plan::Mover;
use crate::program::TileProgram;
use std::time::Duration;

/// Why there is no time.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// Not one program for each rank.
    #[error("{programs} programs of a world of {world}: give one for each rank, in rank order")]
    Programs {
        /// How many there are.
        programs: usize,
        /// Ranks of the world.
        world: u32,
    },
    /// Only some of the ranks reach each other's memory.
    #[error("the ranks are in several nodes, and only calls of one are simulated: build the programs without nodes")]
    Nodes,
    /// Nothing more happens, and a worker still waits.
    #[error("rank {rank} waits forever: item {item} awaits signal {signal}, which rank {peer} never raises")]
    Stuck {
        /// Who waits.
        rank: Rank,
        /// The first of its items that wait.
        item: usize,
        /// What it awaits.
        signal: u32,
        /// Who should raise it.
        peer: Rank,
    },
}

/// What one rank did. Times are sums over its workers, moments are counted from the begin of the
/// call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankTotals {
    /// Moment at which its workers were done and all that it sent was there.
    pub done: Duration,
    /// Moment at which the last of its tiles was multiplied.
    pub multiplied: Duration,
    /// Time spent multiplying.
    pub multiplying: Duration,
    /// Time spent waiting for signals.
    pub waiting: Duration,
    /// Time spent adding partial tiles, parts and scattered rows.
    pub adding: Duration,
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Bytes that came from them.
    pub received: u64,
}

/// A call as it was simulated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulated {
    /// When the call had ended on the last rank.
    pub time: Duration,
    /// By rank.
    pub ranks: Vec<RankTotals>,
}

impl Simulated {
    /// What the busiest link alone takes for its bytes.
    pub fn on_links(&self, machine: &Machine) -> Duration {
        let bytes = self.ranks.iter().flat_map(|rank| [rank.sent, rank.received]).max();
        machine.carrying(bytes.unwrap_or(0))
    }
}

/// Simulates one call of these programs, those of all ranks in rank order, over peer memory, or
/// through that of the host where the machine says so.
///
/// # Errors
/// [`SimulateError`]; programs that pass [`check::verify`](crate::program::check::verify) are never
/// stuck.
///
/// # Panics
/// If an index of a record points outside of its list, which
/// [`check::verify`](crate::program::check::verify) rules out.
pub fn simulate(programs: &[TileProgram], machine: &Machine, mover: Mover) -> Result<Simulated, SimulateError> {
    let world = programs.first().map_or(0, |program| program.problem.world().get());
    if programs.len() != world as usize || programs.is_empty() {
        return Err(SimulateError::Programs { programs: programs.len(), world });
    }
    if programs.iter().any(|program| program.nodes.are_mixed()) {
        return Err(SimulateError::Nodes);
    }
    let ranks = call::Call::new(programs, machine, mover).run()?;
    let done = ranks.iter().map(|rank| rank.done).max().unwrap_or_default();
    Ok(Simulated { time: done.saturating_add(Duration::from_nanos(machine.end_ns)), ranks })
}
