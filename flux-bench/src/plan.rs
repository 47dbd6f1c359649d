//! The plan that a command line asks for, in place of the op's own.

use anyhow::{Context, bail};
use flux_core::Problem;
use flux_core::plan::{Links, Plan, PlanKey, PlanTable, TableKind, Target, choose};
use flux_transport::Communicator;

/// A plan by its text or by its rank; what is left out is the op's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct PlanArgs {
    /// The plan, as in "tile=128x256x64 rows=per-shard:2 k=stream-k"; the canonical form is used
    #[arg(long, value_name = "PLAN", conflicts_with = "candidate", help_heading = "Plan")]
    pub plan: Option<Plan>,
    /// The legal plan with this number, from 0 for the fastest by the cost model
    #[arg(long, value_name = "N", help_heading = "Plan")]
    pub candidate: Option<usize>,
}

/// A plan, and how many work on it.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct OverrideArgs {
    #[command(flatten)]
    pub(crate) plan: PlanArgs,
    /// Workers of a rank: CTAs, or threads on the host
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Plan")]
    pub(crate) workers: Option<u32>,
    /// Take only plans by which a row's bits do not depend on the rows beside it
    #[arg(long, help_heading = "Plan")]
    pub(crate) batch_invariant: bool,
}

/// How an op is executed; `None` is the op's choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Overrides {
    pub(crate) plan: Option<Plan>,
    pub(crate) workers: Option<u32>,
    pub(crate) batch_invariant: bool,
    /// Whether each call has a time line.
    pub(crate) trace: bool,
}

impl Overrides {
    /// The op's own plan with so many workers.
    pub(crate) fn with_workers(workers: u32) -> Self {
        Self { workers: Some(workers), ..Self::default() }
    }
}

impl OverrideArgs {
    /// What is asked for of an op on `comm`.
    pub(crate) fn on(&self, comm: &Communicator, problem: &Problem) -> anyhow::Result<Overrides> {
        let plan = self.plan.or_candidate(problem, || flux_ops::ranked_plans(comm, problem))?;
        let Self { workers, batch_invariant, .. } = *self;
        Ok(Overrides { plan, workers, batch_invariant, trace: false })
    }
}

impl PlanArgs {
    /// The plan for `problem` on `target`, where that is the op's choice from the shipped table or
    /// by the cost model.
    pub(crate) fn on_target(&self, problem: &Problem, target: &Target) -> anyhow::Result<Plan> {
        if let Some(plan) = self.or_candidate(problem, || Plan::ranked(problem, target))? {
            return Ok(plan.canonical(problem, target));
        }
        let transport = if target.links == Links::HostStaged { "pcie" } else { "nvlink" };
        let table = PlanTable::shipped();
        let device = table
            .rows()
            .iter()
            .map(|row| &row.key.device)
            .find(|device| target.machine.is_of(device));
        let key = PlanKey::new(
            problem,
            device.map_or(target.machine.gpu, |device| device),
            target.machine.generation,
            "any",
            transport,
        );
        let (plan, _) = choose(problem, target, &key, &[(TableKind::Shipped, &table)])
            .with_context(|| format!("{problem} has no legal plan"))?;
        Ok(plan)
    }

    fn or_candidate(
        &self,
        problem: &Problem,
        ranked: impl FnOnce() -> Vec<Plan>,
    ) -> anyhow::Result<Option<Plan>> {
        let Some(number) = self.candidate else { return Ok(self.plan) };
        let ranked = ranked();
        match ranked.get(number) {
            Some(plan) => Ok(Some(*plan)),
            None => bail!(
                "--candidate {number}: {problem} has {} candidates, numbered from 0",
                ranked.len()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::machine::Machine;
    use flux_core::plan::KSplit;
    use flux_core::program::TileProgram;
    use flux_core::tile::Generation;
    use flux_core::{DType, OpKind, Rank, WorldSize};
    use flux_kernels::KernelTarget;
    use flux_kernels::Variant;

    fn problem(op: OpKind, m: usize) -> Problem {
        Problem::new(op, m, 28672, 8192, DType::Bf16, WorldSize::new(4).unwrap()).unwrap()
    }

    #[test]
    fn a_named_plan_is_canonical_and_a_candidate_has_its_rank() {
        let problem = problem(OpKind::AllGatherGemm, 512);
        let target = Target::peer_memory(Machine::H200, &problem);
        let on = |args: PlanArgs| args.on_target(&problem, &target);
        let named = PlanArgs {
            plan: Some("tile=128x128x64 k=split-k:999".parse().unwrap()),
            candidate: None,
        };
        assert_eq!(on(named).unwrap().k, KSplit::SplitK(128), "k has 128 steps");
        let ranked = Plan::ranked(&problem, &target);
        for number in [0, ranked.len() - 1] {
            assert_eq!(
                on(PlanArgs { plan: None, candidate: Some(number) }).unwrap(),
                ranked[number]
            );
        }
        let refused =
            on(PlanArgs { plan: None, candidate: Some(ranked.len()) }).unwrap_err().to_string();
        assert_eq!(
            refused,
            format!("--candidate {0}: {problem} has {0} candidates, numbered from 0", ranked.len())
        );
    }

    #[test]
    fn the_ops_own_plan_is_the_tables_or_the_models() {
        let plan = |machine, m| {
            let problem = problem(OpKind::AllGatherGemm, m);
            let target = Target::peer_memory(machine, &problem);
            (
                PlanArgs::default().on_target(&problem, &target).unwrap(),
                Plan::ranked(&problem, &target)[0],
            )
        };
        let table = PlanTable::shipped();
        let row = |row: &&flux_core::plan::PlanRow| {
            row.key.device == "NVIDIA H200"
                && row.key.world.get() == 4
                && (row.key.n, row.key.k, row.m) == (28672, 8192, 4096)
        };
        let row = table
            .rows()
            .iter()
            .find(|found| row(found) && found.key.op == OpKind::AllGatherGemm)
            .unwrap();
        assert_eq!(plan(Machine::H200, 4096).0, row.plan);
        let (own, model) = plan(Machine::H800, 4096);
        assert_eq!(own, model, "a machine without rows");
    }

    #[test]
    fn there_is_a_kernel_for_each_candidate() {
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            for problem in [136, 768, 4096].map(|m| problem(op, m)) {
                for generation in Generation::ALL {
                    let target = Target::peer_memory(Machine::H100.running(generation), &problem);
                    for plan in Plan::ranked(&problem, &target) {
                        let program = TileProgram::build(
                            &problem,
                            Rank::new(0),
                            &plan.schedule(&problem, &target),
                        )
                        .unwrap();
                        let found = Variant::of(&program, KernelTarget::of_generation(generation));
                        found.unwrap_or_else(|why| panic!("{problem}, {plan}: {why}"));
                    }
                }
            }
        }
    }
}
