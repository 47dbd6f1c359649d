//! Steps that fail on every rank if they fail on one.
//!
//! Invariant: all ranks see the same answers and judge them alike.

use super::error::ControlError;
use super::step::{At, Collective, Step};
use flux_core::Rank;
use rustix::io::Errno;
use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Instant;

/// Why the ranks do not go on.
#[derive(Debug)]
pub(crate) enum Disagreed {
    Control(ControlError),
    /// A rank cannot go on: the first that said so.
    Refused {
        rank: Rank,
        reason: String,
    },
}

impl From<ControlError> for Disagreed {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

const OFFER: u8 = 0;
const REFUSAL: u8 = 1;
/// Bytes of a reason that are told.
const MAX_REASON: usize = 8 << 10;

/// Exchanges each rank's offer, or the reason why it has none; returns the offers by rank.
pub(crate) fn agree<T: AsRef<[u8]>, E: Display>(
    steps: Collective<'_>,
    own: &Result<T, E>,
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, Disagreed> {
    agree_at(steps, Step::Memory, own, deadline)
}

/// A reason that every exchange takes: a compiler's log may be longer than that.
pub fn shortened(mut reason: String) -> String {
    if reason.len() > MAX_REASON {
        reason.truncate(reason.floor_char_boundary(MAX_REASON));
        reason.push_str(" ... (cut)");
    }
    reason
}

pub(crate) fn agree_at<T: AsRef<[u8]>, E: Display>(
    steps: Collective<'_>,
    step: Step,
    own: &Result<T, E>,
    deadline: Instant,
) -> Result<Vec<Vec<u8>>, Disagreed> {
    let reason;
    let (tag, body) = match own {
        Ok(offer) => (OFFER, offer.as_ref()),
        Err(error) => {
            reason = shortened(error.to_string());
            (REFUSAL, reason.as_bytes())
        }
    };
    let mut message = Vec::with_capacity(1 + body.len());
    message.push(tag);
    message.extend_from_slice(body);
    let answers = steps.exchange_at(step, &message, deadline)?;
    answers
        .into_iter()
        .zip(steps.control().world().ranks())
        .map(|(mut answer, rank)| match answer.first() {
            Some(&OFFER) => {
                answer.remove(0);
                Ok(answer)
            }
            Some(&REFUSAL) => Err(Disagreed::Refused {
                rank,
                reason: String::from_utf8_lossy(&answer[1..]).into_owned(),
            }),
            _ => Err(ControlError::Protocol {
                rank,
                detail: "it sent an answer of an unknown kind".to_owned(),
            }
            .into()),
        })
        .collect()
}

impl Collective<'_> {
    /// Passes duplicates of `fds` to every peer on this host, as [`ControlPlane::exchange_fds`],
    /// then confirms that all ranks could take them.
    ///
    /// # Errors
    /// As [`exchange_at`](Self::exchange_at); on all ranks if one may not open so many descriptors.
    pub(crate) fn exchange_fds(
        self,
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> Result<Vec<Vec<OwnedFd>>, Disagreed> {
        let control = self.control();
        let own = At { step: Step::Memory, communicator: self.communicator() };
        let given = control
            .exchange_with_fds(self.communicator(), &own.encode(), fds, deadline)
            .map_err(|error| own.late(error))?;
        let cut = given.iter().any(|given| given.cut);
        let payloads = control
            .world()
            .ranks()
            .zip(given)
            .map(|(rank, given)| own.payload(rank, given.payload).map(|_| given.fds));
        let fds = payloads.collect::<Result<_, _>>()?;
        let taken = if cut { Err(Errno::MFILE) } else { Ok([]) };
        agree(self, &taken, deadline)?;
        Ok(fds)
    }
}

/// Returns this rank's value if every rank has one. Otherwise its own failure, or a peer's.
pub(crate) fn together<T, E: Display + From<Disagreed>>(
    steps: Collective<'_>,
    deadline: Instant,
    own: Result<T, E>,
) -> Result<T, E> {
    let answers = agree(steps, &own.as_ref().map(|_| []), deadline);
    let value = own?;
    answers?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TransportError;
    use crate::bootstrap::control::{ControlPlane, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;

    #[test]
    fn reasons_are_cut_between_characters() {
        assert_eq!(shortened("short".to_owned()), "short");
        for letter in ["a", "\u{e4}", "\u{20ac}"] {
            let cut = shortened(letter.repeat(MAX_REASON + 1));
            assert!(
                cut.len() <= MAX_REASON + 10
                    && cut.ends_with(" ... (cut)")
                    && cut.starts_with(letter),
                "{letter}"
            );
        }
    }

    #[test]
    fn one_refusal_reaches_every_rank() {
        let ends = LocalControl::world_of(WorldSize::new(3).unwrap());
        let deadline = Instant::now() + AMPLE;
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let steps = Collective::new(end, 0);
                    let offer = [7, u8::try_from(end.rank().get()).unwrap()];
                    assert_eq!(
                        agree(steps, &Ok::<_, String>(offer), deadline).unwrap(),
                        [[7, 0], [7, 1], [7, 2]]
                    );
                    let own = if end.rank().get() == 1 { Err("no room") } else { Ok(offer) };
                    match agree(steps, &own, deadline).unwrap_err() {
                        Disagreed::Refused { rank, reason } => {
                            assert_eq!((rank.get(), reason.as_str()), (1, "no room"));
                        }
                        Disagreed::Control(error) => panic!("{error}"),
                    }
                    assert_eq!(together(steps, deadline, Ok::<_, TransportError>(5)).unwrap(), 5);
                    let own =
                        if end.rank().get() == 1 { Err(TransportError::NotDrained) } else { Ok(5) };
                    match (end.rank().get(), together(steps, deadline, own).unwrap_err()) {
                        (1, TransportError::NotDrained) => {}
                        (_, TransportError::PeerFailed { rank, reason }) => {
                            assert_eq!(
                                (rank.get(), reason),
                                (1, TransportError::NotDrained.to_string())
                            );
                        }
                        (rank, other) => panic!("rank {rank}: {other}"),
                    }
                });
            }
        });
    }
}
