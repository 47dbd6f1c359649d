//! Why ranks cannot take a step together.

use flux_core::Rank;
use std::io;

/// Why a step of the control plane failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "fields are named after what they hold")]
pub enum ControlError {
    /// Not every rank came in time.
    #[error("{step}: the deadline passed while waiting for {}", ranks(missing))]
    Timeout {
        step: &'static str,
        /// The ranks that had not come.
        missing: Vec<Rank>,
    },
    /// A peer's end is gone.
    #[error("rank {rank} is gone: its connection closed without a goodbye")]
    PeerLost { rank: Rank },
    /// A peer has left in good order, and so takes no part in this step.
    #[error("rank {rank} has left the world, so no step with it can be taken")]
    PeerLeft { rank: Rank },
    /// A rank has aborted the communicator whose step this is.
    #[error("rank {rank} aborted: {}", crate::reason::words(*reason))]
    Aborted {
        rank: Rank,
        /// As of [`Fault::Aborted`](crate::Fault::Aborted).
        reason: u32,
    },
    /// What needs one host was to be done in a world of several.
    #[error(
        "rank {rank} and rank {peer} are on different hosts: descriptors are passed between the \
         ranks of one host only, so the transports host, nvlink and pcie are for one host"
    )]
    OtherHost {
        rank: Rank,
        /// The first that is on another host.
        peer: Rank,
    },
    /// The rank that was to connect the survivors could not; it is not late.
    #[error("rank {rank} could not connect the ranks that are left: {source}")]
    Leader {
        rank: Rank,
        /// What the operating system said to it.
        source: io::Error,
    },
    /// A peer goes on in a group without this rank, which is in no other one then.
    #[error("rank {by} goes on without this rank")]
    GivenUp { by: Rank },
    /// The operating system refused something.
    #[error("{step}: {source}")]
    Io { step: &'static str, source: io::Error },
    /// A peer does not do what this rank does.
    #[error("rank {rank}: {detail}")]
    Protocol {
        /// The rank at fault, as this rank sees it.
        rank: Rank,
        detail: String,
    },
}

flux_core::debug_is_text!(ControlError);

/// The step in which the ranks that are left make a group.
pub(crate) const REGROUPING: &str = "regrouping";

/// Nobody is late, and there is no group: it takes all of them at one time.
pub(crate) fn came_and_went(leader: Rank) -> ControlError {
    let why = "all of them came, but did not wait for the same group at one time";
    ControlError::Leader { rank: leader, source: io::Error::new(io::ErrorKind::TimedOut, why) }
}

/// Ranks as errors name them: `rank 1`, `ranks 1, 2 and 5`.
pub fn ranks(ranks: &[Rank]) -> String {
    let Some((last, first)) = ranks.split_last() else {
        return "no rank".to_owned();
    };
    if first.is_empty() {
        return format!("rank {last}");
    }
    let first: Vec<String> = first.iter().map(Rank::to_string).collect();
    format!("ranks {} and {last}", first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_who_is_missing() {
        let text = |missing: &[u32]| {
            let missing = missing.iter().copied().map(Rank::new).collect();
            ControlError::Timeout { step: "barrier", missing }.to_string()
        };
        assert_eq!(text(&[1]), "barrier: the deadline passed while waiting for rank 1");
        assert_eq!(
            text(&[1, 2, 5]),
            "barrier: the deadline passed while waiting for ranks 1, 2 and 5"
        );
    }
}
