//! The steps that ranks take together to share memory.
//!
//! Invariant: every rank takes every step, also after it failed: it reports the failure at the next
//! step, so all end a collective alike.

use super::choice;
use super::error::NvLinkError;
use super::lane::Lane;
use super::mig::{self, Mig};
use super::offer::{DeviceIdentity, Introduction, Offer};
use super::proof;
use super::shared::Peer;
use super::workspace::{Draft, Workspace, clear_pad};
use crate::bootstrap::control::{Collective, agree as all_agree};
use crate::cuda::{self, CudaDevice, CudaError, DeviceInfo, Handles};
use crate::topology::hints;
use crate::{Options, World, topology};
use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// The control plane and the time until which all steps of a collective must be taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meeting<'a> {
    pub(crate) steps: Collective<'a>,
    pub(crate) deadline: Instant,
}

/// The longest that a collective waits, whatever the options say.
const LONGEST: Duration = Duration::from_hours(24);

impl<'a> Meeting<'a> {
    pub(crate) fn of(world: &'a World, options: &Options) -> Self {
        Self { steps: world.steps(), deadline: Instant::now() + options.deadline.min(LONGEST) }
    }

    /// Gives every rank every other's bytes, unless one has failed: then all fail.
    pub(crate) fn agree(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, NvLinkError> {
        Ok(all_agree(self.steps, &Ok::<_, &str>(mine), self.deadline)?)
    }

    /// Tells every rank that this one has failed.
    pub(crate) fn refuse(&self, error: NvLinkError) -> NvLinkError {
        // This rank's own error says more than the others' echo of it.
        let _ = all_agree(self.steps, &Err::<&[u8], _>(&error), self.deadline);
        error
    }

    /// Waits for every rank's success, and returns this rank's value.
    pub(crate) fn succeed<T>(&self, mine: Result<T, NvLinkError>) -> Result<T, NvLinkError> {
        match mine {
            Ok(value) => self.agree(&[]).map(|_| value),
            Err(error) => Err(self.refuse(error)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    Peers,
    Host,
}

/// The ranks' devices, and how this one shares memory with those of its node.
#[derive(Debug)]
pub(crate) struct PeerDevices {
    pub(crate) rank: u32,
    pub(crate) info: DeviceInfo,
    pub(super) identities: Vec<DeviceIdentity>,
    pub(super) handles: Handles,
    /// Whether any node has several processes: then all ranks take the step that passes
    /// descriptors.
    passes: bool,
    /// Devices of this process's ranks of the node.
    pub(super) ordinals: Vec<u32>,
    pub(super) nodes: Nodes,
}

impl PeerDevices {
    /// Introduces the ranks and checks that their devices reach what `reach` says. Makes no
    /// context. Collective; fails on all ranks, which stay in step.
    pub(crate) fn meet(
        world: &World,
        options: &Options,
        reach: Reach,
    ) -> Result<Self, NvLinkError> {
        // The same on all ranks, which are still in step.
        if let Some(peer) =
            world.size().ranks().find(|&peer| !world.hosts().together(world.rank(), peer))
        {
            return Err(other_host(Meeting::of(world, options), world.rank(), peer));
        }
        Self::meet_in(world, options, reach, Nodes::of_all(world.size()))
    }

    /// The same where memory is shared within `nodes` only, each of which is on one host.
    pub(crate) fn meet_in(
        world: &World,
        options: &Options,
        reach: Reach,
        nodes: Nodes,
    ) -> Result<Self, NvLinkError> {
        let meeting = Meeting::of(world, options);
        let shared_device = options.shared_device;
        let found = candidate(world, options)
            .map_err(mig::without_device)
            .and_then(|info| Ok((info, super::process::token()?)));
        let (info, process) = match found {
            Ok(found) => found,
            Err(error) => return Err(meeting.refuse(error)),
        };
        let instance = topology::is_instance(&info.name);
        let DeviceInfo { uuid, ordinal, posix_handles, .. } = info;
        let identity =
            DeviceIdentity { process, uuid, ordinal, posix_handles, shared_device, instance };
        let messages =
            meeting.agree(&Introduction { identity, visible: hints::visible() }.encode())?;
        let decode = |(peer, message): (u32, &Vec<u8>)| {
            Introduction::decode(message).ok_or(NvLinkError::Message { peer })
        };
        let ranks = match (0..).zip(&messages).map(decode).collect::<Result<Vec<_>, _>>() {
            Ok(ranks) => ranks,
            Err(error) => return Err(meeting.refuse(error)),
        };
        let identities: Vec<DeviceIdentity> = ranks.iter().map(|rank| rank.identity).collect();
        let rank = world.rank().get();
        let mig = Mig::among(&identities, nodes, rank, &info);
        let met = choice::distinct(rank, &ranks)
            .and_then(|()| Self::check(rank, info, identities, (reach, nodes)));
        // The host's memory is reached from instances too.
        meeting
            .succeed(met)
            .map_err(|error| if reach == Reach::Host { error } else { mig.advised(error) })
    }

    fn check(
        rank: u32,
        info: DeviceInfo,
        identities: Vec<DeviceIdentity>,
        (reach, nodes): (Reach, Nodes),
    ) -> Result<Self, NvLinkError> {
        let own = identities[rank as usize];
        let node_peers: Vec<(u32, DeviceIdentity)> = nodes
            .node_peers(Rank::new(rank))
            .map(|node_peer| (node_peer.get(), identities[node_peer.index()]))
            .collect();
        if reach != Reach::Host {
            reach_peers(rank, (&info, own), &node_peers)?;
        }
        let here: Vec<u32> = node_peers
            .iter()
            .filter(|(_, node_peer)| node_peer.process == own.process)
            .map(|(_, node_peer)| node_peer.ordinal)
            .collect();
        let handles = if here.len() == node_peers.len() { Handles::None } else { Handles::PosixFd };
        let ordinals = [&[own.ordinal], &here[..]].concat();
        let passes = pass(&identities, nodes);
        Ok(Self { rank, info, identities, handles, passes, ordinals, nodes })
    }

    pub(crate) fn world(&self) -> u32 {
        // At most MAX_WORLD.
        u32::try_from(self.identities.len()).unwrap_or(u32::MAX)
    }

    /// What MIG has to do with it where this rank's node does not share memory.
    pub(crate) fn mig(&self) -> Mig {
        Mig::among(&self.identities, self.nodes, self.rank, &self.info)
    }

    pub(super) fn shares_with(&self, peer: u32) -> bool {
        self.nodes.together(Rank::new(self.rank), Rank::new(peer))
    }

    /// Whether `peer` is a rank of this process.
    pub(crate) fn is_local(&self, peer: u32) -> bool {
        self.identities[peer as usize].process == self.identities[self.rank as usize].process
    }
}

/// Why `rank` shares no memory with `peer`, of another host. Collective: all tell their kernel's
/// boot.
fn other_host(meeting: Meeting<'_>, rank: Rank, peer: Rank) -> NvLinkError {
    // Without the answers the ranks are on different hosts all the same.
    let boots = meeting.agree(hints::boot().as_bytes()).unwrap_or_default();
    let boot = |rank: Rank| {
        boots
            .get(rank.index())
            .map(|boot| String::from_utf8_lossy(boot).into_owned())
            .unwrap_or_default()
    };
    NvLinkError::OtherHost { rank: rank.get(), peer: peer.get(), boots: [boot(rank), boot(peer)] }
}

/// Whether ranks of any node are in several processes, which all ranks answer alike.
fn pass(identities: &[DeviceIdentity], nodes: Nodes) -> bool {
    let apart = |(rank, own): (u32, &DeviceIdentity)| {
        nodes
            .node_peers(Rank::new(rank))
            .any(|node_peer| identities[node_peer.index()].process != own.process)
    };
    (0..).zip(identities).any(apart)
}

/// Checks that this rank's device can share memory, and reaches its visible peers.
fn reach_peers(
    rank: u32,
    (info, own): (&DeviceInfo, DeviceIdentity),
    node_peers: &[(u32, DeviceIdentity)],
) -> Result<(), NvLinkError> {
    let unsupported =
        |what| CudaError::Unsupported { ordinal: info.ordinal, device: info.name.clone(), what };
    if !info.virtual_memory {
        return Err(unsupported("virtual memory management").into());
    }
    let one_process = node_peers.iter().all(|(_, node_peer)| node_peer.process == own.process);
    if !one_process && !info.posix_handles {
        return Err(unsupported("memory handles that can be passed to other processes").into());
    }
    let visible: Vec<_> =
        (0..cuda::device_count()?).map(cuda::device_info).collect::<Result<_, _>>()?;
    for &(peer, other) in node_peers {
        // A peer's device may be hidden from this process; then only the proof by data can tell.
        let seen = visible.iter().find(|seen| seen.uuid == other.uuid);
        if let Some(seen) = seen
            && !cuda::can_access_peer(info.ordinal, seen.ordinal)?
        {
            return Err(NvLinkError::NoPeerAccess {
                rank,
                uuid: own.uuid,
                peer,
                peer_uuid: other.uuid,
            });
        }
    }
    Ok(())
}

/// The device that a rank is to use.
fn candidate(world: &World, options: &Options) -> Result<DeviceInfo, CudaError> {
    cuda::available()?;
    let ordinal =
        choice::ordinal(options.device, world.launch(), world.local_rank(), cuda::device_count()?);
    cuda::usable(ordinal)?;
    cuda::device_info(ordinal)
}

/// What all ranks' workspaces are to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) size: WorkspaceSize,
    pub(crate) epoch: Epoch,
    /// Whether this rank has captured calls on the workspace before.
    pub(crate) captured: bool,
}

/// Makes a workspace on every rank, maps each node's into all of it, and proves every write. The
/// second value: whether any rank has captured calls on its last one.
pub(crate) fn build(
    meeting: Meeting<'_>,
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    wanted: Wanted,
) -> Result<(Workspace, bool), NvLinkError> {
    let (draft, fd) = match make(device, lane, members, wanted) {
        Ok(made) => made,
        Err(error) => return Err(meeting.refuse(error)),
    };
    let messages = meeting.agree(&draft.offer(wanted.captured).encode())?;
    let decode = |(peer, message): (u32, &Vec<u8>)| {
        Offer::decode(message).ok_or(NvLinkError::Message { peer })
    };
    let offers: Result<Vec<Offer>, NvLinkError> = (0..).zip(&messages).map(decode).collect();
    let offers = meeting
        .succeed(offers.and_then(|offers| compatible(members.rank, &offers).map(|()| offers)))?;
    let imports = if members.passes {
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        meeting.steps.exchange_fds(&fds, meeting.deadline)?
    } else {
        Vec::new()
    };
    let memory = meeting.succeed(map(device, members, &draft, &offers, &imports))?;
    let workspace = draft.complete(memory);
    prove(meeting, device, lane, members, &workspace, wanted.epoch)?;
    Ok((workspace, offers.iter().any(|offer| offer.captured)))
}

/// This rank's part, and a descriptor of it where there are ranks in other processes.
fn make(
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    wanted: Wanted,
) -> Result<(Draft, Option<OwnedFd>), NvLinkError> {
    let draft =
        Draft::new(device, lane, wanted.size, wanted.epoch, (members.handles, &members.ordinals))?;
    let fd = match members.handles {
        Handles::None => None,
        Handles::PosixFd => Some(draft.export()?),
    };
    Ok((draft, fd))
}

fn compatible(rank: u32, offers: &[Offer]) -> Result<(), NvLinkError> {
    let own = offers[rank as usize];
    for (peer, other) in (0..).zip(offers) {
        if (other.size, other.epoch) != (own.size, own.epoch) || other.holds() != Some(true) {
            let (size, epoch, peer_size, peer_epoch) =
                (own.size, own.epoch, other.size, other.epoch);
            return Err(NvLinkError::Disagreement {
                rank,
                size,
                epoch,
                peer,
                peer_size,
                peer_epoch,
            });
        }
    }
    Ok(())
}

fn map(
    device: &CudaDevice,
    members: &PeerDevices,
    draft: &Draft,
    offers: &[Offer],
    imports: &[Vec<OwnedFd>],
) -> Result<Vec<Option<Peer>>, NvLinkError> {
    let one = |(peer, offer): (u32, &Offer)| {
        if peer == members.rank {
            return Ok(Some(draft.own()));
        }
        if !members.shares_with(peer) {
            return Ok(None);
        }
        if members.is_local(peer) {
            return Peer::local(offer.key, offer.bytes)
                .ok_or(NvLinkError::Withdrawn { peer })
                .map(Some);
        }
        match imports.get(peer as usize).map(Vec::as_slice) {
            Some([fd]) => Ok(Some(Peer::import(device, fd.as_fd(), offer.bytes)?)),
            _ => Err(NvLinkError::Message { peer }),
        }
    };
    (0..).zip(offers).map(one).collect()
}

fn prove(
    meeting: Meeting<'_>,
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    workspace: &Workspace,
    epoch: Epoch,
) -> Result<(), NvLinkError> {
    let rank = members.rank;
    meeting.succeed(
        proof::send(device, lane, workspace, rank, &members.identities).map_err(NvLinkError::from),
    )?;
    let checked = proof::check(device, workspace, rank, &members.identities);
    let proven = checked.map_err(NvLinkError::from).and_then(|missing| match missing.first() {
        None => Ok(()),
        Some(&proof::Missing { peer, expected, seen }) => {
            Err(NvLinkError::NotProven { rank, peer, expected, seen })
        }
    });
    let pad = workspace.pads()[rank as usize];
    let cleared = proven.and_then(|()| Ok(clear_pad(device, lane, pad, workspace.size(), epoch)?));
    // After this step every pad is clean, and any rank may start the first call.
    meeting.succeed(cleared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::{ControlPlane, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;

    #[test]
    fn one_rank_that_fails_fails_all_and_is_named() {
        let ends = LocalControl::world_of(WorldSize::new(3).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let meeting = Meeting {
                        steps: Collective::new(end, 0),
                        deadline: Instant::now() + AMPLE,
                    };
                    let mine = if end.rank().get() == 1 {
                        Err(NvLinkError::Withdrawn { peer: 2 })
                    } else {
                        Ok(5)
                    };
                    match (end.rank().get(), meeting.succeed(mine).unwrap_err()) {
                        (1, NvLinkError::Withdrawn { peer: 2 }) => {}
                        (0 | 2, NvLinkError::Peer { peer, reason }) => {
                            assert_eq!(
                                (peer, reason),
                                (Rank::new(1), NvLinkError::Withdrawn { peer: 2 }.to_string())
                            );
                        }
                        (rank, other) => panic!("rank {rank}: {other}"),
                    }
                    // The ranks are still in step.
                    assert_eq!(meeting.succeed(Ok(7)).unwrap(), 7);
                });
            }
        });
    }

    #[test]
    fn ranks_of_two_hosts_are_told_where_these_are_one_machine() {
        let ends = LocalControl::world_of(WorldSize::new(2).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let meeting = || Meeting {
                        steps: Collective::new(end, 0),
                        deadline: Instant::now() + AMPLE,
                    };
                    let (rank, peer) = (end.rank(), Rank::new(1 - end.rank().get()));
                    // Both run on this kernel; its name is not known everywhere.
                    let hint = hints::one_machine([&hints::boot(), &hints::boot()]);
                    let words = other_host(meeting(), rank, peer).to_string();
                    assert!(
                        words.ends_with(&format!(
                            "rank {rank} and rank {peer} are on different hosts{hint}"
                        )),
                        "{words}"
                    );
                    // The ranks are still in step.
                    assert_eq!(meeting().succeed(Ok(7)).unwrap(), 7);
                });
            }
        });
    }

    #[test]
    fn all_ranks_take_the_step_of_descriptors_where_one_node_is_of_several_processes() {
        let uuid = cuda::DeviceUuid([0; 16]);
        let in_process = |process: u8| DeviceIdentity {
            process: [process; 16],
            uuid,
            ordinal: 0,
            posix_handles: true,
            shared_device: true,
            instance: false,
        };
        let nodes = Nodes::new(WorldSize::new(4).unwrap(), 2).unwrap();
        let ranks = |processes: [u8; 4]| processes.map(in_process);
        assert!(
            !pass(&ranks([1, 1, 1, 1]), nodes) && !pass(&ranks([1, 1, 2, 2]), nodes),
            "threads in each node"
        );
        assert!(
            pass(&ranks([1, 1, 2, 3]), nodes) && pass(&ranks([1, 2, 3, 3]), nodes),
            "one node of threads, one of processes"
        );
    }

    #[test]
    fn ranks_that_offer_different_workspaces_are_told_both() {
        let size = |signals| WorkspaceSize { half_bytes: 1 << 20, signals, counters: 0 };
        let offer = |signals, epoch| Offer {
            key: 1,
            bytes: 1 << 30,
            size: size(signals),
            epoch,
            captured: false,
        };
        assert!(compatible(0, &[offer(4, 7), offer(4, 7)]).is_ok());
        for other in [offer(5, 7), offer(4, 8)] {
            let error = compatible(0, &[offer(4, 7), other]).unwrap_err();
            assert!(matches!(error, NvLinkError::Disagreement { rank: 0, peer: 1, .. }), "{error}");
        }
        let small = Offer { bytes: 1 << 20, ..offer(4, 7) };
        assert!(compatible(0, &[offer(4, 7), small]).is_err());
    }
}
