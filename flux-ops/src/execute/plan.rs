//! How one rank executes an op at one `m`: all that is decided of it, once.
//!
//! Invariant: executors obey it and decide nothing. What depends on the rank alone (workers, gaps
//! between stores, who pushes) may differ between ranks; it changes no result.

use super::location;
use super::pace::{SPREAD_PERCENT, in_flight_limit, pace, with_a_tile};
use super::sequential::Sequential;
use crate::error::BuildError;
use crate::planning::generation;
use crate::spec::LaunchOptions;
use crate::tensor::Location;
use flux_core::plan::{CommMode, Mover as PlanMover, Plan, ProgramBound};
use flux_core::program::route::Route;
use flux_core::program::{Round, Schedule, TileProgram, in_batches_of};
use flux_core::tile::Generation;
use flux_core::{Problem, SumsTo};
use flux_kernels::cuda::Pace;
use flux_transport::{Communicator, Device, Mover, PeerStores};
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::LazyLock;

/// CUDA of the driver that takes programmatic launches in captures, 12.3.
const CAPTURES_PROGRAMMATIC: u32 = 12_030;
/// Most worker threads of one rank.
const MAX_THREADS: u32 = 256;

/// What moves a call's data between ranks.
#[derive(Debug)]
pub(super) enum Traffic {
    /// Peer memory: what the kernel does not store itself, the transport's mover does.
    PeerMemory,
    /// Copies through memory of the host, beside the kernel.
    Staged(Route),
    /// The kernel, which scatters rows to memory of the host.
    ScatteredToHost,
    /// Messages beside the kernel, to so many peers at once.
    Messages { rounds: Vec<Round>, peers: u32 },
    /// One collective of the transport's library, before or after the kernel.
    Collective(Sequential),
}

/// Everything about one rank's calls but the program that they walk.
#[derive(Debug)]
pub(crate) struct ExecutionPlan {
    pub(super) problem: Problem,
    pub(super) traffic: Traffic,
    /// Whether the kernel carries out the program's transfers.
    pub(super) kernel_pushes: bool,
    /// Whether ranks compare the op on each other's pads; the transport compares elsewhere.
    pub(super) compares_on_pads: bool,
    /// CTAs or threads.
    pub(super) workers: u32,
    pub(super) pace: Pace,
    /// Whether a call's kernels begin while the launch ahead on the stream ends.
    pub(super) programmatic: bool,
}

impl ExecutionPlan {
    /// Resolves how this rank of `comm` executes `problem`, and the program that its calls walk.
    pub(crate) fn resolve(
        comm: &Communicator,
        problem: &Problem,
        plan: &Plan,
        schedule: &Schedule,
        options: LaunchOptions,
    ) -> Result<(Self, TileProgram), BuildError> {
        let (traffic, mut program) = traffic(comm, problem, plan, schedule)?;
        let mixed = comm.nodes().are_mixed();
        // What goes to the rank's own device first: stores for messages and for copies through the
        // host.
        let is_local = match &traffic {
            Traffic::Staged(_) | Traffic::Collective(_) => true,
            Traffic::Messages { .. } => !mixed,
            Traffic::PeerMemory | Traffic::ScatteredToHost => false,
        };
        if is_local {
            // Of rows that others carry the kernel keeps the own ones for itself.
            let own = program.rank.get();
            program.transfers.retain(|transfer| transfer.dest == own);
        }
        let kernel_pushes = match &traffic {
            Traffic::Messages { .. } if mixed => false,
            Traffic::ScatteredToHost => false,
            Traffic::PeerMemory => {
                program.rows.is_flattened()
                    || plan.comm != (CommMode::Fused { mover: PlanMover::CopyEngine })
            }
            Traffic::Staged(_) | Traffic::Messages { .. } | Traffic::Collective(_) => {
                !program.transfers.is_empty()
            }
        };
        let workers = workers(comm, &traffic, &program, options)?;
        let spread = if is_local { 0 } else { SPREAD_PERCENT };
        // The portable kernel has no limit, and does not begin early.
        let is_hopper =
            generation(comm.device().info().map(|info| info.compute)) == Generation::Hopper;
        let limited = is_hopper && matches!(traffic, Traffic::ScatteredToHost);
        let limit = if limited { in_flight_limit(&program, workers) } else { 0 };
        let pace = Pace { in_flight_limit: limit, ..pace(&program, workers, spread) };
        let compares_on_pads = matches!(traffic, Traffic::PeerMemory);
        // CTAs that begin early hold SMs while the call ahead waits for peers. So nobody else may
        // need these SMs: no rank on the same device, no messages, and nobody they are left to.
        let programmatic = is_hopper
            && matches!(traffic, Traffic::PeerMemory)
            && options.sm_margin == 0
            && !comm.shares_device()
            && flux_cuda::driver_version().is_ok_and(|version| version >= CAPTURES_PROGRAMMATIC);
        let plan = Self {
            problem: *problem,
            traffic,
            kernel_pushes,
            compares_on_pads,
            workers,
            pace,
            programmatic,
        };
        Ok((plan, program))
    }

    /// What calls of every `m` up to this one need, given what their programs do.
    pub(super) fn bound(&self, of_programs: ProgramBound) -> ProgramBound {
        match &self.traffic {
            Traffic::Collective(sequential) => ProgramBound {
                workspace: sequential.workspace(of_programs.workspace),
                ..of_programs
            },
            _ => of_programs,
        }
    }

    /// Gaps between what a worker stores to peers, in nanoseconds.
    fn gap_ns(&self) -> u32 {
        match (self.problem.op().sums_to(), &self.traffic) {
            (_, Traffic::Collective(_)) | (SumsTo::Nothing, Traffic::Messages { .. }) => 0,
            (SumsTo::Nothing, _) => self.pace.push_gap_ns,
            (SumsTo::Rows | SumsTo::All, _) => self.pace.send_gap_ns,
        }
    }
}

/// What moves the data of `problem`, and the program that goes with it.
fn traffic(
    comm: &Communicator,
    problem: &Problem,
    plan: &Plan,
    schedule: &Schedule,
) -> Result<(Traffic, TileProgram), BuildError> {
    let capabilities = comm.capabilities();
    let build = |rank| TileProgram::build_across(problem, rank, schedule, comm.nodes());
    let has_peers = problem.world().peers() > 0;
    if let Mover::Messages { collectives, .. } = capabilities.mover {
        if plan.comm == CommMode::Sequential && has_peers {
            if !collectives {
                return Err(BuildError::NoCollectives {
                    transport: comm.transport(),
                    op: problem.op(),
                });
            }
            let (sequential, program) = Sequential::new(problem, comm.rank(), schedule)?;
            return Ok((Traffic::Collective(sequential), program));
        }
        let program = build(comm.rank())?;
        let no_messages = || BuildError::NoMessages { transport: comm.transport(), plan: *plan };
        let rounds = program.rounds().ok_or_else(no_messages)?;
        let peers = if let CommMode::Overlapped { peers } = plan.comm { peers } else { u32::MAX };
        // Rows that are passed on to intra-node peers go in the order in which they come, as does
        // what the kernel stores.
        let in_batches = problem.op().gathers() && !program.nodes.are_mixed();
        let rounds = if in_batches { in_batches_of(&rounds, peers) } else { rounds };
        return Ok((Traffic::Messages { rounds, peers }, program));
    }
    if capabilities.peer_stores == PeerStores::All || !has_peers {
        return Ok((Traffic::PeerMemory, build(comm.rank())?));
    }
    let program = build(comm.rank())?;
    if capabilities.peer_stores == PeerStores::Rows && scatters_tile_by_tile(&program) {
        return Ok((Traffic::ScatteredToHost, program));
    }
    let mut programs = comm.world_size().ranks().map(build).collect::<Result<Vec<_>, _>>()?;
    let own = comm.rank().index();
    let route = Route::new(comm.rank(), &programs);
    Ok((Traffic::Staged(route), programs.swap_remove(own)))
}

/// Whether the program scatters rows that are announced tile by tile. A word that announces all
/// tiles would be polled in the host's memory by every CTA, one after another.
fn scatters_tile_by_tile(program: &TileProgram) -> bool {
    program.rows.is_flattened() && program.problem.op().reduces() && !program.scatters_at_once()
}

/// CTAs of the kernel, or threads of the CPU executor.
fn workers(
    comm: &Communicator,
    traffic: &Traffic,
    program: &TileProgram,
    options: LaunchOptions,
) -> Result<u32, BuildError> {
    let place = location(comm);
    let (own, max) = match comm.device() {
        Device::Cuda { info, .. } => {
            // Messages need multiprocessors of their own while the kernel waits for them.
            let taken = match (traffic, comm.capabilities().mover) {
                (Traffic::Messages { rounds, peers }, Mover::Messages { channels, .. }) => {
                    channels.of(rounds, *peers)
                }
                _ => 0,
            };
            let free = info.sms.saturating_sub(taken).saturating_sub(options.sm_margin).max(1);
            (with_a_tile(program, free), free)
        }
        _ => (share_of_cores(comm.world_size().index()), MAX_THREADS),
    };
    match options.workers {
        Some(value) if !(1..=max).contains(&value) => {
            Err(BuildError::Workers { value, max, place })
        }
        Some(value) if place == Location::Host => Ok(value),
        Some(value) => Ok(with_a_tile(program, value)),
        None => Ok(own),
    }
}

/// Ranks share this machine's cores.
pub(super) fn share_of_cores(ranks: usize) -> u32 {
    // To count them reads files.
    static CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get));
    u32::try_from(*CORES / ranks.max(1)).unwrap_or(MAX_THREADS).clamp(1, MAX_THREADS)
}

impl ExecutionPlan {
    /// What executes the op by `kernel`, for people.
    pub(super) fn execution(&self, kernel: String) -> Execution {
        let limit = self.pace.in_flight_limit;
        let mover = match &self.traffic {
            Traffic::PeerMemory if self.kernel_pushes => {
                "the kernel stores into peers' memory".to_owned()
            }
            Traffic::PeerMemory => {
                "copy engines push the shard (the kernel once a call was captured)".to_owned()
            }
            Traffic::Staged(_) => "copies through memory of the host".to_owned(),
            Traffic::ScatteredToHost if limit > 0 => {
                format!("the kernel scatters rows to memory of the host, {limit} CTAs at once")
            }
            Traffic::ScatteredToHost => "the kernel scatters rows to memory of the host".to_owned(),
            Traffic::Messages { peers: u32::MAX, .. } => {
                "messages to all peers at once beside the kernel".to_owned()
            }
            Traffic::Messages { peers, .. } => {
                format!("messages to {peers} peers at once beside the kernel")
            }
            Traffic::Collective(sequential) => sequential.to_string(),
        };
        Execution { kernel, workers: self.workers, mover, gap_ns: self.gap_ns() }
    }
}

/// What executes an op on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Execution {
    /// The kernel and its device, or the CPU executor.
    pub kernel: String,
    /// CTAs, or threads.
    pub workers: u32,
    /// What moves data between ranks.
    pub mover: String,
    /// Gaps between what a worker stores to peers, in nanoseconds.
    pub gap_ns: u32,
}

impl fmt::Display for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, workers, mover, gap_ns } = self;
        write!(f, "{kernel}, {workers} workers, {mover}, gaps of {gap_ns} ns")
    }
}
