//! Which plans an op has: what its caller names, measured ones, or the cost model's.
//!
//! Invariant: every rank takes rank 0's choices. What a schedule is derived from beside the plan,
//! the SM count, is part of a choice.

mod choice;
mod user_table;

pub(crate) use choice::{Bucket, Buckets, Choice};
pub(crate) use user_table::UserTable;

use crate::error::BuildError;
use crate::spec::OpSpec;
use flux_core::machine::Machine;
use flux_core::plan::{Links, Plan, PlanKey, PlanTable, TableKind, Target, bucket_ends, choose};
use flux_core::program::ScheduleError;
use flux_core::tile::Generation;
use flux_core::{Nodes, Numerics, Problem, SumsTo};
use flux_cuda::{ComputeCapability, DeviceInfo};
use flux_kernels::KernelTarget;
use flux_transport::{Capabilities, Communicator, Mover, PeerStores};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What the plans of an op are chosen for on `comm`.
///
/// # Errors
/// [`BuildError::SmMargin`] where no SM is left.
pub(crate) fn target(comm: &Communicator, spec: &OpSpec) -> Result<Target, BuildError> {
    let (batch_invariant, sm_margin) = (spec.batch_invariant, spec.launch.sm_margin);
    let mut target = Target { batch_invariant, ..whole_target(comm) };
    let sms = target.machine.multiprocessors;
    target.machine.multiprocessors = sms
        .checked_sub(sm_margin)
        .filter(|&left| left > 0)
        .ok_or(BuildError::SmMargin { value: sm_margin, sms })?;
    Ok(target)
}

/// The device and the links of `comm`. On the host transport they are an H100's: the same plans are
/// tried there as on GPUs.
pub(crate) fn whole_target(comm: &Communicator) -> Target {
    let device = comm.device();
    let machine = device.info().map_or(Machine::H100, |info| {
        Machine::of_gpu(&info.name, info.sms).running(generation(Some(info.compute)))
    });
    let links = links(&comm.capabilities());
    let machine =
        if links == Links::HostStaged { machine.staged(comm.world_size().get()) } else { machine };
    Target { machine, nodes: comm.nodes(), links, batch_invariant: false }
}

/// The kernel whose plans a device with this compute capability takes; of the host, Hopper's.
pub(crate) fn generation(compute: Option<ComputeCapability>) -> Generation {
    // Where no kernel runs, the build says so.
    let of_device = |compute| {
        KernelTarget::of(compute).map_or(Generation::Portable, |target| target.generation)
    };
    compute.map_or(Generation::Hopper, of_device)
}

/// The legal plans of `problem` on `comm`, the fastest by the cost model first.
pub fn ranked_plans(comm: &Communicator, problem: &Problem) -> Vec<Plan> {
    Plan::ranked(problem, &whole_target(comm))
}

/// Modelled time in ns of a call of the fastest legal plan of `problem` on `comm`, infinite where
/// none is legal. A problem of one rank is its GEMM alone.
pub fn modelled_ns(comm: &Communicator, problem: &Problem) -> f64 {
    let whole = whole_target(comm);
    let nodes = if problem.world() == comm.world_size() {
        whole.nodes
    } else {
        Nodes::apart(problem.world())
    };
    let target = Target { nodes, ..whole };
    let fastest = Plan::ranked(problem, &target).into_iter().next();
    fastest.map_or(f64::INFINITY, |plan| plan.cost_ns(problem, &target))
}

fn links(capabilities: &Capabilities) -> Links {
    match (capabilities.mover, capabilities.peer_stores) {
        (Mover::Messages { channels, .. }, _) => Links::Messages(channels),
        (_, PeerStores::All) => Links::PeerMemory,
        _ => Links::HostStaged,
    }
}

/// The key of a problem's rows on `comm`.
pub(crate) fn key(comm: &Communicator, problem: &Problem, batch_invariant: bool) -> PlanKey {
    let device = comm.device();
    let generation = generation(device.info().map(|info| info.compute));
    let key = PlanKey::new(
        problem,
        device.name(),
        generation,
        driver(device.name()),
        comm.transport().name(),
    );
    PlanKey { batch_invariant, ..key }
}

/// This rank's choice for one `m` where the caller names no plan, by `user`'s rows, the shipped
/// ones or the model.
///
/// # Errors
/// [`BuildError::NoPlan`] where no plan is legal for the problem, and
/// [`BuildError::NoInvariantPlan`] where none has one order of sums.
pub(crate) fn own_choice(
    comm: &Communicator,
    problem: &Problem,
    spec: &OpSpec,
    user: &UserTable,
) -> Result<Choice, BuildError> {
    let target = target(comm, spec)?;
    let tables = [(TableKind::User, user.rows()), (TableKind::Shipped, shipped())];
    let chosen = choose(problem, &target, &key(comm, problem, spec.batch_invariant), &tables);
    let nodes = target.nodes;
    let none = || match problem.op().sums_to() {
        SumsTo::All if nodes.are_mixed() => ScheduleError::AllReduceNodes { nodes }.into(),
        _ if spec.batch_invariant => {
            BuildError::NoInvariantPlan { problem: *problem, transport: comm.transport() }
        }
        _ => {
            let (numerics, generation) = (problem.numerics(), target.machine.generation);
            match comm.device().info() {
                Some(info) if !generation.multiplies(numerics) => {
                    no_numerics(numerics, info, generation)
                }
                _ => BuildError::NoPlan { problem: *problem },
            }
        }
    };
    let (plan, origin) = chosen.ok_or_else(none)?;
    Ok(Choice { plan, sms: target.machine.multiprocessors, origin })
}

/// The kernel of a device does not multiply such operands.
fn no_numerics(numerics: Numerics, info: &DeviceInfo, generation: Generation) -> BuildError {
    let device = format!("{} of compute capability {}", info.name, info.compute);
    BuildError::NoNumerics { numerics, device, generation }
}

/// Choices that were made on a communicator: a model has many layers of one shape.
#[derive(Debug, Default)]
struct Chosen(Mutex<Vec<ChosenFor>>);

/// The choices, and all that they follow from.
#[derive(Debug)]
struct ChosenFor {
    largest: Problem,
    sm_margin: u32,
    batch_invariant: bool,
    user: Arc<UserTable>,
    buckets: Buckets,
}

/// This rank's choices for all `m` up to `largest`'s.
///
/// # Errors
/// As [`own_choice`].
pub(crate) fn own_choices(
    comm: &Communicator,
    largest: &Problem,
    spec: &OpSpec,
    user: &Arc<UserTable>,
) -> Result<Buckets, BuildError> {
    let (sm_margin, batch_invariant) = (spec.launch.sm_margin, spec.batch_invariant);
    let chosen = comm.attachment(Chosen::default);
    let mut chosen = chosen.0.lock().unwrap_or_else(PoisonError::into_inner);
    let known = chosen.iter().find(|known| {
        (&known.largest, known.sm_margin, known.batch_invariant)
            == (largest, sm_margin, batch_invariant)
            && Arc::ptr_eq(&known.user, user)
    });
    if let Some(known) = known {
        return Ok(known.buckets.clone());
    }
    let buckets = choices(comm, largest, spec, user)?;
    // What an earlier reading of the same file led to is not asked for again.
    chosen.retain(|known| known.user.path != user.path || Arc::ptr_eq(&known.user, user));
    chosen.push(ChosenFor {
        largest: *largest,
        sm_margin,
        batch_invariant,
        user: Arc::clone(user),
        buckets: buckets.clone(),
    });
    Ok(buckets)
}

fn choices(
    comm: &Communicator,
    largest: &Problem,
    spec: &OpSpec,
    user: &UserTable,
) -> Result<Buckets, BuildError> {
    let key = key(comm, largest, spec.batch_invariant);
    let ends = bucket_ends(largest.m(), &key, &[user.rows(), shipped()]);
    // A table that was edited by hand may have an `m` that the ranks cannot split.
    let problems = ends.into_iter().filter_map(|end| largest.with_m(end).ok());
    let bucket = |problem: Problem| {
        Ok(Bucket { last: problem.m(), choice: own_choice(comm, &problem, spec, user)? })
    };
    problems.map(bucket).collect::<Result<_, _>>().map(Buckets::new)
}

/// The driver's version as tables have it: of CUDA for a GPU, `host` for the host.
fn driver(device: &str) -> &'static str {
    static DRIVER: OnceLock<String> = OnceLock::new();
    let version = || {
        flux_cuda::driver_version()
            .map_or_else(|_| "unknown".to_owned(), |version| version.to_string())
    };
    if device == HOST { HOST } else { DRIVER.get_or_init(version) }
}

/// Name of the host as a device, and its driver's.
const HOST: &str = "host";

fn shipped() -> &'static PlanTable {
    static SHIPPED: OnceLock<PlanTable> = OnceLock::new();
    SHIPPED.get_or_init(PlanTable::shipped)
}

/// The plan table in `file`, or the user's: its path and how many rows serve the device with this
/// name and compute capability (`host` and none for the host), or why it is ignored.
pub fn explain_plan_table(
    file: Option<&Path>,
    device: &str,
    compute: Option<ComputeCapability>,
) -> String {
    UserTable::at(file, false).explain(device, generation(compute))
}
