//! Who the ranks are, before any of them makes a communicator.
//!
//! Invariant: where meeting fails it fails on all ranks, which are then still in step.

use super::abi::UniqueId;
use super::identity::{HOST, Identity, check, host_digest};
use super::library::{self, NcclError};
use super::messages::Use;
use super::settings::{PIECES, SHARE, advice, lanes, number, shared};
use super::sharing::Sharing;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::peer_memory::ordinal;
use crate::backends::kind::{Capabilities, Mover, PeerStores};
use crate::backends::options::{Options, Select};
use crate::bootstrap::control::{Launch, agree, together};
use crate::bootstrap::world::World;
use crate::topology::Settings;
use flux_core::{Nodes, Rank};
use flux_cuda::DeviceInfo;
use std::fmt::Display;
use std::time::{Duration, Instant};

/// Ranks that can make a communicator: those of a rail, in the order of their nodes.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    pub(crate) info: DeviceInfo,
    pub(crate) sharing: Sharing,
    pub(super) version: u32,
    pieces: u64,
    hosts: u32,
    pub(super) id: UniqueId,
    /// The transport that they meet for.
    select: Select,
    ranks: Vec<Rank>,
    /// This rank's place among them.
    own: usize,
}

impl Members {
    /// Introduces the ranks to each other. Collective.
    ///
    /// # Errors
    /// [`ConnectError::Unusable`] for `select` where a rank of a rail has no device of its own or
    /// no NCCL, or the ranks' versions or settings of it differ.
    pub(crate) fn meet(
        world: &World,
        options: &Options,
        nodes: Nodes,
        select: Select,
    ) -> Result<Self, ConnectError> {
        let until = Instant::now() + options.deadline;
        let (steps, rank) = (world.steps(), world.rank());
        let unusable = |why: String| ConnectError::Unusable { select, why };
        let mine = introduce(world, options, nodes).map_err(unusable);
        let answers = agree(steps, &mine.as_ref().map(|(_, identity)| identity.encode()), until);
        let (info, _) = mine?;
        let found =
            answers?.iter().map(|answer| Identity::decode(answer)).collect::<Option<Vec<_>>>();
        let met = found
            .ok_or_else(|| "a rank sent a message that is not one of this version's".to_owned())
            .and_then(|identities| {
                let ranks: Vec<Rank> =
                    (0..nodes.count()).map(|node| nodes.rank(node, nodes.local_of(rank))).collect();
                let own = nodes.node_of(rank) as usize;
                check(rank, &ranks, &identities, options.shared_device)?;
                Ok((identities[ranks[0].index()], ranks, own))
            });
        let (Identity { sharing, version, pieces, .. }, ranks, own) =
            together(steps, until, met.map_err(unusable))?;
        // Not before: for each name NCCL has a thread that waits, at a socket, until all have
        // joined.
        let name = if own == 0 { UniqueId::new() } else { Ok(UniqueId::from_bytes([0; 128])) };
        let name = name.map_err(|why| unusable(why.to_string()));
        let answers = agree(steps, &name.as_ref().map(|name| name.to_bytes()), until);
        name?;
        let named = named(ranks[0], &answers?).map_err(unusable);
        let id = together(steps, until, named)?;
        Ok(Self {
            info,
            sharing,
            version,
            pieces,
            hosts: hosts(world, options),
            id,
            select,
            ranks,
            own,
        })
    }

    /// What a transport can do whose messages they carry.
    pub(crate) const fn capabilities(&self) -> Capabilities {
        let mover = Mover::Messages { channels: self.sharing.channels(self.hosts) };
        Capabilities { peer_stores: PeerStores::Nothing, mover, graphs: false, processes: true }
    }

    /// What their communicators are used for. No call is sequential where intra-node peers store
    /// into each other's memory.
    pub(super) fn uses(&self) -> impl Iterator<Item = Use> + use<> {
        let is_sequential = self.select != Select::Mixed;
        [Use::Overlapped].into_iter().chain(is_sequential.then_some(Use::Sequential))
    }

    /// NCCL's version, for people.
    pub(crate) fn version(&self) -> String {
        library::words(self.version)
    }

    /// What may be worth a try, for people; nothing, or a clause.
    pub(crate) fn advice(&self) -> String {
        advice(self.hosts, self.pieces)
    }

    /// This rank's number in the communicator, and how many there are.
    pub(super) fn place(&self) -> (u32, u32) {
        // At most MAX_WORLD.
        (
            u32::try_from(self.own).unwrap_or(u32::MAX),
            u32::try_from(self.ranks.len()).unwrap_or(u32::MAX),
        )
    }

    /// The error of an attempt to join that others did not come to.
    pub(super) fn incomplete(&self, waited: Duration) -> NcclError {
        let (rank, world) = self.named();
        NcclError::Deadline { rank, world, waited }
    }

    /// The error of a proof to which a message did not come.
    pub(super) fn silent(&self, waited: Duration) -> NcclError {
        let (rank, world) = self.named();
        NcclError::Silent { rank, world, waited }
    }

    /// The error of a proof in which the rank at place `peer` was heard to say `seen`.
    pub(super) fn not_proven(&self, peer: u32, expected: u32, seen: u32) -> ConnectError {
        let (rank, peer) = (self.ranks[self.own], self.ranks[peer as usize]);
        let why =
            format!("rank {rank} received {seen:#010x} where rank {peer} sent {expected:#010x}");
        ConnectError::Unusable { select: self.select, why }
    }

    /// This rank by its number in the world, as people know it, and how many are in the
    /// communicator.
    fn named(&self) -> (u32, u32) {
        (self.ranks[self.own].get(), self.place().1)
    }
}

fn introduce(
    world: &World,
    options: &Options,
    nodes: Nodes,
) -> Result<(DeviceInfo, Identity), String> {
    let words = |why: &dyn Display| why.to_string();
    flux_cuda::available().map_err(|why| words(&why))?;
    library::available().map_err(|why| words(&why))?;
    let visible = flux_cuda::device_count().map_err(|why| words(&why))?;
    let ordinal = ordinal(options.device, world.launch(), world.local_rank(), visible);
    let info = flux_cuda::device_info(ordinal).map_err(|why| words(&why))?;
    flux_cuda::usable(ordinal).map_err(|why| words(&why))?;
    let lanes = lanes(std::env::var_os("FLUX_NCCL_CTAS").as_deref())?;
    let version = library::version().map_err(|why| words(&why)).and_then(library::supported)?;
    let settings = Settings::read();
    let set = |name: &str| number(settings.get(name).as_deref());
    shared(settings.get(SHARE).as_deref())?;
    let sharing = Sharing::new(lanes, nodes.count(), hosts(world, options), version, set);
    let pieces = set(PIECES).unwrap_or(0);
    let host = host_digest(settings.get(HOST).as_deref());
    let identity = Identity { uuid: info.uuid, host, version, sharing, pieces };
    Ok((info, identity))
}

/// The name that `first`, the first of a rail, has given to its communicator.
fn named(first: Rank, answers: &[Vec<u8>]) -> Result<UniqueId, String> {
    let answer = &answers[first.index()];
    let bytes = answer.as_array().ok_or_else(|| {
        format!("rank {first} named its communicator of NCCL in {} bytes, not 128", answer.len())
    })?;
    Ok(UniqueId::from_bytes(*bytes))
}

/// How many hosts NCCL takes the ranks for: processes that share devices for one each, or it
/// refuses them.
fn hosts(world: &World, options: &Options) -> u32 {
    if options.shared_device && world.launch() == Launch::Processes {
        world.size().get()
    } else {
        world.hosts().count()
    }
}

#[cfg(test)]
mod tests {
    use super::super::identity::tests::identity;
    use super::*;
    use flux_core::WorldSize;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn processes_that_share_devices_are_a_host_each_to_nccl() {
        let directory = tempfile::Builder::new()
            .permissions(PermissionsExt::from_mode(0o700))
            .tempdir()
            .unwrap();
        let world = WorldSize::new(2).unwrap();
        let options =
            [false, true].map(|shared_device| Options { shared_device, ..Options::default() });
        let hosts = |world: &World| options.map(|options| hosts(world, &options));
        assert_eq!(
            hosts(&World::local(2).unwrap()[0]),
            [1, 1],
            "of threads no two are on one device"
        );
        std::thread::scope(|scope| {
            // As far as the launch goes they are processes.
            let rank =
                |rank| World::builder(Rank::new(rank), world).on_host(directory.path()).unwrap();
            let other = scope.spawn(move || rank(1));
            let world = rank(0);
            assert_eq!(hosts(&world), [1, 2]);
            drop(other.join().unwrap());
        });
    }

    #[test]
    fn errors_of_a_rail_name_ranks_of_the_world_and_the_transport() {
        let info = crate::device::some_gpu();
        let (Identity { sharing, version, pieces, .. }, id) =
            (identity(0), UniqueId::from_bytes([7; 128]));
        // The second of node 1 of 2: number 1 on the rail.
        let ranks = [1, 5].map(Rank::new).to_vec();
        let members = Members {
            info,
            sharing,
            version,
            pieces,
            hosts: 2,
            id,
            select: Select::Mixed,
            ranks,
            own: 1,
        };
        let waited = Duration::from_secs(30);
        let texts =
            [members.incomplete(waited), members.silent(waited)].map(|error| error.to_string());
        assert_eq!(texts[0], "rank 5 waited 30s for all 2 ranks of its NCCL communicator to join");
        assert!(
            texts[1].starts_with("rank 5 waited 30s for a message from each of the 2 ranks"),
            "{}",
            texts[1]
        );
        let unusable = members.not_proven(0, 1, 2);
        assert!(
            matches!(&unusable, ConnectError::Unusable { select: Select::Mixed, why }
                if why.contains("rank 5 received 0x00000002 where rank 1 sent")),
            "{unusable}"
        );
    }

    #[test]
    fn the_first_of_a_rail_names_its_communicator_or_is_named() {
        let answers = [vec![0; 128], vec![9; 128], vec![9; 127]];
        assert_eq!(named(Rank::new(1), &answers), Ok(UniqueId::from_bytes([9; 128])));
        assert_eq!(
            named(Rank::new(2), &answers).unwrap_err(),
            "rank 2 named its communicator of NCCL in 127 bytes, not 128"
        );
    }
}
