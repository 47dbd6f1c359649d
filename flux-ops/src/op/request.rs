//! What a builder was told, and what follows from it on one communicator.

use crate::epilogue::EpilogueSpec;
use crate::error::BuildError;
use crate::execute::{LaunchOptions, Recipe, Resolved};
use crate::planning::{self, Buckets, Choice, Constraints, UserTable};
use flux_core::layout::WorkspaceSize;
use flux_core::plan::{CommMode, Plan, PlanOrigin, SumOrder};
use flux_core::program::ScheduleError;
use flux_core::{DType, Numerics, OpKind, Partials, Problem};
use flux_kernels::WeightLayout;
use flux_transport::Communicator;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// What a builder was told.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) op: OpKind,
    pub(crate) max_m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// The output columns of each of several weights, `n` in all.
    pub(crate) columns: Option<Vec<usize>>,
    pub(crate) dtype: DType,
    pub(crate) epilogue: EpilogueSpec,
    pub(crate) weights: WeightLayout,
    pub(crate) plan: Option<Plan>,
    /// The file of measured plans, in place of the user's.
    pub(crate) table: Option<PathBuf>,
    pub(crate) launch: LaunchOptions,
    /// Whether a row's bits do not depend on the rows beside it.
    pub(crate) batch_invariant: bool,
    /// Element type of partial sums between ranks.
    pub(crate) partials: Partials,
    /// Most bytes of the workspace.
    pub(crate) max_workspace: Option<u64>,
}

impl Request {
    pub(crate) fn new(op: OpKind, max_m: usize, n: usize, k: usize, dtype: DType) -> Self {
        let (epilogue, weights, launch) =
            (EpilogueSpec::default(), WeightLayout::default(), LaunchOptions::default());
        let (plan, table, batch_invariant, max_workspace) = (None, None, false, None);
        let (columns, partials) = (None, Partials::Output);
        Self {
            op,
            max_m,
            n,
            k,
            columns,
            dtype,
            epilogue,
            weights,
            plan,
            table,
            launch,
            batch_invariant,
            partials,
            max_workspace,
        }
    }

    /// What is asked of plans.
    pub(crate) const fn constraints(&self) -> Constraints {
        Constraints { sm_margin: self.launch.sm_margin, batch_invariant: self.batch_invariant }
    }

    /// The op and its extents, as errors name it.
    pub(crate) fn name(&self) -> String {
        format!("{} {}x{}x{}", self.op, self.max_m, self.n, self.k)
    }

    /// The problem with the most rows.
    pub(crate) fn largest(&self, comm: &Communicator) -> Result<Problem, BuildError> {
        // What no u32 holds is no part of `n`; nor is `!15`, the largest multiple of 16 of a u32.
        let column = |&columns: &usize| u32::try_from(columns).unwrap_or(!15);
        let columns: Option<Vec<_>> =
            self.columns.as_ref().map(|columns| columns.iter().map(column).collect());
        let numerics = Numerics::from(self.dtype).with_partials(self.partials);
        let world = comm.world_size();
        // An error that names a weight says more than one of their sum.
        columns
            .iter()
            .try_for_each(|columns| Problem::check_weights(self.op, columns, numerics, world))?;
        let problem = Problem::new(self.op, self.max_m, self.n, self.k, numerics, world)?;
        let problem = if self.epilogue.gates.is_some() { problem.with_gates()? } else { problem };
        Ok(if let Some(columns) = &columns { problem.with_weights(columns)? } else { problem })
    }

    /// This rank's choice of the plan for the most rows.
    pub(crate) fn choice(&self, comm: &Communicator) -> Result<Choice, BuildError> {
        let problem = self.largest(comm)?;
        match self.plan {
            Some(plan) => self.named(comm, &plan, &problem),
            None => planning::own_choice(comm, &problem, (&self.user_table(), self.constraints())),
        }
    }

    /// This rank's choices of plans for all numbers of rows.
    pub(super) fn choices(&self, comm: &Communicator) -> Result<Buckets, BuildError> {
        let largest = self.largest(comm)?;
        match self.plan {
            Some(plan) => Ok(Buckets::one(largest.m(), self.named(comm, &plan, &largest)?)),
            None => planning::own_choices(comm, &largest, (&self.user_table(), self.constraints())),
        }
    }

    /// The caller's plan.
    fn named(
        &self,
        comm: &Communicator,
        plan: &Plan,
        largest: &Problem,
    ) -> Result<Choice, BuildError> {
        // No text of a plan says that.
        plan.zero_field().map_or(Ok(()), |name| Err(ScheduleError::Zero { name }))?;
        if plan.comm == CommMode::Sequential && largest.numerics().partials == Partials::F32 {
            return Err(BuildError::SequentialPartials { dtype: self.dtype });
        }
        let target = planning::target(comm, self.constraints())?;
        let order = plan.sum_order(largest, &target);
        if self.batch_invariant && order != SumOrder::Fixed {
            return Err(BuildError::SumOrder { plan: plan.canonical(largest, &target), order });
        }
        Ok(Choice { plan: *plan, sms: target.machine.multiprocessors, origin: PlanOrigin::Caller })
    }

    /// The user's table of measured plans.
    pub(super) fn user_table(&self) -> Arc<UserTable> {
        UserTable::at(self.table.as_deref(), false)
    }

    /// How this rank executes the op with the last `m` of each bucket: with equal shards, and in
    /// the form of shards that differ.
    pub(super) fn resolve(
        &self,
        comm: &Communicator,
        buckets: &Buckets,
    ) -> Result<Vec<(Recipe, Resolved)>, BuildError> {
        // The margin counts on each rank; the others' choice may be of a larger device.
        planning::target(comm, self.constraints())?;
        let largest = self.largest(comm)?;
        let mut all = Vec::new();
        for bucket in buckets.iter() {
            // A collective takes equal shards, as smaller `m` of the bucket have.
            let equal = bucket.last.next_multiple_of(largest.world().get());
            let last =
                if bucket.choice.plan.comm == CommMode::Sequential { equal } else { bucket.last };
            let recipe = Recipe::new(largest.with_m(last)?, &bucket.choice, self.launch);
            for recipe in [Some(recipe), recipe.for_unequal_shards()].into_iter().flatten() {
                all.push((recipe, recipe.resolve(comm)?));
            }
        }
        Ok(all)
    }

    /// Refuses a workspace above the caller's limit.
    pub(super) fn check_workspace(&self, needed: WorkspaceSize) -> Result<(), BuildError> {
        match (needed.total_bytes(), self.max_workspace) {
            (needed, Some(limit)) if needed > limit => Err(BuildError::Workspace { needed, limit }),
            _ => Ok(()),
        }
    }
}

/// What calls of all buckets need of the communicator's workspace.
pub(super) fn workspace(largest: &[(Recipe, Resolved)]) -> WorkspaceSize {
    largest
        .iter()
        .fold(WorkspaceSize::default(), |size, (_, resolved)| size.max(resolved.bound.workspace))
}

/// The text that the ranks compare: all that must be the same on every rank.
impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            op,
            max_m,
            n,
            k,
            columns,
            dtype,
            epilogue,
            weights,
            plan,
            table: _,
            launch,
            batch_invariant,
            partials,
            max_workspace: _,
        } = self;
        write!(f, "{op} max_m={max_m} n={n} k={k} {dtype}, {epilogue}, ")?;
        if let Some(columns) = columns {
            write!(f, "weights of {columns:?} columns, ")?;
        }
        match plan {
            Some(plan) => write!(f, "{plan}")?,
            None => f.write_str("plan of rank 0")?,
        }
        if *weights != WeightLayout::default() {
            write!(f, ", weights {weights}")?;
        }
        if *batch_invariant {
            f.write_str(", batch-invariant")?;
        }
        if *partials == Partials::F32 {
            f.write_str(", partials=f32")?;
        }
        if launch.sm_margin > 0 {
            write!(f, ", sm_margin={}", launch.sm_margin)?;
        }
        write!(f, ", flux {}", env!("CARGO_PKG_VERSION"))
    }
}
