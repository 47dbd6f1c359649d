//! The target of a plan.

use super::{CommMode, RowMapping};
use crate::machine::Machine;
use crate::program::Channels;
use crate::{Nodes, Partials, Problem, SumsTo};

/// A machine, and how its ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Rates and latencies.
    pub machine: Machine,
    /// How the ranks are grouped.
    pub nodes: Nodes,
    /// How data travels between them.
    pub links: Links,
    /// Whether all plans must have [`SumOrder::Fixed`](super::SumOrder::Fixed).
    pub batch_invariant: bool,
}

/// How data travels between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Ranks store into each other's memory: `nvlink` and `host`.
    PeerMemory,
    /// Data is staged in pinned host memory: `pcie`.
    HostStaged,
    /// Messages of a collective library: `nccl`, and `mixed` between nodes.
    Messages(Channels),
}

impl Target {
    /// Ranks of this machine that reach each other's memory.
    pub const fn peer_memory(machine: Machine, problem: &Problem) -> Self {
        Self {
            machine,
            nodes: Nodes::apart(problem.world()),
            links: Links::PeerMemory,
            batch_invariant: false,
        }
    }

    /// Whether ranks can run the library collective before or after the GEMM: it takes equal
    /// shards, or all rows of an AllReduce, and adds sums of the op's type. Across nodes only the
    /// latter, which has no other way there.
    pub(super) fn has_collectives(&self, problem: &Problem) -> bool {
        let equal = problem.full_shards() == problem.world().get() && !self.nodes.are_mixed();
        matches!(self.links, Links::Messages(_))
            && (equal || problem.op().sums_to() == SumsTo::All)
            && problem.numerics().partials == Partials::Output
    }

    /// Whether the library collective stands in for a plan with this communication: messages of a
    /// GEMM-AllReduce go from every rank to all, which a plan must ask for, and not across nodes.
    pub(super) fn prefers_collectives(&self, problem: &Problem, comm: CommMode) -> bool {
        let messages = matches!(comm, CommMode::Overlapped { .. }) && !self.nodes.are_mixed();
        problem.op().sums_to() == SumsTo::All && !messages && self.has_collectives(problem)
    }

    /// Whether messages carry data between ranks.
    pub(super) const fn has_messages(&self) -> bool {
        matches!(self.links, Links::Messages(_))
    }

    /// Whether ranks give each other what they have finished of these rows: kernels store it in
    /// peers' memory, and copy engines carry tiles of a shard through host memory.
    pub(super) const fn exchanges_results(&self, rows: RowMapping) -> bool {
        match self.links {
            Links::PeerMemory => true,
            Links::HostStaged => matches!(rows, RowMapping::PerShard { .. }),
            Links::Messages(_) => false,
        }
    }

    /// Most shards of a group.
    pub(super) fn widest_group(&self, problem: &Problem) -> u32 {
        if problem.op().gathers() {
            problem.world().get()
        } else {
            crate::program::widest_group(self.nodes)
        }
    }
}
