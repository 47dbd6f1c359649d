//! The families of variables that launchers set.
//!
//! Invariant: a family is complete or refused. What it says of the launch is the same on all ranks.

use std::ffi::OsString;

use flux_core::WorldSize;

use super::variables::Variables;
use super::{ancestor, nodelist};
use crate::bootstrap::error::BootstrapError;

/// What a launcher says of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    pub(super) rank: u32,
    pub(super) world: WorldSize,
    pub(super) local_rank: u32,
    pub(super) one_host: bool,
    /// An address of rank 0's host, where it is known.
    pub(super) rank_zero: Option<String>,
    /// Tells this launch from others of the user.
    pub(super) launch: Vec<OsString>,
}

pub(super) struct LauncherFamily {
    pub(super) name: &'static str,
    /// Its variables of rank and world size, for messages.
    pub(super) says: [&'static str; 2],
    pub(super) is_there: fn(&Variables<'_>) -> bool,
    pub(super) read: fn(&Variables<'_>) -> Result<Placement, BootstrapError>,
}

/// Launchers in the order in which they are asked. Where two are present, they must agree.
pub(super) const LAUNCHERS: [LauncherFamily; 3] = [
    LauncherFamily {
        name: "torchrun",
        says: ["RANK", "WORLD_SIZE"],
        // `MASTER_*` alone are often part of a container's environment.
        is_there: |vars| vars.any(&["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]),
        read: torchrun,
    },
    LauncherFamily {
        name: "openmpi",
        says: ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        is_there: |vars| vars.any(&OPEN_MPI),
        read: open_mpi,
    },
    LauncherFamily {
        name: "mpich",
        says: ["PMI_RANK", "PMI_SIZE"],
        // srun sets the first two for MPI's sake, and says the rest in its own way.
        is_there: |vars| {
            vars.any(&MPICH[2..]) || (vars.any(&MPICH[..2]) && !(SLURM_FAMILY.is_there)(vars))
        },
        read: mpich,
    },
];

/// Asked last and never contradicted: launchers inside a Slurm job inherit its variables.
pub(super) const SLURM_FAMILY: LauncherFamily = LauncherFamily {
    name: "slurm",
    says: ["SLURM_PROCID", "SLURM_NTASKS"],
    is_there: slurm_step,
    read: slurm,
};

const TORCHRUN: [&str; 6] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];
const OPEN_MPI: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];
const MPICH: [&str; 4] = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"];
const SLURM: [&str; 5] =
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"];
/// Of any of these Open MPI sets one, by version.
const OPEN_MPI_JOBS: [&str; 3] =
    ["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid"];
const MASTER: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

fn torchrun(vars: &Variables<'_>) -> Result<Placement, BootstrapError> {
    vars.all(&TORCHRUN)?;
    let world = vars.world("WORLD_SIZE")?;
    let local = vars.part_of("LOCAL_WORLD_SIZE", world, "WORLD_SIZE")?;
    let local_rank = vars.below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE")?;
    let rank = vars.below("RANK", world.get(), "WORLD_SIZE")?;
    let one_host = local == world.get();
    let mut launch: Vec<OsString> =
        ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"].map(|name| vars.value(name)).into();
    if one_host {
        // Each agent counts the restarts of its own node, so the count names a launch of one agent
        // only. Ranks of several agents start when all agents have ended the ranks before.
        launch.push(vars.value("TORCHELASTIC_RESTART_COUNT"));
    }
    Ok(Placement {
        rank,
        world,
        local_rank,
        one_host,
        rank_zero: Some(vars.host("MASTER_ADDR")?),
        launch,
    })
}

fn open_mpi(vars: &Variables<'_>) -> Result<Placement, BootstrapError> {
    vars.all(&OPEN_MPI)?;
    let mut placement = mpi(vars, OPEN_MPI)?;
    placement.launch.extend(OPEN_MPI_JOBS.map(|name| vars.value(name)));
    Ok(placement)
}

fn mpich(vars: &Variables<'_>) -> Result<Placement, BootstrapError> {
    vars.all(&MPICH)?;
    let mut placement = mpi(vars, MPICH)?;
    if placement.one_host {
        // It names no job; but the ranks of a host are children of one process.
        placement.launch.push(ancestor::outside("PMI_RANK").into());
    }
    Ok(placement)
}

/// mpirun does not say where rank 0 is; PyTorch users set `MASTER_ADDR` and `MASTER_PORT`.
fn mpi(
    vars: &Variables<'_>,
    [rank, size, local_rank, local_size]: [&'static str; 4],
) -> Result<Placement, BootstrapError> {
    let world = vars.world(size)?;
    let local = vars.part_of(local_size, world, size)?;
    let local_rank = vars.below(local_rank, local, local_size)?;
    let rank = vars.below(rank, world.get(), size)?;
    let master = MASTER.iter().all(|name| vars.is_set(name));
    let rank_zero = if master { Some(vars.host("MASTER_ADDR")?) } else { None };
    Ok(Placement {
        rank,
        world,
        local_rank,
        one_host: local == world.get(),
        rank_zero,
        launch: MASTER.map(|name| vars.value(name)).into(),
    })
}

/// Whether srun started this process. A batch script has a rank but no step; an interactive shell
/// has a reserved step number.
fn slurm_step(vars: &Variables<'_>) -> bool {
    const RESERVED: u32 = 0xffff_fff0;
    let step = vars.value("SLURM_STEP_ID");
    vars.is_set("SLURM_PROCID")
        && vars.is_set("SLURM_STEP_ID")
        && step.to_str().and_then(|step| step.parse().ok()).is_none_or(|step: u32| step < RESERVED)
}

fn slurm(vars: &Variables<'_>) -> Result<Placement, BootstrapError> {
    vars.all(&SLURM)?;
    let world = vars.world("SLURM_NTASKS")?;
    let rank = vars.below("SLURM_PROCID", world.get(), "SLURM_NTASKS")?;
    let local_rank = vars.below("SLURM_LOCALID", world.get(), "SLURM_NTASKS")?;
    // The step's, which may be on fewer nodes than its job.
    let [nodes, list] =
        [["SLURM_STEP_NUM_NODES", "SLURM_NNODES"], ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]]
            .map(|[step, job]| if vars.is_set(job) && !vars.is_set(step) { job } else { step });
    vars.all(&[&SLURM[..], &[nodes]].concat())?;
    let one_host = vars.number(nodes)? == 1;
    let rank_zero = if one_host {
        None
    } else {
        vars.all(&[&SLURM[..], &[nodes, list]].concat())?;
        // Tasks are dealt to the nodes from the first one on, block by block or one by one.
        Some(
            nodelist::first(&vars.text(list)?)
                .ok_or_else(|| vars.wrong(list, "a list of nodes"))?,
        )
    };
    let launch = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"]
        .map(|name| vars.value(name))
        .into();
    Ok(Placement { rank, world, local_rank, one_host, rank_zero, launch })
}
