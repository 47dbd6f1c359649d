//! The order in which a plan adds up one element of the result.
//!
//! Invariant: an order that is [`SumOrder::Fixed`] for one `m` is so for every `m`. It depends on
//! no row's position, tile or owner.

use super::{CommMode, KSplit, Plan, RowMapping, Target};
use crate::Problem;
use std::fmt;

/// The order in which an element's products and the ranks' partial sums are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SumOrder {
    /// One worker adds a rank's products in ascending `k`. All ranks' partial sums are rounded, the
    /// owner's too, and added in rank order.
    Fixed,
    /// Workers add parts of `k` apart. The parts depend on the tiles, and with them on `m`.
    PartsOfK,
    /// The owner of a row rounds the others' partial sums but not its own, and begins with that.
    ByOwner,
    /// A library's collective adds the ranks' partial sums, in an order of its own.
    Library,
}

impl fmt::Display for SumOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fixed => "sums have one order",
            Self::PartsOfK => "parts of k that depend on m are added apart",
            Self::ByOwner => "the owner of a row begins with its own unrounded sum",
            Self::Library => "a library's collective adds the ranks' sums",
        })
    }
}

impl Plan {
    /// The order of sums by this plan and by its canonical form, for `problem` with any `m`.
    ///
    /// ```
    /// use flux_core::machine::Machine;
    /// use flux_core::plan::{Plan, SumOrder, Target};
    /// use flux_core::{DType, OpKind, Problem, WorldSize};
    /// let four = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::GemmReduceScatter, 512, 1024, 4096, DType::Bf16, four)?;
    /// let target = Target::peer_memory(Machine::H100, &p);
    /// let order = |text: &str| text.parse::<Plan>().unwrap().sum_order(&p, &target);
    /// assert_eq!(order("tile=128x128x64 rows=flattened"), SumOrder::Fixed);
    /// assert_eq!(order("tile=128x128x64 rows=flattened k=split-k:2"), SumOrder::PartsOfK);
    /// assert_eq!(order("tile=128x128x64 rows=per-shard:1"), SumOrder::ByOwner);
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn sum_order(&self, problem: &Problem, target: &Target) -> SumOrder {
        match self.own_sum_order(problem) {
            SumOrder::Fixed => self.canonical(problem, target).own_sum_order(problem),
            // The canonical form may be `Fixed` for this `m` alone.
            other => other,
        }
    }

    fn own_sum_order(&self, problem: &Problem) -> SumOrder {
        let adds_ranks = problem.op().reduces() && problem.world().peers() > 0;
        match (self.k, self.comm, self.rows) {
            (KSplit::SplitK(_) | KSplit::StreamK, ..) => SumOrder::PartsOfK,
            _ if !adds_ranks => SumOrder::Fixed,
            (_, CommMode::Sequential, _) => SumOrder::Library,
            (.., RowMapping::PerShard { .. }) => SumOrder::ByOwner,
            (.., RowMapping::Flattened | RowMapping::FlattenedTwoExchanges) => SumOrder::Fixed,
        }
    }

    /// Whether the plan may be chosen on `target`: of any order, unless that asks for the fixed
    /// one.
    pub(super) fn has_wanted_order(&self, problem: &Problem, target: &Target) -> bool {
        !target.batch_invariant || self.sum_order(problem, target) == SumOrder::Fixed
    }
}
