//! Why the ranks of a launch did not start.

use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use flux_core::{Rank, WorldSize};

/// Why the ranks did not start.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum LaunchError {
    /// There are not as many ranks as hosts.
    #[error(
        "{ranks} ranks cannot be kept apart as those of {hosts} hosts: give 1 to {ranks} hosts"
    )]
    Hosts {
        /// The hosts that were asked for.
        hosts: u32,
        ranks: WorldSize,
    },
    /// There is no room for the rendezvous.
    #[error("cannot make a private directory in {}: {source}", .within.display())]
    Directory { within: PathBuf, source: io::Error },
    /// A rank's log cannot be written.
    #[error("cannot write the log {}: {source}", .path.display())]
    Log { path: PathBuf, source: io::Error },
    /// The program does not start.
    #[error("cannot start {program:?} as rank {rank}: {source}")]
    Start { program: OsString, rank: Rank, source: io::Error },
    /// The launcher cannot look after its ranks.
    #[error("{step} failed: {source}")]
    Io { step: &'static str, source: io::Error },
}

flux_core::debug_is_text!(LaunchError);
