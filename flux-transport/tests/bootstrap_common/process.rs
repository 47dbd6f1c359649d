//! Ranks that are processes: this test's own program again, told by `FLUX_TEST_ROLE` what to be.

use crate::lateness;
use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

pub(crate) const ROLE: &str = "FLUX_TEST_ROLE";

/// The role of this process, if it has one.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// A process of this program that runs `as_the_role_says`, with a role and only a launcher's
/// variables.
pub(crate) fn command(
    role: &str,
    runtime: &Path,
    variables: &[(&'static str, OsString)],
) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let families = [
        "FLUX_",
        "OMPI_",
        "PMIX_",
        "PMI_",
        "MPI_",
        "SLURM_",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "MASTER_",
    ];
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| families.iter().any(|family| name.starts_with(family)))
        {
            command.env_remove(name);
        }
    }
    command
        .args(["--ignored", "--exact", "as_the_role_says", "--nocapture"])
        .env("XDG_RUNTIME_DIR", runtime);
    command
        .env(ROLE, role)
        .env(lateness::VARIABLE, lateness::of_process().to_string())
        .envs(variables.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The processes' ends, by rank; each must be a success.
pub(crate) fn succeed(children: Vec<Child>) {
    let ends: Vec<Output> =
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
    // A program that ran nothing is a success too.
    let succeeded = |end: &Output| {
        end.status.success() && String::from_utf8_lossy(&end.stdout).contains("1 passed")
    };
    let failed: Vec<_> = ends.iter().enumerate().filter(|(_, end)| !succeeded(end)).collect();
    let said: Vec<_> = failed
        .iter()
        .map(|(rank, end)| {
            format!("rank {rank}: {}\n{}", end.status, String::from_utf8_lossy(&end.stderr))
        })
        .collect();
    assert!(failed.is_empty(), "{}", said.join("\n"));
}
