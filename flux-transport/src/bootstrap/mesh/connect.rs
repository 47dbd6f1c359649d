//! From a rendezvous to a mesh.
//!
//! Invariant: all ranks take three steps. Whoever cannot take the first says so in the second, so
//! all end at once.
//!
//! 1. Each rank prepares what can fail: its address and the socket that listens there.
//! 2. They exchange where they are, and so learn who shares a host.
//! 3. Across hosts each rank calls the lower ranks, then accepts the higher ones. Within a host the
//!    first rank connects the others by a Unix socket in a private directory.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use flux_core::{Rank, WorldSize};

use super::whereabouts::{self, Whereabouts};
use super::{Mesh, deal, pairs};
use crate::bootstrap::connection::Connection;
use crate::bootstrap::control::{ControlPlane, Hosts};
use crate::bootstrap::environment::{Address, Environment, HostPlace, Place};
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::host_id::{HOST_ID_BYTES, HostId};
use crate::bootstrap::process::ProcessControl;
use crate::bootstrap::random::random;
use crate::bootstrap::rendezvous::{
    HostGroup, LaunchKey, Rendezvous, TcpRendezvous, UnixRendezvous,
};
use crate::bootstrap::secret::Secret;
use crate::bootstrap::unblock::on_own_thread;
use crate::bootstrap::{route, tcp};

/// How long ranks that have just exchanged where they are may take to connect.
const CONNECTING: Duration = Duration::from_secs(20);

/// How one rank is met.
#[derive(Clone, Debug)]
pub(crate) enum Site {
    /// All ranks are on this host, in this directory.
    Host(HostPlace),
    /// They may be on several.
    Network {
        /// Where the ranks of one of the hosts make a private directory to meet in.
        directory: PathBuf,
        /// Sets ranks apart that could share a host.
        host_id: Option<OsString>,
        /// This host's, where it is said.
        address: Option<IpAddr>,
        /// Whoever this rank's address is to reach.
        towards: Option<Address>,
        /// Of the launch, where the rendezvous can be overheard.
        secret: Option<Secret>,
    },
}

/// A rank that joins its world, and joins it again when that is rebuilt as a whole.
#[derive(Clone, Debug)]
pub(crate) struct Joining {
    pub(crate) rank: Rank,
    pub(crate) world: WorldSize,
    pub(crate) rendezvous: Arc<dyn Rendezvous>,
    pub(crate) site: Site,
    pub(crate) generation: u64,
}

impl Joining {
    /// As a launcher's variables say.
    pub(crate) fn new(environment: &Environment) -> Self {
        let Environment { rank, world, place, .. } = environment.clone();
        let (rendezvous, site): (Arc<dyn Rendezvous>, _) = match place {
            Place::Host(place) => {
                (Arc::new(UnixRendezvous::new(rank, world, place.clone())), Site::Host(place))
            }
            Place::Network(place) => {
                let site = Site::Network {
                    directory: place.directory.clone(),
                    host_id: place.host_id.clone(),
                    address: place.own_address,
                    towards: Some(place.address.clone()),
                    secret: Some(place.secret.clone()),
                };
                (Arc::new(TcpRendezvous { rank, world, place }), site)
            }
        };
        Self { rank, world, rendezvous, site, generation: 0 }
    }

    /// Meets the other ranks and returns this rank's end of their control plane.
    pub(crate) async fn join(
        &self,
        deadline: Instant,
    ) -> Result<Arc<dyn ControlPlane>, BootstrapError> {
        Ok(Arc::new(ProcessControl::start(self.mesh(deadline).await?)?))
    }

    async fn mesh(&self, deadline: Instant) -> Result<Mesh, BootstrapError> {
        if self.world.peers() == 0 {
            return Ok(Mesh::new(self.rank, self.world, Vec::new()));
        }
        let site = self.site.clone();
        let own = on_own_thread(move || site.prepare(deadline)).await;
        let offer = whereabouts::offer(own.as_ref().map(|(own, _)| own));
        let given = self.rendezvous.exchange(self.generation, offer, deadline).await;
        let (_, listener) = own?;
        let given = given?;
        if given.len() != self.world.index() {
            return Err(BootstrapError::Protocol(format!(
                "the rendezvous of {} ranks gave the bytes of {}",
                self.world.get(),
                given.len()
            )));
        }
        let all = whereabouts::all(&given)?;
        let (rank, world, site) = (self.rank, self.world, self.site.clone());
        let deadline = deadline.min(Instant::now() + CONNECTING);
        on_own_thread(move || site.connect(rank, world, &all, listener, deadline)).await
    }
}

impl Site {
    /// Where this rank is, and the socket on which it listens to other hosts.
    fn prepare(&self, deadline: Instant) -> Result<(Whereabouts, Option<OwnedFd>), BootstrapError> {
        let random = random().map_err(BootstrapError::io("drawing random bytes"))?;
        let Self::Network { directory, host_id, address, towards, .. } = self else {
            // One host, whatever it is called.
            let (host, address) = (HostId([0; HOST_ID_BYTES]), (Ipv4Addr::UNSPECIFIED, 0).into());
            return Ok((Whereabouts { host, address, random }, None));
        };
        let own = match address {
            Some(own) => *own,
            None => route::own(towards.as_ref(), deadline)?,
        };
        let listener = tcp::listen(SocketAddr::new(own, 0)).map_err(|errno| {
            let problem = format!("this rank cannot listen there: {errno}");
            BootstrapError::Address { address: own.to_string(), problem }
        })?;
        let address = tcp::local(listener.as_fd())
            .map_err(BootstrapError::io("looking at this rank's address"))?;
        let host = HostId::here(directory, host_id.as_deref());
        Ok((Whereabouts { host, address, random }, Some(listener)))
    }

    /// Connects to all ranks.
    fn connect(
        self,
        rank: Rank,
        world: WorldSize,
        all: &[Whereabouts],
        listener: Option<OwnedFd>,
        deadline: Instant,
    ) -> Result<Mesh, BootstrapError> {
        let names: Vec<HostId> = all.iter().map(|rank| rank.host).collect();
        let hosts = Hosts::group(&names);
        let group: Vec<Rank> = hosts.ranks(hosts.of(rank)).collect();
        let launch = if let Self::Network { secret, .. } = &self { secret.as_ref() } else { None };
        let (name, secret) = whereabouts::name_and_secret(all, launch)?;
        let mut links = Vec::new();
        if let Some(listener) = listener
            && hosts.count() > 1
        {
            let key = LaunchKey { secret, launch: name };
            let addresses: Vec<SocketAddr> = all.iter().map(|rank| rank.address).collect();
            let caller = pairs::Caller { rank, world, addresses, key };
            links.extend(caller.connect(&hosts, listener, deadline)?);
        }
        let place = match self {
            Self::Host(place) => HostPlace { nonce: name, ..place },
            // Ranks that were set apart may see the same directory; each host has its own below it.
            Self::Network { directory, .. } => {
                HostPlace::below(&directory, name ^ u128::from_le_bytes(names[rank.index()].0))
            }
        };
        let neighbours = group.iter().copied().filter(|&peer| peer != rank).collect::<Vec<_>>();
        let sockets = deal::sockets(&HostGroup { rank, world, group, place }, deadline)?;
        links.extend(neighbours.into_iter().zip(sockets.into_iter().map(Connection::Unix)));
        Ok(Mesh::across(rank, world, hosts, links))
    }
}
