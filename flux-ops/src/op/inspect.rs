//! What an op says of itself: its shapes and plans, and how it is executed.

use super::FusedLinear;
use crate::error::CallError;
use crate::execute::Execution;
use flux_core::layout::WorkspaceSize;
use flux_core::plan::Plan;
use flux_core::{Problem, Rank};
use std::fmt::Write as _;
use std::ops::Range;

impl FusedLinear {
    /// The most rows of a call.
    pub const fn max_m(&self) -> usize {
        self.largest.m() as usize
    }

    /// The problem of calls with the most rows.
    pub const fn largest(&self) -> &Problem {
        &self.largest
    }

    /// The problem of calls with `m` rows: shapes of every operand on one rank.
    ///
    /// # Errors
    /// [`CallError::TooManyRows`] and [`CallError::Problem`].
    pub fn problem(&self, m: usize) -> Result<Problem, CallError> {
        match u32::try_from(m) {
            Ok(rows) if rows <= self.largest.m() => Ok(self.largest.with_m(rows)?),
            _ => Err(CallError::TooManyRows { m, max_m: self.max_m() }),
        }
    }

    /// The rows of `rank`'s shard, of all `m`.
    ///
    /// # Errors
    /// As [`problem`](Self::problem), but `m` may be 0.
    pub fn rows(&self, m: usize, rank: Rank) -> Result<Range<usize>, CallError> {
        if m == 0 {
            return Ok(0..0);
        }
        let rows = self.problem(m)?.shard_rows(rank);
        Ok(rows.start as usize..rows.end as usize)
    }

    /// The columns of all `n` that `rank` has: the rows of its `w`, and the columns of its `y`, of
    /// which it has half with gates. All but of an AllGather-GEMM. Of several weights those of the
    /// first.
    ///
    /// ```
    /// use flux_ops::{AllGatherGemm, bf16};
    /// use flux_transport::{Communicator, Select, World};
    /// let rank = |world: World| {
    ///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
    ///     let op = AllGatherGemm::<bf16>::builder(16, 40, 8).build(&comm)?;
    ///     let columns: Vec<_> = comm.world_size().ranks().map(|rank| op.columns(rank)).collect();
    ///     assert_eq!(columns, [0..16, 16..32, 32..40]);
    ///     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// };
    /// # std::thread::scope(|scope| {
    /// #     let spawn = |world| scope.spawn(move || rank(world));
    /// #     let ranks: Vec<_> = World::local(3)?.into_iter().map(spawn).collect();
    /// #     ranks.into_iter().try_for_each(|rank| rank.join().expect("no assertion fails"))
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    pub const fn columns(&self, rank: Rank) -> Range<usize> {
        let columns = self.largest.columns(rank);
        columns.start as usize..columns.end as usize
    }

    /// Number of weights: 1, or [several](super::Builder::several_weights).
    pub const fn weight_count(&self) -> usize {
        self.largest.weight_count()
    }

    /// As [`columns`](Self::columns), of one of [several weights](super::Builder::several_weights),
    /// counted from its own first column.
    ///
    /// # Panics
    /// If the op has no weight of this number.
    pub fn weight_columns(&self, weight: usize, rank: Rank) -> Range<usize> {
        assert!(
            weight < self.largest.weight_count(),
            "weight {weight} of {}",
            self.largest.weight_count()
        );
        let columns = self.largest.weight_columns(weight, rank);
        columns.start as usize..columns.end as usize
    }

    /// The elements of the inner extent `k` that `rank` has: the columns of its `x` and `w`. All of
    /// an AllGather-GEMM.
    pub const fn inner(&self, rank: Rank) -> Range<usize> {
        let inner = self.largest.inner(rank);
        inner.start as usize..inner.end as usize
    }

    /// The plan of calls with `m` rows, in its canonical form.
    ///
    /// # Errors
    /// As [`problem`](Self::problem).
    pub fn plan(&self, m: usize) -> Result<Plan, CallError> {
        Ok(self.recipe(self.problem(m)?).plan(&self.comm))
    }

    /// What calls need of the communicator's workspace, whatever their `m`.
    pub const fn workspace(&self) -> WorkspaceSize {
        self.workspace
    }

    /// How this rank executes calls with `m` rows, for people.
    ///
    /// # Errors
    /// As [`problem`](Self::problem).
    pub fn execution(&self, m: usize) -> Result<Execution, CallError> {
        let recipe = self.recipe(self.problem(m)?);
        let resolved = recipe.resolve(&self.comm).map_err(|error| recipe.refused(error))?;
        Ok(self.executor.execution(&resolved))
    }

    /// The plans and their origins, the executor, the workspace and the transport, for people.
    pub fn explain(&self) -> String {
        let Self { comm, spec, largest, workspace, .. } = self;
        let order = if spec.batch_invariant { ", batch-invariant" } else { "" };
        let mut text = format!(
            "{largest} at most, {}{order}, rank {} of {}",
            spec.epilogue,
            comm.rank(),
            largest.world()
        );
        let mut first = 1;
        for (bucket, next) in
            self.buckets.iter().zip(self.buckets.iter().map(Some).skip(1).chain([None]))
        {
            // Neighbours with one plan are one line.
            if next.is_some_and(|next| {
                (next.choice.plan, next.choice.origin) == (bucket.choice.plan, bucket.choice.origin)
            }) {
                continue;
            }
            let plan = self.plan(bucket.last as usize).unwrap_or(bucket.choice.plan);
            let _ = write!(
                text,
                "\n  plan for m = {first} to {}: {plan} ({})",
                bucket.last, bucket.choice.origin
            );
            first = bucket.last + 1;
        }
        if let Ok(execution) = self.execution(self.max_m()) {
            let _ = write!(text, "\n  executor for m = {}: {execution}", self.max_m());
        }
        let (needed, held) = (workspace.total_bytes(), comm.workspace_size().total_bytes());
        let _ = write!(
            text,
            "\n  workspace: {needed} bytes of the communicator's {held}\n  {}",
            comm.explain().replace('\n', "\n  ")
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AllGatherGemm;
    use flux_core::TileShape;
    use flux_core::plan::KSplit;
    use flux_transport::{Communicator, Select, World};
    use half::bf16;

    #[test]
    fn an_op_says_the_rows_of_each_shard() {
        let op = |world: World| {
            let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
            AllGatherGemm::<bf16>::builder(16, 24, 8).build(&comm).unwrap()
        };
        let ops: Vec<_> = std::thread::scope(|scope| {
            let ranks: Vec<_> = World::local(3)
                .unwrap()
                .into_iter()
                .map(|world| scope.spawn(move || op(world)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let rows = |m| [0, 1, 2].map(|rank| ops[0].rows(m, Rank::new(rank)).unwrap());
        assert_eq!(
            [rows(0), rows(1), rows(8)],
            [[0..0, 0..0, 0..0], [0..1, 1..1, 1..1], [0..3, 3..6, 6..8]]
        );
        let refused = ops[0].rows(17, Rank::new(0)).unwrap_err().to_string();
        assert_eq!(
            refused,
            "m = 17 is above max_m = 16, which the op was built with: build it with a larger \
             max_m, or split the call"
        );
    }

    #[test]
    fn an_op_says_its_plan_in_canonical_form_and_where_it_comes_from() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        let plan = |plan: Option<Plan>| {
            let builder = AllGatherGemm::<bf16>::builder(16, 16, 128);
            let builder = if let Some(plan) = plan { builder.plan(plan) } else { builder };
            let op = builder.build(&comm).unwrap();
            let explained = op.explain();
            let plan = explained.lines().rev().find_map(|line| {
                line.split_once(" to 16: ").filter(|(m, _)| m.starts_with("  plan for m = "))
            });
            plan.unwrap().1.to_owned()
        };
        let fine = Plan::of(TileShape::new(16, 16, 64));
        assert_eq!(plan(Some(fine)), format!("{fine} (named by the caller)"));
        let asked = Plan { k: KSplit::SplitK(9), ..fine };
        assert_eq!(
            plan(Some(asked)),
            format!("{} (named by the caller)", Plan { k: KSplit::SplitK(2), ..fine })
        );
        assert!(plan(None).ends_with(" (by the cost model)"));
    }
}
