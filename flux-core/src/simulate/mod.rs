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
//! Against the measured rows with m >= 512 (`flux-bench simulate --against`): within 7.1 % of
//! results/h100-x2-nvlink.json, half of the rows within 3.8, and within 6.9 of h100-x4-nvlink.json,
//! half within 3.5, with nothing fitted but what an H100's memory is said to give; from m = 1024 on
//! within 8.5 % of the 16 rows of results/h100-x2-pcie.json, half of them within 1.4: a later run
//! than the one that a clock was fitted to; within 10.0 % of results/h200-x4-nvlink.json, half of
//! them within 5.2, of another machine than it was fitted to, whose record, of 668cd2b, is in the
//! history; within 9.1 % of results/h200-x2-nvlink.json, half within 5.0. Of schedules that were
//! tried and lose (results/tuning/wide-bands.txt, TP 4) it is within 10 % too: where the peers'
//! shards are one band, the AllGather-GEMM of Llama at m = 4096 takes 0.759 ms and took 0.74 and
//! 0.77, its own schedule 0.64. One number, what a copy takes besides its bytes, is fitted to those
//! among them that are in slices of k.
//!
//! What it leaves out, and where that shows:
//!
//! - **Power.** The clock is one number. A card at its power limit slows down the longer a call is:
//!   of GPT-3 on 2 ranks, calls of 3.4 and 6.9 ms are simulated 2 to 5 % too short. From one run to
//!   another the same GEMM differs by as much (AllGather-GEMM of GPT-3, 4 ranks, m = 4096: T_gemm
//!   1.68 ms in results/h200-x1-core-tp4.json, 1.65 in that of 837d258, 1.72 in that of a1d4c84,
//!   1.76 in that of 89fd1be).
//! - **L2.** A step takes what its operations or shared memory take. What narrow tiles ask of L2,
//!   and rows beyond the end of the rows, cost nothing: plans with tiles of 128x128 are 18 % too
//!   short in the median, others right (784 plans of two ranks with 130 to 4000 rows, nine tenths
//!   of them not more than 14 % too short, and 7 too long; results/tuning/plans-simulated.txt).
//! - **Rests.** The same GEMM of GPT-3 on 2 ranks at m = 8192 takes 6.8 ms in the rounds of
//!   results/h200-x2-nvlink.json and 5.9 in those of results/h200-x2-pcie.json, one machine a
//!   minute later, where collectives, in which the card rests, take nine times as long; simulated
//!   it is 6.5.
//! - **Few rows.** With m < 512 reading `w`, the first rows and the last signals are most of a
//!   call. Of 381 such plans, of 130 rows and more, half are between 8 % too short and 1 too long,
//!   a tenth more than 15 too short: such as share all of their tiles, 4 to 6 % in the median, and
//!   128x128. A difference of some percent between two schedules says nothing.
//! - **Traffic beside the GEMM** costs it nothing but waits: no contention in L2 or memory, no room
//!   that a partial tile has to leave first, and no pace (`Builder::spread`), which keeps traffic
//!   from what is not simulated.

mod call;
mod clock;
mod harness;
mod links;
mod pad;
mod phases;
mod waves;
mod worker;

#[cfg(test)]
mod tests;

use crate::Rank;
use crate::machine::Machine;
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

/// Who pushes the shards of an AllGather-GEMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pushes {
    /// Whoever does by default: [`TileProgram::is_for_copy_engines`].
    #[default]
    AsByDefault,
    /// The kernel.
    Kernel,
    /// Copy engines, but where tiles span shards.
    CopyEngines,
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
pub fn simulate(programs: &[TileProgram], machine: &Machine, pushes: Pushes) -> Result<Simulated, SimulateError> {
    let world = programs.first().map_or(0, |program| program.problem.world().get());
    if programs.len() != world as usize || programs.is_empty() {
        return Err(SimulateError::Programs { programs: programs.len(), world });
    }
    if programs.iter().any(|program| program.nodes.are_mixed()) {
        return Err(SimulateError::Nodes);
    }
    let ranks = call::Call::new(programs, machine, pushes).run()?;
    let done = ranks.iter().map(|rank| rank.done).max().unwrap_or_default();
    Ok(Simulated { time: done.saturating_add(Duration::from_nanos(machine.end_ns)), ranks })
}
