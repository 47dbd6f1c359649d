//! What the ranks of a run were, and where.
//!
//! Invariant: all ranks find the same. Files without it are of threads.

use crate::machine::Ranks;
use flux_transport::{Communicator, Launch, World};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// What the ranks were and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// What a rank was.
    #[serde(default)]
    pub ranks: Ranks,
    /// Hosts, as the ranks see them.
    #[serde(default = "one")]
    pub hosts: u32,
    /// Machines: fewer than hosts where a test keeps ranks apart.
    #[serde(default = "one")]
    pub machines: u32,
}

const fn one() -> u32 {
    1
}

impl Placement {
    /// Threads of one process.
    pub const THREADS: Self = Self { ranks: Ranks::Threads, hosts: 1, machines: 1 };

    /// Of the ranks of `world`, which `comm` connects. Collective.
    ///
    /// # Errors
    /// A rank that is gone.
    pub fn of(world: &World, comm: &Communicator) -> anyhow::Result<Self> {
        if world.launch() == Launch::Threads {
            return Ok(Self::THREADS);
        }
        // Of this boot of the kernel, which containers share.
        let machine = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let machines = comm.exchange(&machine)?.into_iter().collect::<BTreeSet<_>>().len();
        Ok(Self {
            ranks: Ranks::Processes,
            hosts: world.hosts().count(),
            machines: u32::try_from(machines)?,
        })
    }
}

/// A suffix for a list; empty for threads.
impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::THREADS => Ok(()),
            Self { ranks, hosts: 1, .. } => write!(f, ", ranks as {ranks}"),
            Self { ranks, hosts, machines } if machines < hosts => {
                let kept = if machines == 1 { "one machine" } else { "fewer machines" };
                write!(f, ", ranks as {ranks} of {hosts} hosts, which are {kept} for a test")
            }
            Self { ranks, hosts, .. } => write!(f, ", ranks as {ranks} of {hosts} hosts"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_that_are_one_machine_are_said_to_be() {
        let of =
            |hosts, machines| Placement { ranks: Ranks::Processes, hosts, machines }.to_string();
        assert_eq!(Placement::THREADS.to_string(), "");
        assert_eq!(of(1, 1), ", ranks as processes");
        assert_eq!(of(2, 2), ", ranks as processes of 2 hosts");
        assert_eq!(of(2, 1), ", ranks as processes of 2 hosts, which are one machine for a test");
        assert_eq!(
            of(4, 2),
            ", ranks as processes of 4 hosts, which are fewer machines for a test"
        );
    }
}
