//! The steps that all ranks take together to share memory.
//!
//! Invariant: every rank takes every step, also after it has failed: a failure travels in the next message, so that all ranks end a
//! collective alike, and none is left waiting for one that has given up.

use super::error::NvLinkError;
use super::lane::Lane;
use super::link::Link;
use super::offer::{Identity, Offer};
use super::proof;
use super::shared::Peer;
use super::workspace::{Draft, Workspace, clear_pad};
use crate::cuda::{CudaDevice, Handles, can_access_peer, device_count, device_info};
use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use std::os::fd::{AsFd, OwnedFd};

/// First byte of a step's message: the rank's result so far.
const OK: u8 = 0;
const FAILED: u8 = 1;

/// Gives every rank every other's bytes, unless one has failed: then all fail.
pub(super) fn agree(link: &dyn Link, mine: Result<Vec<u8>, NvLinkError>) -> Result<Vec<Vec<u8>>, NvLinkError> {
    let message = match &mine {
        Ok(bytes) => [&[OK][..], bytes].concat(),
        Err(error) => [&[FAILED][..], error.to_string().as_bytes()].concat(),
    };
    let all = link.exchange(&message);
    mine?;
    let mut bodies = Vec::new();
    for (peer, message) in (0..).zip(all?) {
        match message.split_first() {
            Some((&OK, body)) => bodies.push(body.to_vec()),
            Some((&FAILED, why)) => return Err(NvLinkError::Peer { peer, reason: String::from_utf8_lossy(why).into_owned() }),
            _ => return Err(NvLinkError::Message { peer }),
        }
    }
    Ok(bodies)
}

/// Waits for every rank's success.
pub(super) fn succeed(link: &dyn Link, mine: Result<(), NvLinkError>) -> Result<(), NvLinkError> {
    agree(link, mine.map(|()| Vec::new())).map(|_| ())
}

/// Who the ranks are, and how this one shares memory with them.
#[derive(Debug)]
pub(super) struct Members {
    pub(super) rank: u32,
    pub(super) identities: Vec<Identity>,
    pub(super) handles: Handles,
    /// Devices of this process's ranks.
    pub(super) ordinals: Vec<u32>,
}

impl Members {
    /// Introduces the ranks to each other and checks that their devices reach each other.
    pub(super) fn meet(link: &dyn Link, device: &CudaDevice, shared_device: bool) -> Result<Self, NvLinkError> {
        let info = device.info();
        let identity = super::process::token().map(|process| Identity {
            process,
            uuid: info.uuid,
            ordinal: info.ordinal,
            posix_handles: info.posix_handles,
            shared_device,
        });
        let messages = agree(link, identity.map(|identity| identity.encode()))?;
        let decode = |(peer, message): (u32, &Vec<u8>)| Identity::decode(message).ok_or(NvLinkError::Message { peer });
        let identities: Result<Vec<_>, _> = (0..).zip(&messages).map(decode).collect();
        let members = identities.and_then(|identities| Self::check(link.rank(), device, identities));
        match members {
            Ok(members) => succeed(link, Ok(())).map(|()| members),
            Err(error) => succeed(link, Err(error.clone())).and(Err(error)),
        }
    }

    fn check(rank: u32, device: &CudaDevice, identities: Vec<Identity>) -> Result<Self, NvLinkError> {
        let info = device.info();
        let unsupported = |what| crate::cuda::CudaError::Unsupported { ordinal: info.ordinal, device: info.name.clone(), what };
        if !info.virtual_memory {
            return Err(unsupported("virtual memory management").into());
        }
        let own = identities[rank as usize];
        let one_process = identities.iter().all(|other| other.process == own.process);
        if !one_process && !info.posix_handles {
            return Err(unsupported("memory handles that can be passed to other processes").into());
        }
        let visible: Vec<_> = (0..device_count()?).map(device_info).collect::<Result<_, _>>()?;
        for (peer, other) in (0..).zip(&identities).filter(|&(peer, _)| peer != rank) {
            let shared = own.shared_device && other.shared_device && own.process == other.process;
            if other.uuid == own.uuid && !shared {
                return Err(NvLinkError::SameDevice { rank, peer, uuid: own.uuid });
            }
            // A peer's device may be hidden from this process; then only the proof by data can tell.
            let seen = visible.iter().find(|seen| seen.uuid == other.uuid);
            if let Some(seen) = seen
                && !can_access_peer(info.ordinal, seen.ordinal)?
            {
                return Err(NvLinkError::NoPeerAccess { rank, uuid: own.uuid, peer, peer_uuid: other.uuid });
            }
        }
        let ordinals = identities.iter().filter(|other| other.process == own.process).map(|other| other.ordinal).collect();
        let handles = if one_process { Handles::None } else { Handles::PosixFd };
        Ok(Self { rank, identities, handles, ordinals })
    }

    /// Whether `peer` is a rank of this process.
    pub(super) fn is_local(&self, peer: u32) -> bool {
        self.identities[peer as usize].process == self.identities[self.rank as usize].process
    }
}

/// Makes a workspace of `size` on every rank, maps all into all, and proves that each can write to each. The second value says whether
/// any rank has captured calls on its last one.
pub(super) fn build(
    link: &dyn Link,
    device: &CudaDevice,
    lane: &Lane,
    members: &Members,
    size: WorkspaceSize,
    epoch: Epoch,
    captured: bool,
) -> Result<(Workspace, bool), NvLinkError> {
    let made = make(link, device, lane, members, size, epoch);
    let offer = made.as_ref().map(|(draft, _)| draft.offer(captured).encode()).map_err(Clone::clone);
    let messages = agree(link, offer)?;
    let (draft, exports) = made?;
    let offers: Result<Vec<Offer>, NvLinkError> =
        (0..).zip(&messages).map(|(peer, message)| Offer::decode(message).ok_or(NvLinkError::Message { peer })).collect();
    let offers = offers.and_then(|offers| compatible(members.rank, &offers).map(|()| offers));
    // The same messages are judged the same way on every rank, up to who is named; still, say so before descriptors travel.
    succeed(link, offers.as_ref().map(|_| ()).map_err(Clone::clone))?;
    let offers = offers?;
    let imports = link.pass_descriptors(exports);
    let memory = imports.and_then(|imports| map(device, members, &draft, &offers, &imports));
    succeed(link, memory.as_ref().map(|_| ()).map_err(Clone::clone))?;
    let workspace = draft.complete(memory?);
    prove(link, device, lane, members, &workspace, epoch)?;
    Ok((workspace, offers.iter().any(|offer| offer.captured)))
}

type Made = (Draft, Vec<Option<OwnedFd>>);

/// This rank's part, and a descriptor of it for each rank of another process.
fn make(
    link: &dyn Link,
    device: &CudaDevice,
    lane: &Lane,
    members: &Members,
    size: WorkspaceSize,
    epoch: Epoch,
) -> Result<Made, NvLinkError> {
    let draft = Draft::new(device, lane, size, epoch, (members.handles, &members.ordinals))?;
    let exports = (0..link.world()).map(|peer| if members.is_local(peer) { Ok(None) } else { draft.export().map(Some) });
    let exports = exports.collect::<Result<_, _>>()?;
    Ok((draft, exports))
}

fn compatible(rank: u32, offers: &[Offer]) -> Result<(), NvLinkError> {
    let own = offers[rank as usize];
    for (peer, other) in (0..).zip(offers) {
        if (other.size, other.epoch) != (own.size, own.epoch) || other.holds() != Some(true) {
            let (size, epoch, peer_size, peer_epoch) = (own.size, own.epoch, other.size, other.epoch);
            return Err(NvLinkError::Disagreement { rank, size, epoch, peer, peer_size, peer_epoch });
        }
    }
    Ok(())
}

fn map(
    device: &CudaDevice,
    members: &Members,
    draft: &Draft,
    offers: &[Offer],
    imports: &[Option<OwnedFd>],
) -> Result<Vec<Peer>, NvLinkError> {
    let one = |(peer, (offer, fd)): (u32, (&Offer, &Option<OwnedFd>))| match fd {
        _ if peer == members.rank => Ok(draft.own()),
        _ if members.is_local(peer) => Peer::local(offer.key, offer.bytes).ok_or(NvLinkError::Withdrawn { peer }),
        Some(fd) => Ok(Peer::import(device, fd.as_fd(), offer.bytes)?),
        None => Err(NvLinkError::Control { reason: format!("rank {peer} sent no descriptor of its memory") }),
    };
    (0..).zip(offers.iter().zip(imports)).map(one).collect()
}

fn prove(
    link: &dyn Link,
    device: &CudaDevice,
    lane: &Lane,
    members: &Members,
    workspace: &Workspace,
    epoch: Epoch,
) -> Result<(), NvLinkError> {
    let (rank, initial) = (members.rank, epoch.before(1).get());
    succeed(link, proof::send(device, lane, workspace, rank, &members.identities, initial).map_err(NvLinkError::from))?;
    let checked = proof::check(device, workspace, rank, &members.identities, initial);
    let proven = checked.map_err(NvLinkError::from).and_then(|missing| match missing.first() {
        None => Ok(()),
        Some(&proof::Missing { peer, expected, seen }) => Err(NvLinkError::NotProven { rank, peer, expected, seen }),
    });
    let pad = workspace.pads()[rank as usize];
    let cleared = proven.and_then(|()| clear_pad(device, lane, pad, workspace.size(), epoch).map_err(NvLinkError::from));
    // After this step every pad is clean, and any rank may start the first call.
    succeed(link, cleared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvlink::link::tests::run;

    #[test]
    fn all_ranks_get_all_bytes() {
        let results = run(3, |link| agree(link, Ok(vec![u8::try_from(link.rank()).unwrap()])));
        assert!(results.iter().all(|result| *result == Ok(vec![vec![0], vec![1], vec![2]])));
    }

    #[test]
    fn one_rank_that_fails_fails_all_and_is_named() {
        let results = run(3, |link| {
            let mine = if link.rank() == 1 { Err(NvLinkError::Withdrawn { peer: 2 }) } else { Ok(()) };
            succeed(link, mine)
        });
        let named = NvLinkError::Peer { peer: 1, reason: NvLinkError::Withdrawn { peer: 2 }.to_string() };
        assert_eq!(results, [Err(named.clone()), Err(NvLinkError::Withdrawn { peer: 2 }), Err(named)]);
    }

    #[test]
    fn ranks_that_offer_different_workspaces_are_told_both() {
        let size = |signals| WorkspaceSize { half_bytes: 1 << 20, signals, counters: 0 };
        let offer = |signals, epoch| Offer { key: 1, bytes: 1 << 30, size: size(signals), epoch, captured: false };
        assert_eq!(compatible(0, &[offer(4, 7), offer(4, 7)]), Ok(()));
        for other in [offer(5, 7), offer(4, 8)] {
            let error = compatible(0, &[offer(4, 7), other]).unwrap_err();
            assert!(matches!(error, NvLinkError::Disagreement { rank: 0, peer: 1, .. }), "{error}");
        }
        let small = Offer { bytes: 1 << 20, ..offer(4, 7) };
        assert!(compatible(0, &[offer(4, 7), small]).is_err());
    }
}
