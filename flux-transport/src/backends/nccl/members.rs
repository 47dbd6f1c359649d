//! Who the ranks are, before any of them makes a communicator.
//!
//! Invariant: where meeting fails it fails on all ranks, which are then still in step. Decoding
//! accepts what [`Identity::encode`] produces, of this version, and nothing else.

use super::abi::UniqueId;
use super::library::{self, NcclError};
use super::messages::Use;
use super::sharing::{LANES, MOST_LANES, Sharing};
use crate::backends::connect_error::ConnectError;
use crate::backends::device::peer_memory::ordinal;
use crate::backends::kind::{Capabilities, Mover, PeerStores};
use crate::backends::options::{Options, Select};
use crate::bootstrap::control::{Launch, agree, together};
use crate::bootstrap::world::World;
use crate::topology::Settings;
use flux_core::{Nodes, Rank};
use flux_cuda::{DeviceInfo, DeviceUuid};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fmt::Display;
use std::time::{Duration, Instant};

/// Bytes of the pieces in which NCCL sends over a network; where ranks differ, what one sends
/// another does not receive.
const PIECES: &str = "NCCL_P2P_NET_CHUNKSIZE";
/// Whether communicators that are split from another share what it has, whatever they are told.
const SHARE: &str = "NCCL_COMM_SPLIT_SHARE_RESOURCES";
/// Pieces with which sends over sockets carry about what NCCL's collectives do
/// (docs/transports.md); NCCL's own are a quarter.
const GOOD_PIECES: u64 = 512 << 10;
/// What NCCL takes for the name of a process's host. Two ranks of one host it refuses to have on
/// one device.
const HOST: &str = "NCCL_HOSTID";
/// First bytes of a message, with the version.
const MAGIC: [u8; 8] = *b"fluxncl7";

/// What a rank says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    uuid: DeviceUuid,
    /// By which NCCL tells hosts apart, as far as a variable says: see [`host_digest`].
    host: u64,
    /// NCCL's version.
    version: u32,
    sharing: Sharing,
    /// What its environment says of [`PIECES`]; 0 for nothing.
    pieces: u64,
}

impl Identity {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { uuid, host, version, sharing, pieces } = self;
        let Sharing { lanes, asked, all, each, part_bytes } = sharing;
        let words = [version, lanes, asked, all, each].map(|word| word.to_le_bytes()).concat();
        [
            &MAGIC[..],
            &uuid.0,
            &host.to_le_bytes(),
            &words,
            &part_bytes.to_le_bytes(),
            &pieces.to_le_bytes(),
        ]
        .concat()
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (uuid, rest) = message.strip_prefix(&MAGIC)?.split_first_chunk()?;
        let (host, mut rest) = rest.split_first_chunk()?;
        let mut words = [0; 5];
        for word in &mut words {
            let (bytes, after) = rest.split_first_chunk()?;
            (*word, rest) = (u32::from_le_bytes(*bytes), after);
        }
        let (part_bytes, rest) = rest.split_first_chunk()?;
        let [version, lanes, asked, all, each] = words;
        let sharing =
            Sharing { lanes, asked, all, each, part_bytes: u64::from_le_bytes(*part_bytes) };
        let (uuid, host, pieces) =
            (DeviceUuid(*uuid), u64::from_le_bytes(*host), u64::from_le_bytes(*rest.as_array()?));
        Some(Self { uuid, host, version, sharing, pieces })
    }
}

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

/// What a rank's `NCCL_HOSTID` is, in a few bytes; the same for all that have none.
fn host_digest(variable: Option<&OsStr>) -> u64 {
    let digest = Sha256::digest(variable.unwrap_or_default().as_encoded_bytes());
    digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Whether ranks can join whose rail is `rail`, of all that there are; `shared`: whether they
/// agreed to share devices. Settings are to be the same on all rails: schedules follow from them,
/// and ranks of one call have one.
fn check(rank: Rank, rail: &[Rank], identities: &[Identity], shared: bool) -> Result<(), String> {
    let mine = identities[rank.index()];
    let all = identities
        .iter()
        .enumerate()
        .filter_map(|(index, &other)| Some((Rank::new(u32::try_from(index).ok()?), other)));
    for (peer, other) in all.filter(|&(peer, _)| peer != rank) {
        if rail.contains(&peer) && other.uuid == mine.uuid && !(shared && other.host != mine.host) {
            let but = if shared {
                format!(", unless each is a process with an {HOST} of its own")
            } else {
                String::new()
            };
            return Err(format!(
                "ranks {rank} and {peer} are both on device {}: NCCL takes one rank a device{but}",
                mine.uuid
            ));
        }
        let settings = |of: Identity| {
            [
                ("NCCL", u64::from(of.version)),
                ("FLUX_NCCL_CTAS", u64::from(of.sharing.lanes)),
                ("NCCL_P2P_NET_CHUNKSIZE (0: none)", of.pieces),
            ]
        };
        for ((what, own), (_, others)) in settings(mine).into_iter().zip(settings(other)) {
            if own != others {
                return Err(format!("rank {rank} has {what} {own}, rank {peer} {others}"));
            }
        }
        if other.sharing != mine.sharing {
            let variables = |Sharing { each, all, part_bytes, .. }: Sharing| {
                format!("{each} of {all} channels for messages in parts of {part_bytes} bytes")
            };
            let (own, others) = (variables(mine.sharing), variables(other.sharing));
            return Err(format!(
                "by the variables of NCCL, rank {rank} has {own}, rank {peer} {others}: set the \
                 same on every rank"
            ));
        }
    }
    Ok(())
}

/// What the variable of channels for messages beside a kernel says.
fn lanes(variable: Option<&OsStr>) -> Result<u32, String> {
    let Some(value) = variable.filter(|value| !value.is_empty()) else { return Ok(LANES) };
    let lanes = value.to_str().and_then(|text| text.parse().ok());
    let refused = || {
        format!(
            "FLUX_NCCL_CTAS = {}: it must be a power of two up to {MOST_LANES}",
            value.display()
        )
    };
    lanes.filter(|lanes: &u32| lanes.is_power_of_two() && *lanes <= MOST_LANES).ok_or_else(refused)
}

/// Whether communicators that are split from another share its flag for aborts, as they are told
/// to: NCCL's variable for that overrides it, and takes all but 1 for 0.
fn shared(variable: Option<&OsStr>) -> Result<(), String> {
    match variable.filter(|value| !value.is_empty()) {
        Some(value) if number(Some(value)) != Some(1) => Err(format!(
            "{SHARE} = {}: a call that waits for a peer that is gone could not be ended; unset it",
            value.display()
        )),
        _ => Ok(()),
    }
}

fn advice(hosts: u32, pieces: u64) -> String {
    if hosts < 2 || pieces != 0 {
        return String::new();
    }
    format!(
        "; {PIECES} is not set: {GOOD_PIECES} in every rank's environment carries more over sockets"
    )
}

/// What a variable says, as NCCL reads it (`ncclLoadParam`: `strtoll` with base 0): decimal, octal
/// after a 0, hexadecimal after a 0x, as far as there are digits. Nothing where there are none, and
/// for a number that is negative or too large.
fn number(variable: Option<&OsStr>) -> Option<u64> {
    let text = variable.and_then(OsStr::to_str)?.trim_ascii_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let after_0x = text
        .strip_prefix("0x")
        .or_else(|| text.strip_prefix("0X"))
        .filter(|digits| digits.starts_with(|c: char| c.is_ascii_hexdigit()));
    let (digits, base) = match after_0x {
        Some(digits) => (digits, 16),
        None if text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    let end = digits.find(|c: char| !c.is_digit(base)).unwrap_or(digits.len());
    i64::from_str_radix(&digits[..end], base).ok().map(i64::cast_unsigned)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use flux_core::WorldSize;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;

    pub(in crate::backends::nccl) fn identity(device: u8) -> Identity {
        let sharing = Sharing::new(4, 4, 1, 22_703, |_| None);
        Identity {
            uuid: DeviceUuid([device; 16]),
            host: host_digest(None),
            version: 22_703,
            sharing,
            pieces: 0,
        }
    }

    #[test]
    fn ranks_that_cannot_be_one_communicator_are_told_why() {
        let own = identity(0);
        // Rank 1's rail is 1 and 3; 0 and 2 are another, on the devices of the first.
        let check = |others: [Identity; 4]| {
            check(Rank::new(1), &[Rank::new(1), Rank::new(3)], &others, false)
        };
        assert!(check([own, own, identity(1), identity(1)]).is_ok());
        assert!(check([own; 4]).unwrap_err().contains("ranks 1 and 3 are both on device"));
        for (other, word) in [
            (Identity { version: 22800, ..identity(1) }, "rank 1 has NCCL 22703, rank # 22800"),
            (
                Identity { sharing: Sharing { lanes: 8, ..own.sharing }, ..identity(1) },
                "FLUX_NCCL_CTAS 4, rank # 8",
            ),
            (
                Identity { sharing: Sharing { all: 32, each: 8, ..own.sharing }, ..identity(1) },
                "has 4 of 16 channels",
            ),
            (
                Identity { pieces: 1 << 19, ..identity(1) },
                "NCCL_P2P_NET_CHUNKSIZE (0: none) 0, rank # 524288",
            ),
        ] {
            // What the ranks of another rail have counts, too.
            for rank in [0, 2, 3] {
                let mut all = [identity(2), own, identity(3), identity(1)];
                all[rank] = Identity { uuid: all[rank].uuid, ..other };
                let why = check(all).unwrap_err();
                assert!(why.contains(&word.replace('#', &rank.to_string())), "{why}");
            }
        }
    }

    #[test]
    fn ranks_share_a_device_that_agreed_to_and_are_on_different_hosts_to_nccl() {
        let named =
            |name: &str| Identity { host: host_digest(Some(OsStr::new(name))), ..identity(0) };
        let pair = |one: Identity, other: Identity, shared| {
            check(Rank::new(0), &[Rank::new(0), Rank::new(1)], &[one, other], shared)
        };
        assert!(
            pair(named("a"), named("b"), true).is_ok()
                && pair(named("a"), identity(0), true).is_ok()
        );
        assert!(
            pair(named("a"), named("b"), false)
                .unwrap_err()
                .ends_with("NCCL takes one rank a device")
        );
        for same in [identity(0), named("a")] {
            let why = pair(same, same, true).unwrap_err();
            assert!(
                why.ends_with("unless each is a process with an NCCL_HOSTID of its own"),
                "{why}"
            );
        }
    }

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
            matches!(&unusable, ConnectError::Unusable { select: Select::Mixed, why } if why.contains("rank 5 received 0x00000002 where rank 1 sent")),
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

    #[test]
    fn a_variable_that_would_keep_messages_from_being_ended_is_an_error() {
        let shared = |value: &str| shared(Some(OsStr::new(value)));
        assert!(
            super::shared(None).is_ok()
                && ["", "1", "0x1"].into_iter().all(|value| shared(value).is_ok())
        );
        for value in ["0", "2", "-1", "no"] {
            assert!(
                shared(value)
                    .unwrap_err()
                    .starts_with(&format!("NCCL_COMM_SPLIT_SHARE_RESOURCES = {value}: "))
            );
        }
    }

    #[test]
    fn the_variable_is_a_number_of_lanes_or_an_error() {
        let parse = |value: &str| lanes(Some(OsStr::new(value)));
        assert_eq!((lanes(None), parse(""), parse("8")), (Ok(LANES), Ok(LANES), Ok(8)));
        for wrong in ["0", "3", "64", "many", "-1"] {
            assert!(parse(wrong).unwrap_err().contains(wrong));
        }
    }

    #[test]
    fn variables_are_read_as_nccl_reads_them() {
        let parse = |value: &str| number(Some(OsStr::new(value)));
        assert_eq!((number(None), parse(""), parse("many"), parse("-1")), (None, None, None, None));
        assert!(advice(2, 0).contains("NCCL_P2P_NET_CHUNKSIZE is not set: 524288 in every"));
        assert_eq!((advice(1, 0), advice(2, 1 << 17)), (String::new(), String::new()));
        assert_eq!(
            (parse("524288"), parse("0x80000"), parse(" 1048576 ")),
            (Some(GOOD_PIECES), Some(GOOD_PIECES), Some(1 << 20))
        );
        // As `strtoll` with base 0 does.
        for (text, read) in [
            ("02000000", 1 << 19),
            ("0X80000", 1 << 19),
            ("+17", 17),
            ("512K", 512),
            ("08", 0),
            ("0x", 0),
            ("0", 0),
            ("0xg", 0),
            ("\t7 8", 7),
        ] {
            assert_eq!(parse(text), Some(read), "{text}");
        }
        assert_eq!((parse("9223372036854775808"), parse("+-1"), parse("++1")), (None, None, None));
    }

    proptest! {
        #[test]
        fn an_identity_survives_the_trip_and_no_part_of_it_does(
            uuid: [u8; 16],
            host: u64,
            version: u32,
            words: [u32; 4],
            part_bytes: u64,
            pieces: u64,
            cut in 0..68_usize,
        ) {
            let [lanes, asked, all, each] = words;
            let sharing = Sharing { lanes, asked, all, each, part_bytes };
            let identity = Identity { uuid: DeviceUuid(uuid), host, version, sharing, pieces };
            let mut message = identity.encode();
            prop_assert_eq!(message.len(), 68);
            prop_assert_eq!(Identity::decode(&message), Some(identity));
            prop_assert_eq!(Identity::decode(&message[..cut]), None);
            message.push(0);
            prop_assert_eq!(Identity::decode(&message), None);
        }
    }
}
