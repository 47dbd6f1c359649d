//! Why ranks did not meet. Whatever one rank did wrong, all get the same variant, naming both
//! sides.

use std::io;
use std::path::PathBuf;

use flux_core::{Rank, WorldSize};

use super::names::{FLUX_SECRET, FLUX_SECRET_FILE};
use crate::bootstrap::control::{ranks, ranks_of};

/// Why the ranks did not meet.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum BootstrapError {
    /// The environment names no launcher.
    #[error(
        "no launcher's variables are set, or FLUX_LAUNCHER is none: start with `flux-bench launch \
         --ranks N -- PROGRAM`, torchrun, srun or mpirun, or take World::local or World::builder"
    )]
    NoLauncher,
    /// Some variables of a launcher's family are set and others are not.
    #[error("half a launcher: {} set, {} not set; set all or none of them, or FLUX_LAUNCHER=none \
             where this process is no rank of a launch", listed(.set), .missing.join(", "))]
    HalfSet {
        set: Vec<&'static str>,
        /// The variables of the same family that are not.
        missing: Vec<&'static str>,
    },
    /// A variable does not hold what it should.
    #[error("{variable} = {value:?} is not {wanted}")]
    Variable { variable: &'static str, value: String, wanted: String },
    /// Two launchers say different things of this process.
    #[error(
        "{first} and {second}: unset the variables of one of them, or name the one that counts in \
         FLUX_LAUNCHER, or none"
    )]
    Disagreement {
        /// What the one says, with the names of its variables.
        first: String,
        second: String,
    },
    /// The ranks are on several hosts, and it is not said where to meet.
    #[error(
        "the ranks are on several hosts and {launcher} does not say where rank 0 is: set \
         FLUX_RENDEZVOUS=tcp://HOST:PORT on all of them, with an address of rank 0's host and a \
         port that is free there"
    )]
    NoAddress { launcher: &'static str },
    /// The place where rank 0 is to listen does not do.
    #[error("{address}: {problem}")]
    Address {
        address: String,
        /// What is wrong with it, and what it should be.
        problem: String,
    },
    /// The ranks are on several hosts, and they have no secret.
    #[error(
        "ranks on several hosts need a secret that they share, as anybody can connect to rank 0: \
         set FLUX_SECRET_FILE to a file of mode 0600 (its content for example of `head -c 32 \
         /dev/urandom | base64`) or FLUX_SECRET, the same on all hosts"
    )]
    NoSecret,
    /// The secret does not do.
    #[error("{origin}: {problem}")]
    Secret {
        /// The variable or file that it comes from.
        origin: String,
        problem: String,
    },
    /// Rank 0 has another secret.
    #[error(
        "rank 0, at {address}, has another secret than this rank: {} or the content of {} differs",
        FLUX_SECRET,
        FLUX_SECRET_FILE
    )]
    SecretDiffers { address: String },
    /// A rank went away after all had come.
    #[error("rank {rank} went away while {step}")]
    Lost { rank: Rank, step: &'static str },
    /// The rendezvous directory is not a private directory of this user.
    #[error("rendezvous directory {}: {problem}", .path.display())]
    Directory {
        path: PathBuf,
        /// What is wrong with it, and what it should be.
        problem: String,
    },
    /// The path of the rendezvous socket does not fit into a socket address.
    #[error(
        "the path of the rendezvous socket, {}, has {length} bytes, the limit is {limit}: {}",
        .path.display(),
        shorter(*.variable)
    )]
    PathTooLong {
        path: PathBuf,
        /// The variable that names the directory; the caller does where there is none.
        variable: Option<&'static str>,
        length: usize,
        /// The most bytes it may have.
        limit: usize,
    },
    /// Two processes were started with the same rank.
    #[error(
        "rank {rank} was started twice: process {first} and process {second}{}",
        apart(*first, *second)
    )]
    DuplicateRank {
        rank: Rank,
        /// Process id of the first, as it sees itself.
        first: u32,
        /// Process id of the second, as it sees itself.
        second: u32,
    },
    /// A rank was started for another world size than rank 0.
    #[error("rank {rank} was started with a world size of {world}, rank 0 with {expected}")]
    WorldMismatch { rank: Rank, world: u32, expected: u32 },
    /// A rank runs another version of this library than rank 0.
    #[error("rank {rank} runs flux {version}, rank 0 runs {expected}")]
    VersionMismatch {
        rank: Rank,
        /// Its version, with the protocol's where that differs.
        version: String,
        expected: String,
    },
    /// The socket belongs to another launch.
    #[error("the rendezvous socket belongs to another launch than rank {rank}'s")]
    OtherLaunch { rank: Rank },
    /// Not all ranks came before the deadline.
    #[error(
        "the deadline passed while {step}; not seen: {}{}{}",
        ranks(missing),
        strangers(*denied),
        sought.as_ref().map(|at| format!("; {at}")).unwrap_or_default()
    )]
    Timeout {
        step: &'static str,
        missing: Vec<Rank>,
        /// Connections to rank 0 without the right secret.
        denied: u32,
        /// Where this rank looked for its leader, and what it found last; `None` once it has met
        /// it.
        sought: Option<String>,
    },
    /// The rank that connects the others could not, for a reason of its own.
    #[error("rank {rank} could not connect the ranks: {source}")]
    Leader {
        /// Rank 0, or the first of a host.
        rank: Rank,
        source: io::Error,
    },
    /// A rank cannot be met.
    #[error("rank {rank} cannot be met: {reason}")]
    Peer {
        rank: Rank,
        /// What it says.
        reason: String,
    },
    /// The program's own rendezvous failed.
    #[error("the rendezvous failed: {source}")]
    Rendezvous { source: Box<dyn std::error::Error + Send + Sync> },
    /// Rank 0 sent what this version does not send.
    #[error("protocol error: {0}")]
    Protocol(String),
    /// A system call failed.
    #[error("{step}: {source}")]
    Io { step: &'static str, source: io::Error },
}

flux_core::debug_is_text!(BootstrapError);

impl BootstrapError {
    /// Wraps a system call's error with what was being done.
    pub(crate) fn io(step: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { step, source: errno.into() }
    }
}

/// The variables that are set; where `FLUX_LAUNCHER` names a launcher, there may be none.
fn listed(set: &[&str]) -> String {
    if set.is_empty() { "none of its variables is".to_owned() } else { set.join(", ") }
}

/// What equal process ids of one rank's two processes mean.
fn apart(first: u32, second: u32) -> &'static str {
    if first == second {
        "; one process took the rank twice, or two PID namespaces have such a process. Two \
         launches with equal variables and one temporary folder need a FLUX_RENDEZVOUS each"
    } else {
        ""
    }
}

/// How to have a shorter path.
fn shorter(variable: Option<&str>) -> String {
    variable.map_or_else(
        || "use a shorter directory".to_owned(),
        |variable| format!("set {variable} to a directory with a shorter path"),
    )
}

fn strangers(denied: u32) -> String {
    match denied {
        0 => String::new(),
        1 => " (1 connection did not know the secret)".to_owned(),
        _ => format!(" ({denied} connections did not know the secret)"),
    }
}

/// The ranks (bits) of a world that a peer has named, which may name others, too.
pub(crate) fn ranks_in(mask: u32, world: WorldSize) -> Vec<Rank> {
    ranks_of(mask).filter(|rank| rank.get() < world.get()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_process_ids_of_a_rank_started_twice_name_the_namespaces_and_the_remedy() {
        let said = |second| {
            BootstrapError::DuplicateRank { rank: Rank::new(2), first: 1, second }.to_string()
        };
        assert_eq!(said(7), "rank 2 was started twice: process 1 and process 7");
        assert!(
            said(1).contains("PID namespaces") && said(1).ends_with("need a FLUX_RENDEZVOUS each"),
            "{}",
            said(1)
        );
    }
}
