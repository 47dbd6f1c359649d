//! Messages about a new group of ranks.

use crate::bootstrap::process::frame::Kind;
use flux_core::Rank;
use std::os::fd::OwnedFd;

/// What peers have said about a new group.
#[derive(Default)]
pub(crate) struct GroupState {
    /// Peers (bits) that wait for a group.
    pub(crate) waiting: u32,
    /// Peers (bits) that have waited since this rank began to.
    pub(crate) came: u32,
    pub(crate) waits: bool,
    pub(crate) verdict: Option<GroupVerdict>,
    /// A peer that goes on without this rank.
    pub(crate) given_up_by: Option<Rank>,
}

pub(crate) struct Sockets {
    pub(crate) came: Vec<OwnedFd>,
    /// Whether there were more, which this process could not take.
    pub(crate) cut: bool,
}

/// What the rank that makes the group says.
pub(crate) struct GroupVerdict {
    pub(crate) by: Rank,
    pub(crate) outcome: Outcome,
}

pub(crate) enum Outcome {
    /// The new group's members (bits), and a socket to each of the others.
    Group { members: u32, sockets: Vec<OwnedFd> },
    /// The same, of whose sockets this rank could not take all.
    TooMany,
    /// What keeps the rank that was to make the group from it.
    Unable(std::io::Error),
}

impl Outcome {
    /// `None` for what belongs to no verdict.
    pub(crate) fn new(kind: Kind, number: u32, sockets: Sockets) -> Option<Self> {
        match kind {
            Kind::Welcome if sockets.cut => Some(Self::TooMany),
            Kind::Welcome => Some(Self::Group { members: number, sockets: sockets.came }),
            Kind::Unable => {
                Some(Self::Unable(std::io::Error::from_raw_os_error(number.cast_signed())))
            }
            _ => None,
        }
    }
}

impl GroupState {
    pub(crate) fn begin(&mut self) {
        self.waits = true;
        self.came = self.waiting;
    }

    pub(crate) fn stop(&mut self) {
        self.waits = false;
        self.verdict = None;
    }
}
