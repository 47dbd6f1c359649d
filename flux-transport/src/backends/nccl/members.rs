//! Who the ranks are, before any of them makes a communicator.
//!
//! Invariant: where meeting fails it fails on all ranks, which are then still in step.

use super::abi::UniqueId;
use super::identity::{HOST, Identity, are_apart, check, host_digest};
use super::library::{self, NcclError};
use super::messages::Use;
use super::settings::{PIECES, SHARE, advice, lanes, number, shared};
use super::sharing::Sharing;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::peer_memory::own_device;
use crate::backends::kind::{Capabilities, Mover, PeerStores};
use crate::backends::options::{Options, Select};
use crate::bootstrap::control::{Launch, agree, together};
use crate::bootstrap::world::World;
use crate::topology::Settings;
use flux_core::{Nodes, Rank};
use flux_cuda::DeviceInfo;
use std::fmt::Display;
use std::time::{Duration, Instant};

/// Ranks that can make communicators: those of a rail one, and all of them another where no two
/// share a device.
#[derive(Clone, Debug)]
pub(crate) struct Members {
    pub(crate) info: DeviceInfo,
    pub(crate) sharing: Sharing,
    pub(super) version: u32,
    pieces: u64,
    hosts: u32,
    /// Names the communicator that the others are split from.
    pub(super) id: UniqueId,
    /// The transport that they meet for.
    select: Select,
    nodes: Nodes,
    rank: Rank,
    /// Whether all ranks can be of one communicator.
    collectives: bool,
}

/// The ranks of a rail, in the order of their nodes.
fn rail(nodes: Nodes, rank: Rank) -> Vec<Rank> {
    (0..nodes.count()).map(|node| nodes.rank(node, nodes.local_of(rank))).collect()
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
                check(rank, &rail(nodes, rank), &identities, options.shared_device)?;
                // All ranks find the same of the same identities.
                let collectives = are_apart(&identities, options.shared_device);
                Ok((identities[rank.index()], collectives))
            });
        let (Identity { sharing, version, pieces, .. }, collectives) =
            together(steps, until, met.map_err(unusable))?;
        let first = if collectives { Rank::new(0) } else { rail(nodes, rank)[0] };
        // Not before: for each name NCCL has a thread that waits, at a socket, until all have
        // joined.
        let name = if rank == first { UniqueId::new() } else { Ok(UniqueId::from_bytes([0; 128])) };
        let name = name.map_err(|why| unusable(why.to_string()));
        let answers = agree(steps, &name.as_ref().map(|name| name.to_bytes()), until);
        name?;
        let named = named(first, &answers?).map_err(unusable);
        let id = together(steps, until, named)?;
        Ok(Self {
            info,
            sharing,
            version,
            pieces,
            hosts: hosts(world, options),
            id,
            select,
            nodes,
            rank,
            collectives,
        })
    }

    /// What a transport can do whose messages they carry.
    pub(crate) const fn capabilities(&self) -> Capabilities {
        let (channels, collectives) = (self.sharing.channels(self.hosts), self.collectives);
        let mover = Mover::Messages { channels, collectives };
        Capabilities { peer_stores: PeerStores::Nothing, mover, graphs: false }
    }

    /// What their communicators are used for.
    pub(super) fn uses(&self) -> impl Iterator<Item = Use> + use<> {
        [Use::Overlapped].into_iter().chain(self.collectives.then_some(Use::Sequential))
    }

    /// The use whose ranks are those of the communicator that all are split from.
    pub(super) const fn widest(&self) -> Use {
        if self.collectives { Use::Sequential } else { Use::Overlapped }
    }

    /// The ranks of a communicator, in its order: messages go along the rail.
    fn ranks(&self, by: Use) -> Vec<Rank> {
        match by {
            Use::Overlapped => rail(self.nodes, self.rank),
            Use::Sequential => self.nodes.world().ranks().collect(),
        }
    }

    /// What is the same for all ranks of a communicator, of those that are split.
    pub(super) const fn color(&self, by: Use) -> u32 {
        match by {
            Use::Overlapped => self.nodes.local_of(self.rank),
            Use::Sequential => 0,
        }
    }

    /// NCCL's version, for people.
    pub(crate) fn version(&self) -> String {
        library::words(self.version)
    }

    /// What is summed over all ranks, for people: a clause.
    pub(crate) const fn reach(&self) -> &'static str {
        if self.collectives {
            ", which also sums over all ranks"
        } else {
            ", which sums over no ranks that share a device"
        }
    }

    /// What may be worth a try, for people; nothing, or a clause.
    pub(crate) fn advice(&self) -> String {
        advice(self.hosts, self.pieces)
    }

    /// This rank's number in a communicator, and how many there are.
    pub(super) fn place(&self, by: Use) -> (u32, u32) {
        let Self { nodes, rank, .. } = self;
        match by {
            Use::Overlapped => (nodes.node_of(*rank), nodes.count()),
            Use::Sequential => (rank.get(), nodes.world().get()),
        }
    }

    /// The error of an attempt to join that others did not come to.
    pub(super) fn incomplete(&self, waited: Duration) -> NcclError {
        NcclError::Deadline { rank: self.rank.get(), world: self.place(self.widest()).1, waited }
    }

    /// The error of a proof to which a message did not come.
    pub(super) fn silent(&self, by: Use, waited: Duration) -> NcclError {
        NcclError::Silent { rank: self.rank.get(), world: self.place(by).1, waited }
    }

    /// The error of a proof in which the rank at place `peer` was heard to say `seen`.
    pub(super) fn not_proven(&self, by: Use, peer: u32, expected: u32, seen: u32) -> ConnectError {
        let (rank, peer) = (self.rank, self.ranks(by)[peer as usize]);
        let why =
            format!("rank {rank} received {seen:#010x} where rank {peer} sent {expected:#010x}");
        ConnectError::Unusable { select: self.select, why }
    }
}

fn introduce(
    world: &World,
    options: &Options,
    nodes: Nodes,
) -> Result<(DeviceInfo, Identity), String> {
    let words = |why: &dyn Display| why.to_string();
    let info = own_device(world, options).map_err(|why| words(&why))?;
    flux_cuda::usable(info.ordinal).map_err(|why| words(&why))?;
    library::available().map_err(|why| words(&why))?;
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

/// The name that `first`, the first of a communicator, has given to it.
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
    use std::collections::BTreeMap;
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
        // The second of node 1 of 2: number 1 on the rail of ranks 1 and 5.
        let nodes = Nodes::new(WorldSize::new(8).unwrap(), 2).unwrap();
        let rail = Members {
            info,
            sharing,
            version,
            pieces,
            hosts: 2,
            id,
            select: Select::Mixed,
            nodes,
            rank: Rank::new(5),
            collectives: false,
        };
        let all = Members { collectives: true, ..rail.clone() };
        let waited = Duration::from_secs(30);
        for (members, count) in [(&rail, 2), (&all, 8)] {
            let text = members.incomplete(waited).to_string();
            assert_eq!(
                text,
                format!("rank 5 waited 30s for all {count} ranks of its NCCL communicator to join")
            );
        }
        for (by, count, peer) in [(Use::Overlapped, 2, 1), (Use::Sequential, 8, 0)] {
            let silent = all.silent(by, waited).to_string();
            let expected =
                format!("rank 5 waited 30s for a message from each of the {count} ranks");
            assert!(silent.starts_with(&expected), "{silent}");
            let unusable = all.not_proven(by, 0, 1, 2);
            let expected = format!("rank 5 received 0x00000002 where rank {peer} sent");
            assert!(
                matches!(&unusable, ConnectError::Unusable { select: Select::Mixed, why } if why.contains(&expected)),
                "{unusable}"
            );
        }
    }

    #[test]
    fn messages_go_along_the_rail_and_collectives_are_of_all_ranks() {
        let info = crate::device::some_gpu();
        let (Identity { sharing, version, pieces, .. }, id) =
            (identity(0), UniqueId::from_bytes([7; 128]));
        let (world, select) = (WorldSize::new(6).unwrap(), Select::Mixed);
        for count in [2, 3, 6] {
            let nodes = Nodes::new(world, count).unwrap();
            // By use and color: the ranks, by their numbers.
            let mut communicators = BTreeMap::<_, BTreeMap<u32, Rank>>::new();
            for rank in world.ranks() {
                let (info, hosts, collectives) = (info.clone(), 2, true);
                let members = Members {
                    info,
                    sharing,
                    version,
                    pieces,
                    hosts,
                    id,
                    select,
                    nodes,
                    rank,
                    collectives,
                };
                for by in members.uses() {
                    let (number, of) = members.place(by);
                    let ranks = members.ranks(by);
                    assert_eq!((ranks[number as usize], ranks.len() as u32), (rank, of));
                    let key = (by == Use::Sequential, members.color(by));
                    communicators.entry(key).or_default().insert(number, rank);
                }
            }
            assert_eq!(communicators.len() as u32, nodes.per_node() + 1);
            for (key, ranks) in communicators {
                assert!(ranks.keys().copied().eq(0..if key.0 { 6 } else { count }), "{ranks:?}");
            }
        }
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
