//! The ranks' devices, before any of them makes memory.
//!
//! Invariant: where meeting fails it fails on all ranks, which stay in step.

use super::choice;
use super::error::PeerMemoryError;
use super::mig::{self, Mig};
use super::offer::{DeviceIdentity, Introduction};
use crate::backends::options::Options;
use crate::bootstrap::control::{Collective, agree, together};
use crate::bootstrap::world::World;
use crate::topology;
use crate::topology::hints;
use flux_core::{Nodes, Rank};
use flux_cuda::{CudaError, DeviceInfo, Handles};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reachability {
    Peers,
    Host,
}

/// The ranks' devices, and how this one shares memory with those of its node.
#[derive(Debug)]
pub(crate) struct PeerDevices {
    pub(crate) rank: u32,
    pub(crate) info: DeviceInfo,
    pub(super) identities: Vec<DeviceIdentity>,
    pub(crate) handles: Handles,
    /// Whether any node has several processes: then all ranks take the step that passes
    /// descriptors.
    pub(super) passes: bool,
    /// Devices of this process's ranks of the node.
    pub(crate) ordinals: Vec<u32>,
    pub(super) nodes: Nodes,
}

impl PeerDevices {
    /// Introduces the ranks and checks that their devices reach what `reach` says. Makes no
    /// context. Collective; fails on all ranks, which stay in step.
    pub(crate) fn meet(
        world: &World,
        options: &Options,
        reach: Reachability,
    ) -> Result<Self, PeerMemoryError> {
        // The same on all ranks, which are still in step.
        if let Some(peer) =
            world.size().ranks().find(|&peer| !world.hosts().together(world.rank(), peer))
        {
            let deadline = Instant::now() + options.deadline;
            return Err(other_host(world.steps(), deadline, world.rank(), peer));
        }
        Self::meet_in(world, options, reach, Nodes::of_all(world.size()))
    }

    /// The same where memory is shared within `nodes` only, each of which is on one host.
    pub(crate) fn meet_in(
        world: &World,
        options: &Options,
        reach: Reachability,
        nodes: Nodes,
    ) -> Result<Self, PeerMemoryError> {
        let (steps, deadline) = (world.steps(), Instant::now() + options.deadline);
        let shared_device = options.shared_device;
        let found = choice::own_device(world, options)
            .and_then(|info| flux_cuda::usable(info.ordinal).map(|()| info))
            .map_err(mig::without_device)
            .and_then(|info| Ok((info, super::process::token()?)));
        let introduction = found.as_ref().map(|&(ref info, process)| {
            let instance = topology::is_instance(&info.name);
            let DeviceInfo { uuid, ordinal, posix_handles, .. } = *info;
            let identity =
                DeviceIdentity { process, uuid, ordinal, posix_handles, shared_device, instance };
            Introduction { identity, visible: hints::visible() }.encode()
        });
        let answers = agree(steps, &introduction, deadline);
        // This rank's own error says more than the others' echo of it.
        let (info, _) = found?;
        let decode = |(peer, message): (u32, &Vec<u8>)| {
            Introduction::decode(message).ok_or(PeerMemoryError::Message { peer })
        };
        let ranks = match (0..).zip(&answers?).map(decode).collect::<Result<Vec<_>, _>>() {
            Ok(ranks) => ranks,
            Err(error) => return together(steps, deadline, Err(error)),
        };
        let identities: Vec<DeviceIdentity> = ranks.iter().map(|rank| rank.identity).collect();
        let rank = world.rank().get();
        let mig = Mig::among(&identities, nodes, rank, &info);
        let met = choice::distinct(rank, &ranks)
            .and_then(|()| Self::check(rank, info, identities, reach, nodes));
        // The host's memory is reached from instances too.
        together(steps, deadline, met)
            .map_err(|error| if reach == Reachability::Host { error } else { mig.advised(error) })
    }

    fn check(
        rank: u32,
        info: DeviceInfo,
        identities: Vec<DeviceIdentity>,
        reach: Reachability,
        nodes: Nodes,
    ) -> Result<Self, PeerMemoryError> {
        let own = identities[rank as usize];
        let node_peers: Vec<(u32, DeviceIdentity)> = nodes
            .node_peers(Rank::new(rank))
            .map(|node_peer| (node_peer.get(), identities[node_peer.index()]))
            .collect();
        if reach != Reachability::Host {
            reach_peers(rank, &info, own, &node_peers)?;
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
fn other_host(steps: Collective<'_>, deadline: Instant, rank: Rank, peer: Rank) -> PeerMemoryError {
    // Without the answers the ranks are on different hosts all the same.
    let boots = agree(steps, &Ok::<_, &str>(hints::boot()), deadline).unwrap_or_default();
    let boot = |rank: Rank| {
        boots
            .get(rank.index())
            .map(|boot| String::from_utf8_lossy(boot).into_owned())
            .unwrap_or_default()
    };
    PeerMemoryError::OtherHost {
        rank: rank.get(),
        peer: peer.get(),
        boots: [boot(rank), boot(peer)],
    }
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
    info: &DeviceInfo,
    own: DeviceIdentity,
    node_peers: &[(u32, DeviceIdentity)],
) -> Result<(), PeerMemoryError> {
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
        (0..flux_cuda::device_count()?).map(flux_cuda::device_info).collect::<Result<_, _>>()?;
    for &(peer, other) in node_peers {
        // A peer's device may be hidden from this process; then only the proof by data can tell.
        let seen = visible.iter().find(|seen| seen.uuid == other.uuid);
        if let Some(seen) = seen
            && !flux_cuda::can_access_peer(info.ordinal, seen.ordinal)?
        {
            return Err(PeerMemoryError::NoPeerAccess {
                rank,
                uuid: own.uuid,
                peer,
                peer_uuid: other.uuid,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::{ControlPlane, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;

    #[test]
    fn ranks_of_two_hosts_are_told_where_these_are_one_machine() {
        let ends = LocalControl::world_of(WorldSize::new(2).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let (steps, deadline) = (Collective::new(end, 0), Instant::now() + AMPLE);
                    let (rank, peer) = (end.rank(), Rank::new(1 - end.rank().get()));
                    // Both run on this kernel; its name is not known everywhere.
                    let hint = hints::one_machine([&hints::boot(), &hints::boot()]);
                    let words = other_host(steps, deadline, rank, peer).to_string();
                    assert!(
                        words.ends_with(&format!(
                            "rank {rank} and rank {peer} are on different hosts{hint}"
                        )),
                        "{words}"
                    );
                    // The ranks are still in step.
                    assert_eq!(together(steps, deadline, Ok::<_, PeerMemoryError>(7)).unwrap(), 7);
                });
            }
        });
    }

    #[test]
    fn all_ranks_take_the_step_of_descriptors_where_one_node_is_of_several_processes() {
        let uuid = flux_cuda::DeviceUuid([0; 16]);
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
}
