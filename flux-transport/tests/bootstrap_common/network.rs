//! Ranks that believe that they are on several hosts: over loopback, told apart by `FLUX_HOST_ID`.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use flux_transport::Environment;
use flux_transport::internal::control::ControlPlane;

use super::loopback::free_address;
use super::{ample, assert_empty, join_all, private};

pub(crate) const SECRET: &str = "a secret of the tests, long enough";

/// A launch's place: a loopback port, and a directory for a host's ranks.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    pub(crate) directory: tempfile::TempDir,
}

/// One rank as its launcher describes it.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    pub(crate) rank: u32,
    pub(crate) world: u32,
    pub(crate) host: u32,
    pub(crate) secret: &'static str,
}

/// Rank `rank`, on the host that `hosts` says.
pub(crate) fn told(rank: u32, hosts: &[u32]) -> Told {
    Told { rank, world: hosts.len() as u32, host: hosts[rank as usize], secret: SECRET }
}

impl Site {
    pub(crate) fn new() -> Self {
        Self { address: free_address(), directory: private() }
    }

    /// At a port that was free just now. `None` where this machine does not have the address.
    pub(crate) fn at(address: IpAddr) -> Option<Self> {
        let free = TcpListener::bind((address, 0)).ok()?;
        Some(Self { address: free.local_addr().unwrap(), directory: private() })
    }

    /// The variables of a rank.
    pub(crate) fn variables(&self, told: &Told) -> [(&'static str, OsString); 7] {
        let Told { rank, world, host, secret } = told;
        let directory: PathBuf = self.directory.path().into();
        [
            ("FLUX_RANK", rank.to_string().into()),
            ("FLUX_WORLD_SIZE", world.to_string().into()),
            ("FLUX_LOCAL_RANK", "0".into()),
            ("FLUX_RENDEZVOUS", format!("tcp://{}", self.address).into()),
            ("FLUX_SECRET", secret.into()),
            ("FLUX_HOST_ID", host.to_string().into()),
            ("XDG_RUNTIME_DIR", directory.into()),
        ]
    }

    pub(crate) fn rank(&self, told: &Told) -> Environment {
        let set = self.variables(told);
        Environment::parse(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
        })
        .unwrap()
    }

    pub(crate) fn ranks(&self, hosts: &[u32]) -> Vec<Environment> {
        (0..hosts.len() as u32).map(|rank| self.rank(&told(rank, hosts))).collect()
    }

    /// A connection, once somebody listens.
    pub(crate) fn connect(&self) -> TcpStream {
        let deadline = ample();
        loop {
            if let Ok(stream) = TcpStream::connect(self.address) {
                return stream;
            }
            assert!(Instant::now() < deadline, "rank 0 does not listen");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

/// A formed group, by rank, each on the host that `hosts` says.
pub(crate) fn group_on(hosts: &[u32]) -> Vec<Arc<dyn ControlPlane>> {
    let site = Site::new();
    let planes = join_all(&site.ranks(hosts), ample());
    // All of them: the first to fail says more than those that wait for it.
    let errors: Vec<String> =
        planes.iter().filter_map(|plane| Some(plane.as_ref().err()?.to_string())).collect();
    assert!(errors.is_empty(), "{hosts:?}: {errors:#?}");
    let planes = planes.into_iter().map(Result::unwrap).collect();
    assert_empty(site.directory.path());
    planes
}
