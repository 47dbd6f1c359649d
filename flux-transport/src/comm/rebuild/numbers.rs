//! Translates errors of a new group to the ranks' old numbers.
//!
//! Invariant: every rank field of an error is an old number. Free text is kept and marked as the
//! new group's.

use crate::bootstrap::control::ranks;
use crate::{ConnectError, ControlError};
use flux_core::Rank;

/// What numbers the ranks of a new group had, by their new ones.
pub(super) struct OldNumbers<'m> {
    members: &'m [Rank],
}

impl<'m> OldNumbers<'m> {
    pub(super) const fn new(members: &'m [Rank]) -> Self {
        Self { members }
    }

    /// One that the group does not have stays as it is.
    fn rank(&self, new: Rank) -> Rank {
        self.members.get(new.index()).copied().unwrap_or(new)
    }

    fn words(&self, words: String) -> String {
        let same = self.members.iter().zip(0..).all(|(old, new)| old.get() == new);
        if same {
            words
        } else {
            format!("{words} (numbered as in the new group, which is of {})", ranks(self.members))
        }
    }

    pub(super) fn connect_error(&self, error: ConnectError) -> ConnectError {
        match error {
            ConnectError::Control(error) => ConnectError::Control(self.control_error(error)),
            ConnectError::Disagreement { what, values } => {
                ConnectError::Disagreement { what, values: self.words(values) }
            }
            ConnectError::PeerFailed { rank, reason } => {
                ConnectError::PeerFailed { rank: self.rank(rank), reason: self.words(reason) }
            }
            ConnectError::Unusable { select, why } => {
                ConnectError::Unusable { select, why: self.words(why) }
            }
            ConnectError::GivenUp { by } => ConnectError::GivenUp { by: self.rank(by) },
            // Of this rank alone, or of a communicator of NCCL's, which counts its own ranks.
            ConnectError::Transport(_)
            | ConnectError::Variable(_)
            | ConnectError::Deadline { .. }
            | ConnectError::AcrossHosts { .. }
            | ConnectError::NoReplacement { .. }
            | ConnectError::Bootstrap(_)
            | ConnectError::Cuda(_)
            | ConnectError::Io { .. } => error,
        }
    }

    fn control_error(&self, error: ControlError) -> ControlError {
        match error {
            ControlError::Timeout { step, missing } => ControlError::Timeout {
                step,
                missing: missing.into_iter().map(|rank| self.rank(rank)).collect(),
            },
            ControlError::PeerLost { rank } => ControlError::PeerLost { rank: self.rank(rank) },
            ControlError::Aborted { rank, reason } => {
                ControlError::Aborted { rank: self.rank(rank), reason }
            }
            ControlError::PeerLeft { rank } => ControlError::PeerLeft { rank: self.rank(rank) },
            ControlError::OtherHost { rank, peer } => {
                ControlError::OtherHost { rank: self.rank(rank), peer: self.rank(peer) }
            }
            ControlError::Leader { rank, source } => {
                ControlError::Leader { rank: self.rank(rank), source }
            }
            ControlError::GivenUp { by } => ControlError::GivenUp { by: self.rank(by) },
            ControlError::Protocol { rank, detail } => {
                ControlError::Protocol { rank: self.rank(rank), detail: self.words(detail) }
            }
            ControlError::Io { .. } => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Select;

    const MEMBERS: [Rank; 3] = [Rank::new(0), Rank::new(2), Rank::new(3)];

    fn named(error: impl Into<ConnectError>) -> String {
        OldNumbers::new(&MEMBERS).connect_error(error.into()).to_string()
    }

    #[test]
    fn ranks_of_an_error_have_their_old_numbers() {
        let [one, two] = [1, 2].map(Rank::new);
        let io = || std::io::Error::other("no");
        assert!(
            named(ControlError::Timeout { step: "connecting", missing: vec![one, two] })
                .ends_with("waiting for ranks 2 and 3")
        );
        assert!(named(ControlError::PeerLost { rank: two }).starts_with("rank 3 is gone"));
        assert!(named(ControlError::PeerLeft { rank: two }).starts_with("rank 3 has left"));
        assert!(
            named(ControlError::OtherHost { rank: one, peer: two })
                .starts_with("rank 2 and rank 3 are")
        );
        assert!(
            named(ControlError::Leader { rank: one, source: io() }).starts_with("rank 2 could not")
        );
        assert!(named(ControlError::GivenUp { by: two }).starts_with("rank 3 says that"));
        assert!(
            named(ConnectError::PeerFailed { rank: two, reason: String::new() })
                .starts_with("rank 3 cannot connect")
        );
        assert!(
            named(ControlError::PeerLost { rank: Rank::new(7) }).starts_with("rank 7 is gone"),
            "the group has no such rank"
        );
    }

    #[test]
    fn words_that_name_ranks_say_by_which_numbers() {
        let whose = "(numbered as in the new group, which is of ranks 0, 2 and 3)";
        let detail = || "rank 1 is elsewhere".to_owned();
        let texts = [
            named(ControlError::Protocol { rank: Rank::new(1), detail: detail() }),
            named(ConnectError::Disagreement { what: "options", values: detail() }),
            named(ConnectError::PeerFailed { rank: Rank::new(1), reason: detail() }),
            named(ConnectError::Unusable { select: Select::NvLink, why: detail() }),
        ];
        for text in texts {
            assert!(text.ends_with(&format!("rank 1 is elsewhere {whose}")), "{text}");
        }
        let nobody_is_gone = [0, 1, 2].map(Rank::new);
        let error = ConnectError::Unusable { select: Select::NvLink, why: detail() };
        assert!(
            OldNumbers::new(&nobody_is_gone)
                .connect_error(error)
                .to_string()
                .ends_with("rank 1 is elsewhere")
        );
    }
}
