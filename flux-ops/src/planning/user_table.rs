//! The user's table of measured plans, as this process has read it.

use crate::table_file::{self, TableFileError};
use flux_core::plan::{PlanRow, PlanTable};
use flux_core::tile::Generation;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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

    /// The file and how many of its rows serve a device with this name and kernel, or why it is
    /// ignored.
    pub(crate) fn explain(&self, device: &str, generation: Generation) -> String {
        let Some(path) = &self.path else { return TableFileError::NoPath.to_string() };
        let of_device =
            |row: &&PlanRow| (row.key.device.as_str(), row.key.generation) == (device, generation);
        let serves = |row: &&PlanRow| {
            of_device(row) && [super::driver(device), "any"].contains(&row.key.driver.as_str())
        };
        match &self.table {
            Ok(None) => format!("{}: no file yet", path.display()),
            Ok(Some(table)) => {
                let (all, serving) =
                    (table.rows().len(), table.rows().iter().filter(serves).count());
                format!(
                    "{}: {serving} of {all} rows are for {device} with kernel {generation} and \
                     driver {}",
                    path.display(),
                    super::driver(device)
                )
            }
            Err(error) => format!("ignored: {error}"),
        }
    }
}
