//! What follows from a spec on one communicator: plans for all rows, and how they are executed.

use crate::error::BuildError;
use crate::execute::{Recipe, Resolved};
use crate::planning::{self, Buckets, Choice, UserTable};
use crate::spec::OpSpec;
use flux_core::layout::WorkspaceSize;
use flux_core::plan::{CommMode, Plan, PlanOrigin, SumOrder};
use flux_core::program::ScheduleError;
use flux_core::{Partials, Problem};
use flux_transport::Communicator;
use std::sync::Arc;

impl OpSpec {
    /// This rank's choice of the plan for the most rows.
    pub(crate) fn choice(&self, comm: &Communicator) -> Result<Choice, BuildError> {
        let problem = self.largest(comm.world_size())?;
        match self.plan {
            Some(plan) => self.named(comm, &plan, &problem),
            None => planning::own_choice(comm, &problem, self, &self.user_table()),
        }
    }

    /// This rank's choices of plans for all numbers of rows.
    pub(super) fn choices(&self, comm: &Communicator) -> Result<Buckets, BuildError> {
        let largest = self.largest(comm.world_size())?;
        match self.plan {
            Some(plan) => Ok(Buckets::one(largest.m(), self.named(comm, &plan, &largest)?)),
            None => planning::own_choices(comm, &largest, self, &self.user_table()),
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
            return Err(BuildError::SequentialPartials { dtype: self.numerics.output });
        }
        let target = planning::target(comm, self)?;
        let order = plan.sum_order(largest, &target);
        if self.batch_invariant && order != SumOrder::Fixed {
            return Err(BuildError::SumOrder { plan: plan.canonical(largest, &target), order });
        }
        Ok(Choice { plan: *plan, sms: target.machine.multiprocessors, origin: PlanOrigin::Caller })
    }

    /// The user's table of measured plans.
    pub(super) fn user_table(&self) -> Arc<UserTable> {
        UserTable::at(self.plan_table.as_deref(), false)
    }

    /// How this rank executes the op with the last `m` of each bucket: with equal shards, and in
    /// the form of shards that differ.
    pub(super) fn resolve(
        &self,
        comm: &Communicator,
        buckets: &Buckets,
    ) -> Result<Vec<(Recipe, Resolved)>, BuildError> {
        // The margin counts on each rank; the others' choice may be of a larger device.
        planning::target(comm, self)?;
        let largest = self.largest(comm.world_size())?;
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
