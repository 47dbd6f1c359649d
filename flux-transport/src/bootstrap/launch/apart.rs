//! Runs ranks of one machine as if on several, for tests.
//!
//! Invariant: ranks meet over TCP with a secret, only those of one host pass descriptors, and NCCL
//! uses loopback sockets. A rank's device number is its rank.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use flux_core::{Rank, WorldSize};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::bootstrap::names::{FLUX_HOST_ID, FLUX_RENDEZVOUS, FLUX_SECRET_FILE};
use crate::bootstrap::random::random;

/// Keeps NCCL from everything that ranks of one machine share. It compares hosts by `NCCL_HOSTID`.
const NCCL: [(&str, &str); 4] = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_SHM_DISABLE", "1"),
    ("NCCL_NET", "Socket"),
    ("NCCL_SOCKET_IFNAME", "lo"),
];

/// Variables by which NCCL takes a rank for the only one of its host, reached by loopback sockets.
pub fn one_host_each(rank: Rank) -> [(&'static str, OsString); 3] {
    [
        ("NCCL_HOSTID", format!("flux-rank-{rank}").into()),
        ("NCCL_NET", "Socket".into()),
        ("NCCL_SOCKET_IFNAME", "lo".into()),
    ]
}

#[derive(Debug)]
pub(super) struct Apart {
    hosts: u32,
    ranks: WorldSize,
    address: SocketAddr,
    secret: PathBuf,
    /// Bound and never listening, so nobody else gets the port; rank 0 reuses addresses.
    _port: OwnedFd,
}

impl Apart {
    /// Finds a port and makes a secret in the private `directory`.
    pub(super) fn make(hosts: u32, ranks: WorldSize, directory: &Path) -> io::Result<Self> {
        let port = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        sockopt::set_socket_reuseaddr(&port, true)?;
        rustix::net::bind(&port, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = SocketAddr::try_from(rustix::net::getsockname(&port)?)?;
        // 16 random bytes as 32 characters of text.
        let text = format!("{:032x}", u128::from_le_bytes(random()?));
        let secret = directory.join("secret");
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&secret)?
            .write_all(text.as_bytes())?;
        Ok(Self { hosts, ranks, address, secret, _port: port })
    }

    /// The host of a rank: neighbours in rank order, as even as can be.
    fn host(&self, rank: Rank) -> u32 {
        rank.get() * self.hosts / self.ranks.get()
    }

    /// The variables of a rank, beside its place in the launch.
    pub(super) fn env(&self, rank: Rank) -> Vec<(&'static str, OsString)> {
        let host = format!("flux-apart-{}", self.host(rank));
        let own = [
            (FLUX_RENDEZVOUS, format!("tcp://{}", self.address).into()),
            (FLUX_SECRET_FILE, self.secret.clone().into()),
            (FLUX_HOST_ID, host.clone().into()),
            ("NCCL_HOSTID", host.into()),
        ];
        own.into_iter().chain(NCCL.map(|(name, value)| (name, value.into()))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_host_has_ranks_in_order_and_as_many_as_another_or_one_more() {
        let directory = tempfile::tempdir().unwrap();
        for ranks in 1..=16 {
            for hosts in 1..=ranks {
                let within = directory.path().join(format!("{ranks}-{hosts}"));
                std::fs::create_dir(&within).unwrap();
                let world = WorldSize::new(ranks).unwrap();
                let apart = Apart::make(hosts, world, &within).unwrap();
                let of: Vec<u32> = world.ranks().map(|rank| apart.host(rank)).collect();
                assert!(of.is_sorted(), "{of:?}");
                let counts: Vec<u32> = (0..hosts)
                    .map(|host| of.iter().filter(|&&of| of == host).count() as u32)
                    .collect();
                assert!(
                    counts
                        .iter()
                        .all(|&count| count == ranks / hosts || count == ranks.div_ceil(hosts)),
                    "{of:?}"
                );
            }
        }
    }
}
