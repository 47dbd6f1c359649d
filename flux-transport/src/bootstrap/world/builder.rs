//! A rank's place in a launch that no variable describes.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flux_core::{Rank, WorldSize};

use super::{World, WorldError};
use crate::bootstrap::deadlines::{START, start_by};
use crate::bootstrap::environment::{
    Address, HostPlace, NetworkPlace, own_address, runtime_directory,
};
use crate::bootstrap::names::FLUX_HOST_ID;
use crate::bootstrap::rendezvous::{Rendezvous, TcpRendezvous, UnixRendezvous};
use crate::bootstrap::secret::Secret;
use crate::bootstrap::{Joining, Site};

impl World {
    /// Rank `rank` of `world`, where no launcher's variables say so.
    ///
    /// ```
    /// use flux_transport::Secret;
    /// use flux_transport::{Rank, World, WorldSize};
    /// let world = WorldSize::new(2).unwrap();
    /// let secret = Secret::new(*b"32 bytes that nobody can guess..")?;
    /// # let free = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    /// # let address = free.as_str();
    /// // let address = "10.0.0.1:29600"; on every host
    /// let rank = |rank| {
    ///     World::builder(Rank::new(rank), world).across_hosts(address, secret.clone())
    /// };
    /// std::thread::scope(|scope| {
    ///     let one = scope.spawn(|| rank(1));
    ///     assert_eq!(rank(0)?.hosts().count(), 1);
    ///     one.join().expect("no rank panics")
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A group inside a larger job: the process says its place in its group, and each group meets
    /// in a place of its own (`docs/deployment.md`). Here a job of four ranks in two groups.
    ///
    /// ```
    /// use flux_transport::{Communicator, Rank, Select, World, WorldSize};
    /// # use std::os::unix::fs::DirBuilderExt;
    /// let tp = 2;
    /// # let run = std::env::temp_dir().join(format!("flux-groups-{}", std::process::id()));
    /// # for group in 0..2 {
    /// #     let folder = run.join(format!("tp-{group}"));
    /// #     std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    /// # }
    /// let member = |job_rank: u32| -> Result<u32, Box<dyn std::error::Error + Send + Sync>> {
    ///     let (group, rank) = (job_rank / tp, job_rank % tp);
    ///     let size = WorldSize::new(tp).ok_or("no world size")?;
    ///     let member = World::builder(Rank::new(rank), size);
    ///     // A directory for each group, of mode 0700.
    ///     let world = member.on_host(run.join(format!("tp-{group}")))?;
    ///     let comm = Communicator::connect_blocking(&world, Select::Host)?;
    ///     Ok(comm.world_size().get())
    /// };
    /// std::thread::scope(|scope| {
    ///     let member = &member;
    ///     let spawn = |job_rank| scope.spawn(move || member(job_rank));
    ///     let ranks: Vec<_> = (0..4).map(spawn).collect();
    ///     for rank in ranks {
    ///         assert_eq!(rank.join().expect("no rank panics")?, 2);
    ///     }
    ///     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// })?;
    /// # std::fs::remove_dir_all(&run)?;
    /// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
    /// ```
    pub fn builder(rank: Rank, world: WorldSize) -> Builder {
        Builder::new(rank, world)
    }
}

/// Says who this process is; all ranks say the same but for their number. See [`World::builder`].
#[derive(Clone, Debug)]
pub struct Builder {
    rank: Rank,
    world: WorldSize,
    local_rank: Option<u32>,
    deadline: Duration,
    address: Option<IpAddr>,
    generation: u64,
}

impl Builder {
    pub(super) const fn new(rank: Rank, world: WorldSize) -> Self {
        Self { rank, world, local_rank: None, deadline: START, address: None, generation: 0 }
    }

    /// The rank's number among those of its host; counted by the ranks' order unless said.
    #[must_use]
    pub const fn local_rank(mut self, local_rank: u32) -> Self {
        self.local_rank = Some(local_rank);
        self
    }

    /// How long the ranks may take to come; a minute unless said.
    #[must_use]
    pub const fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// This host's address for ranks of other hosts. Unless said it is what `FLUX_ADDRESS` names,
    /// else that of the route to them.
    #[must_use]
    pub const fn address(mut self, address: IpAddr) -> Self {
        self.address = Some(address);
        self
    }

    /// The number of this [exchange](Rendezvous::exchange) among those of the group; 0 unless said.
    /// A process in the place of a lost rank says that of the rebuild.
    #[must_use]
    pub const fn generation(mut self, generation: u64) -> Self {
        self.generation = generation;
        self
    }

    /// Meets ranks that are all on this host, in an existing directory: absolute path, mode 0700,
    /// of this user, used by no other launch.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn on_host(self, directory: impl Into<PathBuf>) -> Result<World, WorldError> {
        let place = HostPlace::at(directory.into(), &[]);
        let rendezvous = Arc::new(UnixRendezvous::new(self.rank, self.world, place.clone()));
        pollster::block_on(self.join(rendezvous, Site::Host(place)))
    }

    /// Meets ranks that may be on several hosts, at `HOST:PORT`: an address and a free port of rank
    /// 0's host.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn across_hosts(self, address: &str, secret: Secret) -> Result<World, WorldError> {
        let place = NetworkPlace::at(address, secret)?;
        let place = NetworkPlace { own_address: self.address.or(place.own_address), ..place };
        let (towards, secret) = (Some(place.address.clone()), Some(place.secret.clone()));
        let site = self.site(towards, secret)?;
        let rendezvous = Arc::new(TcpRendezvous { rank: self.rank, world: self.world, place });
        pollster::block_on(self.join(rendezvous, site))
    }

    /// Meets ranks, on one host or several, that exchange bytes by a rendezvous of the program's
    /// own. Dropping the future ends the wait.
    ///
    /// Ranks share a host where they share the running system, the user and the run-time directory
    /// (`XDG_RUNTIME_DIR`, else `TMPDIR`, else `/tmp`); others connect over TCP.
    ///
    /// # Errors
    /// [`WorldError`].
    pub async fn meet(self, rendezvous: Arc<dyn Rendezvous>) -> Result<World, WorldError> {
        let site = self.site(None, None)?;
        self.join(rendezvous, site).await
    }

    /// As [`meet`](Self::meet), on this thread.
    ///
    /// # Errors
    /// [`WorldError`].
    pub fn meet_blocking(self, rendezvous: Arc<dyn Rendezvous>) -> Result<World, WorldError> {
        pollster::block_on(self.meet(rendezvous))
    }

    fn site(&self, towards: Option<Address>, secret: Option<Secret>) -> Result<Site, WorldError> {
        let lookup = |name: &str| std::env::var_os(name);
        Ok(Site::Network {
            directory: runtime_directory(&lookup),
            host_id: lookup(FLUX_HOST_ID),
            address: self.address.map_or_else(|| own_address(&lookup), |own| Ok(Some(own)))?,
            towards,
            secret,
        })
    }

    async fn join(self, rendezvous: Arc<dyn Rendezvous>, site: Site) -> Result<World, WorldError> {
        let Self { rank, world, local_rank, deadline, generation, .. } = self;
        if rank.get() >= world.get() {
            return Err(WorldError::Rank { rank, world });
        }
        let joining = Joining { rank, world, rendezvous, site, generation };
        let control = joining.join(start_by(deadline)).await?;
        let local_rank = local_rank.unwrap_or_else(|| {
            let hosts = control.hosts();
            // At most a world's size.
            hosts.ranks(hosts.of(rank)).take_while(|&other| other < rank).count() as u32
        });
        Ok(World::joined(local_rank, joining, control))
    }
}
