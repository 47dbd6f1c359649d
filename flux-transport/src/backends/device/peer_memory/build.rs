//! One generation of all ranks' workspaces, made, mapped and proven.
//!
//! Invariant: every rank takes every step, also after it failed.

use super::devices::PeerDevices;
use super::error::PeerMemoryError;
use super::offer::Offer;
use super::proof;
use super::shared::Peer;
use super::workspace::{Candidate, Workspace};
use crate::backends::device::lane::Lane;
use crate::bootstrap::control::{Collective, agree, together};
use flux_core::layout::WorkspaceSize;
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, Handles};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

/// What all ranks' workspaces are to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) size: WorkspaceSize,
    pub(crate) epoch: Epoch,
    /// Whether this rank has captured calls on the workspace before.
    pub(crate) captured: bool,
}

/// Makes a workspace on every rank, maps each node's into all of it, and proves every write. The
/// second value: whether any rank has captured calls on its last one.
pub(crate) fn build(
    steps: Collective<'_>,
    deadline: Instant,
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    request: Request,
) -> Result<(Workspace, bool), PeerMemoryError> {
    let made = make(device, lane, members, request);
    let offer = made.as_ref().map(|(candidate, _)| candidate.offer(request.captured).encode());
    let answers = agree(steps, &offer, deadline);
    // This rank's own error says more than the others' echo of it.
    let (candidate, fd) = made?;
    let decode = |(peer, message): (u32, &Vec<u8>)| {
        Offer::decode(message).ok_or(PeerMemoryError::Message { peer })
    };
    let offers: Result<Vec<Offer>, PeerMemoryError> = (0..).zip(&answers?).map(decode).collect();
    let checked = offers.and_then(|offers| compatible(members.rank, &offers).map(|()| offers));
    let offers = together(steps, deadline, checked)?;
    let imports = if members.passes {
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        steps.exchange_fds(&fds, deadline)?
    } else {
        Vec::new()
    };
    let mapped = map(device, members, &candidate, &offers, &imports);
    let workspace = candidate.complete(together(steps, deadline, mapped)?);
    let sent = proof::send(device, lane, &workspace, members.rank, &members.identities);
    together(steps, deadline, sent.map_err(PeerMemoryError::from))?;
    let proven = prove(device, lane, members, &workspace, request.epoch);
    // After this step every pad is clean, and any rank may start the first call.
    together(steps, deadline, proven)?;
    Ok((workspace, offers.iter().any(|offer| offer.captured)))
}

/// This rank's part, and a descriptor of it where there are ranks in other processes.
fn make(
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    request: Request,
) -> Result<(Candidate, Option<OwnedFd>), PeerMemoryError> {
    let candidate = Candidate::new(
        device,
        lane,
        request.size,
        request.epoch,
        members.handles,
        &members.ordinals,
    )?;
    let fd = match members.handles {
        Handles::None => None,
        Handles::PosixFd => Some(candidate.export()?),
    };
    Ok((candidate, fd))
}

fn compatible(rank: u32, offers: &[Offer]) -> Result<(), PeerMemoryError> {
    let own = offers[rank as usize];
    for (peer, other) in (0..).zip(offers) {
        if (other.size, other.epoch) != (own.size, own.epoch) {
            let (size, epoch, peer_size, peer_epoch) =
                (own.size, own.epoch, other.size, other.epoch);
            return Err(PeerMemoryError::Disagreement {
                rank,
                size,
                epoch,
                peer,
                peer_size,
                peer_epoch,
            });
        }
        if other.holds() != Some(true) {
            return Err(PeerMemoryError::TooSmall { peer, bytes: other.bytes, size: other.size });
        }
    }
    Ok(())
}

fn map(
    device: &CudaDevice,
    members: &PeerDevices,
    candidate: &Candidate,
    offers: &[Offer],
    imports: &[Vec<OwnedFd>],
) -> Result<Vec<Option<Peer>>, PeerMemoryError> {
    let one = |(peer, offer): (u32, &Offer)| {
        if peer == members.rank {
            return Ok(Some(candidate.own()));
        }
        if !members.shares_with(peer) {
            return Ok(None);
        }
        if members.is_local(peer) {
            return Peer::local(offer.key, offer.bytes)
                .ok_or(PeerMemoryError::Withdrawn { peer })
                .map(Some);
        }
        match imports.get(peer as usize).map(Vec::as_slice) {
            Some([fd]) => Ok(Some(Peer::import(device, fd.as_fd(), offer.bytes)?)),
            _ => Err(PeerMemoryError::Message { peer }),
        }
    };
    (0..).zip(offers).map(one).collect()
}

/// Whether every peer's write has come. Clears the pad where it has.
fn prove(
    device: &CudaDevice,
    lane: &Lane,
    members: &PeerDevices,
    workspace: &Workspace,
    epoch: Epoch,
) -> Result<(), PeerMemoryError> {
    let rank = members.rank;
    let missing = proof::check(device, workspace, rank, &members.identities)?;
    if let Some(&proof::Missing { peer, expected, seen }) = missing.first() {
        return Err(PeerMemoryError::NotProven { rank, peer, expected, seen });
    }
    Ok(workspace.clear_pad(device, lane, rank, epoch)?)
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(
                matches!(error, PeerMemoryError::Disagreement { rank: 0, peer: 1, .. }),
                "{error}"
            );
        }
        let small = Offer { bytes: 1 << 20, ..offer(4, 7) };
        let error = compatible(0, &[offer(4, 7), small]).unwrap_err();
        assert!(
            matches!(error, PeerMemoryError::TooSmall { peer: 1, bytes: 0x10_0000, .. }),
            "{error}"
        );
    }
}
