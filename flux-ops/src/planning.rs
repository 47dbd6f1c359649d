//! Which plan an op has: what its caller names, a measured one, or the cost model's.
//!
//! Invariant: every rank makes a choice, and all take rank 0's. What a schedule is derived from
//! beside the plan, the SM count, is part of the choice.

use crate::error::BuildError;
use crate::table_file::{self, TableFileError};
use flux_core::machine::Machine;
use flux_core::plan::{Links, PLAN_BYTES, Plan, PlanKey, PlanOrigin, PlanRow, PlanTable, TableKind, Target, choose};
use flux_core::program::ScheduleError;
use flux_core::tile::Generation;
use flux_core::{OpKind, Problem};
use flux_kernels::KernelTarget;
use flux_transport::{Capabilities, Communicator, Mover, PeerStores};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Bytes of a [`Choice`] as ranks exchange it: the plan, the SM count, and the origin with its `m`.
pub(crate) const CHOICE_BYTES: usize = PLAN_BYTES + 9;

/// A plan with what its schedule is derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) plan: Plan,
    /// SMs that stream-K counts with, on all ranks.
    pub(crate) sms: u32,
    pub(crate) origin: PlanOrigin,
}

impl Choice {
    pub(crate) fn to_bytes(self) -> [u8; CHOICE_BYTES] {
        let (origin, m) = match self.origin {
            PlanOrigin::Caller => (1, 0),
            PlanOrigin::Model => (2, 0),
            PlanOrigin::Table(TableKind::User) => (3, 0),
            PlanOrigin::Table(TableKind::Shipped) => (4, 0),
            PlanOrigin::Neighbour { table: TableKind::User, m } => (5, m),
            PlanOrigin::Neighbour { table: TableKind::Shipped, m } => (6, m),
        };
        let mut bytes = [0; CHOICE_BYTES];
        let (plan, rest) = bytes.split_at_mut(PLAN_BYTES);
        plan.copy_from_slice(&self.plan.to_bytes());
        rest[..4].copy_from_slice(&self.sms.to_le_bytes());
        rest[4..8].copy_from_slice(&m.to_le_bytes());
        rest[8] = origin;
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (plan, rest) = bytes.split_first_chunk::<PLAN_BYTES>()?;
        let &[a, b, c, d, m @ .., origin] = <&[u8; 9]>::try_from(rest).ok()?;
        let (sms, m) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(m));
        let origin = match origin {
            1 => PlanOrigin::Caller,
            2 => PlanOrigin::Model,
            3 => PlanOrigin::Table(TableKind::User),
            4 => PlanOrigin::Table(TableKind::Shipped),
            5 => PlanOrigin::Neighbour { table: TableKind::User, m },
            6 => PlanOrigin::Neighbour { table: TableKind::Shipped, m },
            _ => return None,
        };
        Some(Self { plan: Plan::from_bytes(plan).ok()?, sms, origin })
    }
}

/// What plans are chosen for on `comm`. On the host transport it is an H100's: the same plans are
/// tried there as on GPUs.
pub(crate) fn target(comm: &Communicator) -> Target {
    let device = comm.device();
    let machine = device.info().map_or(Machine::H100, |info| {
        // Where no kernel runs, the build says so.
        let generation = KernelTarget::of(info.compute).map_or(Generation::Portable, |target| target.generation);
        Machine::of_gpu(&info.name, info.sms).running(generation)
    });
    let links = links(&comm.capabilities());
    let machine = if links == Links::HostStaged { machine.staged(comm.world_size().get()) } else { machine };
    Target { machine, nodes: comm.nodes(), links }
}

/// The legal plans of `problem` on `comm`, the fastest by the cost model first.
pub fn ranked_plans(comm: &Communicator, problem: &Problem) -> Vec<Plan> {
    Plan::ranked(problem, &target(comm))
}

fn links(capabilities: &Capabilities) -> Links {
    match (capabilities.mover, capabilities.peer_stores) {
        (Mover::Messages { channels }, _) => Links::Messages(channels),
        (_, PeerStores::All) => Links::PeerMemory,
        _ => Links::HostStaged,
    }
}

/// The key of a problem's rows on `comm`.
pub(crate) fn key(comm: &Communicator, problem: &Problem) -> PlanKey {
    let device = comm.device();
    PlanKey::new(problem, device.name(), driver(device.name()), comm.transport().name())
}

/// This rank's choice where the caller names no plan, by `user`'s rows, the shipped ones or the
/// model.
///
/// # Errors
/// [`BuildError::NoPlan`] where no plan is legal for the problem.
pub(crate) fn own_choice(comm: &Communicator, problem: &Problem, user: &UserTable) -> Result<Choice, BuildError> {
    let target = target(comm);
    let tables = [(TableKind::User, user.rows()), (TableKind::Shipped, shipped())];
    let chosen = choose(problem, &target, &key(comm, problem), &tables, false);
    let nodes = target.nodes;
    let none = || match problem.op() {
        OpKind::GemmAllReduce if nodes.are_mixed() => ScheduleError::AllReduceNodes { nodes }.into(),
        _ => BuildError::NoPlan { problem: *problem },
    };
    let (plan, origin) = chosen.ok_or_else(none)?;
    Ok(Choice { plan, sms: target.machine.multiprocessors, origin })
}

/// The driver's version as tables have it: of CUDA for a GPU, `host` for the host.
fn driver(device: &str) -> &'static str {
    static DRIVER: OnceLock<String> = OnceLock::new();
    let version = || flux_transport::internal::cuda::driver_version().map_or_else(|_| "unknown".to_owned(), |version| version.to_string());
    if device == HOST { HOST } else { DRIVER.get_or_init(version) }
}

/// Name of the host as a device, and its driver's.
const HOST: &str = "host";

fn shipped() -> &'static PlanTable {
    static SHIPPED: OnceLock<PlanTable> = OnceLock::new();
    SHIPPED.get_or_init(PlanTable::shipped)
}

/// The user's table as this process has read it.
#[derive(Debug)]
pub(crate) struct UserTable {
    pub(crate) path: Option<PathBuf>,
    /// `None` where there is no file yet.
    table: Result<Option<PlanTable>, TableFileError>,
}

/// By path, so that each file is read once.
static READ: Mutex<Option<HashMap<Option<PathBuf>, Arc<UserTable>>>> = Mutex::new(None);

impl UserTable {
    /// The table at `path`, or where the environment has it; read at the first use, and again if
    /// `anew`.
    pub(crate) fn at(path: Option<&Path>, anew: bool) -> Arc<Self> {
        let path = path.map(Path::to_owned).or_else(table_file::path_from_env);
        let mut read = READ.lock().unwrap_or_else(PoisonError::into_inner);
        let read = read.get_or_insert_default();
        if let Some(known) = read.get(&path).filter(|_| !anew) {
            return Arc::clone(known);
        }
        let table = path.as_deref().map_or(Ok(None), table_file::read);
        if let Err(error) = &table {
            tracing::warn!(%error, "the plan table is ignored");
        }
        let table = Arc::new(Self { path: path.clone(), table });
        read.insert(path, Arc::clone(&table));
        table
    }

    pub(crate) fn rows(&self) -> &PlanTable {
        static NONE: OnceLock<PlanTable> = OnceLock::new();
        match &self.table {
            Ok(Some(table)) => table,
            _ => NONE.get_or_init(PlanTable::default),
        }
    }

    /// Adds a row to the file.
    pub(crate) fn add(&self, row: &PlanRow) -> Result<(), TableFileError> {
        table_file::add(self.path.as_deref().ok_or(TableFileError::NoPath)?, row)
    }

    /// Whether [`add`](Self::add) can write.
    pub(crate) fn check(&self) -> Result<(), TableFileError> {
        table_file::check(self.path.as_deref().ok_or(TableFileError::NoPath)?)
    }

    /// The file and how many of its rows serve a device with this name, or why it is ignored.
    pub(crate) fn explain(&self, device: &str) -> String {
        let Some(path) = &self.path else { return TableFileError::NoPath.to_string() };
        let serves = |row: &&PlanRow| row.key.device == device && [driver(device), "any"].contains(&row.key.driver.as_str());
        match &self.table {
            Ok(None) => format!("{}: no file yet", path.display()),
            Ok(Some(table)) => {
                let (all, serving) = (table.rows().len(), table.rows().iter().filter(serves).count());
                format!("{}: {serving} of {all} rows are for {device} with driver {}", path.display(), driver(device))
            }
            Err(error) => format!("ignored: {error}"),
        }
    }
}

/// The plan table in `file`, or the user's: its path and how many rows serve the device with this
/// name (`host` for the host), or why it is ignored.
pub fn explain_plan_table(file: Option<&Path>, device: &str) -> String {
    UserTable::at(file, false).explain(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_exchanged_whole_and_other_bytes_are_none() {
        let plan: Plan = "tile=128x256x64 rows=per-shard:2 k=stream-k chunk=1".parse().unwrap();
        let of_table = |table| [PlanOrigin::Table(table), PlanOrigin::Neighbour { table, m: 77 }];
        let origins = [TableKind::User, TableKind::Shipped].map(of_table);
        for &origin in origins.as_flattened().iter().chain(&[PlanOrigin::Caller, PlanOrigin::Model]) {
            let choice = Choice { plan, sms: 114, origin };
            assert_eq!(Choice::from_bytes(&choice.to_bytes()), Some(choice));
        }
        for bytes in [&[][..], &[0; CHOICE_BYTES], &[1; CHOICE_BYTES - 1]] {
            assert_eq!(Choice::from_bytes(bytes), None);
        }
    }
}
