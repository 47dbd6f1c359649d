//! The outcome of a simulated call.

use crate::Rank;
use crate::machine::Machine;
use crate::timeline::Track;
use std::time::Duration;

/// Why a call cannot be simulated.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// The programs are not one for each rank.
    #[error("{programs} programs of a world of {world}: give one for each rank, in rank order")]
    Programs {
        /// Number of programs.
        programs: usize,
        /// Number of ranks.
        world: u32,
    },
    /// The nodes are mixed.
    #[error(
        "the ranks are in several nodes, and only calls of one are simulated: build the programs \
         without nodes"
    )]
    Nodes,
    /// A worker waits for a signal that nobody raises.
    #[error(
        "rank {rank} waits forever: item {item} awaits signal {signal}, which rank {peer} never \
         raises"
    )]
    Stuck {
        /// The waiting rank.
        rank: Rank,
        /// The first of its waiting items.
        item: usize,
        /// The awaited signal.
        signal: u32,
        /// The rank that should raise it.
        peer: Rank,
    },
}

crate::debug_is_text!(SimulateError);

/// Totals of one rank. Times are sums over its workers; moments count from the begin of the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankTotals {
    /// Moment at which its workers were done and all its messages had arrived.
    pub done: Duration,
    /// Moment at which its last tile was multiplied.
    pub multiplied: Duration,
    /// Time spent multiplying.
    pub multiplying: Duration,
    /// Time spent waiting for signals.
    pub waiting: Duration,
    /// Time spent adding partial tiles, parts and scattered rows.
    pub adding: Duration,
    /// Bytes sent to other ranks.
    pub sent: u64,
    /// Bytes received from other ranks.
    pub received: u64,
}

/// A simulated call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Simulated {
    /// Time until the call had ended on the last rank.
    pub time: Duration,
    /// Totals by rank.
    pub ranks: Vec<RankTotals>,
    /// What each worker does, by rank and worker.
    pub tracks: Vec<Vec<Track>>,
}

impl Simulated {
    /// Time of a library's collective with as many bytes.
    pub fn collective(&self, machine: &Machine) -> Duration {
        machine.collective_time(self.busiest())
    }

    /// Time of the busiest link for its bytes alone.
    pub fn on_links(&self, machine: &Machine) -> Duration {
        machine.one_way_time(self.busiest())
    }

    /// Bytes on the busiest link.
    fn busiest(&self) -> u64 {
        self.ranks.iter().flat_map(|rank| [rank.sent, rank.received]).max().unwrap_or(0)
    }
}
