//! The purpose and the communicator of an exchange, so that ranks at different steps find out.
//!
//! Invariant: every message begins with its step and its communicator's number. All ranks see all
//! of them, so all go on or none does, and they stay in step.

use super::error::ControlError;
use super::plane::ControlPlane;
use flux_core::Rank;
use std::fmt;
use std::time::Instant;

/// Most bytes of one rank at a step, on every control plane: a socket takes them in one message.
pub(crate) const MAX_PAYLOAD: usize = 64 * 1024;

/// Bytes before them that say which step it is.
pub(crate) const STEP_BYTES: usize = 5;

/// What ranks exchange messages for. All ranks of a step name the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Step {
    /// A caller's own exchange.
    Exchange,
    /// A caller's barrier.
    Barrier,
    /// The first step of connecting.
    Connect,
    /// The first step of growing the workspace.
    Reserve,
    /// A later step of either.
    Memory,
    /// The first step of building an op.
    Build,
    /// The second: whether each rank can, again as long as one compiles.
    Ready,
}

impl Step {
    const ALL: [Self; 7] = [
        Self::Exchange,
        Self::Barrier,
        Self::Connect,
        Self::Reserve,
        Self::Memory,
        Self::Build,
        Self::Ready,
    ];

    /// In words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exchange => "exchange",
            Self::Barrier => "barrier",
            Self::Connect => "connecting",
            Self::Reserve => "growing the workspace",
            Self::Memory => "connecting, or growing the workspace",
            Self::Build => "building an op",
            Self::Ready => "the end of building an op",
        }
    }
}

/// One rank's end of the steps of one communicator. All ranks take the steps of all communicators
/// in one order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Collective<'a> {
    control: &'a dyn ControlPlane,
    communicator: u32,
}

impl<'a> Collective<'a> {
    /// Steps of this communicator, as [`GaveUp::communicator`](super::GaveUp::communicator) counts.
    pub(crate) const fn new(control: &'a dyn ControlPlane, communicator: u32) -> Self {
        Self { control, communicator }
    }

    pub(super) const fn communicator(self) -> u32 {
        self.communicator
    }

    /// What carries them.
    pub(crate) fn control(self) -> &'a dyn ControlPlane {
        self.control
    }

    /// Gives `payload` to every rank at this step; returns what each gave, by rank.
    ///
    /// # Errors
    /// The control plane's, and [`ControlError::Protocol`] with the first rank at another step or
    /// communicator; of this rank, before it takes the step, for more than [`MAX_PAYLOAD`] bytes.
    pub(crate) fn exchange_at(
        self,
        step: Step,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, ControlError> {
        let Self { control, communicator } = self;
        let own = At { step, communicator };
        if payload.len() > MAX_PAYLOAD {
            let detail = format!(
                "{}: {} bytes are too many for a step, the limit is {MAX_PAYLOAD}",
                step.name(),
                payload.len()
            );
            return Err(ControlError::Protocol { rank: control.rank(), detail });
        }
        let message = [&own.encode()[..], payload].concat();
        let said = control
            .exchange_in(communicator, &message, deadline)
            .map_err(|error| own.late(error))?;
        control.world().ranks().zip(said).map(|(rank, said)| own.payload(rank, said)).collect()
    }
}

/// What ranks that are at different steps have not kept to.
const ONE_ORDER: &str = "; every rank takes the steps of all communicators of a world, which are \
                         numbered from 0 as they were connected, in one order";

#[derive(Clone, Copy, Debug)]
pub(super) struct At {
    pub(super) step: Step,
    pub(super) communicator: u32,
}

impl At {
    pub(super) fn encode(self) -> [u8; STEP_BYTES] {
        let [n0, n1, n2, n3] = self.communicator.to_le_bytes();
        [self.step as u8, n0, n1, n2, n3]
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let &[own, n0, n1, n2, n3] = message.first_chunk::<STEP_BYTES>()?;
        let step = Step::ALL.into_iter().find(|&step| step as u8 == own)?;
        Some(Self { step, communicator: u32::from_le_bytes([n0, n1, n2, n3]) })
    }

    /// What `rank` said besides that it is here, too.
    pub(super) fn payload(self, rank: Rank, mut said: Vec<u8>) -> Result<Vec<u8>, ControlError> {
        if said.starts_with(&self.encode()) {
            return Ok(said.split_off(STEP_BYTES));
        }
        let theirs = Self::decode(&said)
            .map_or_else(|| "a step that is not known".to_owned(), |at| at.to_string());
        Err(ControlError::Protocol {
            rank,
            detail: format!("it is at: {theirs}, this rank is at: {self}{ONE_ORDER}"),
        })
    }

    /// Names this step where ranks did not come to it in time.
    pub(super) fn late(self, error: ControlError) -> ControlError {
        match error {
            ControlError::Timeout { missing, .. } => {
                ControlError::Timeout { step: self.step.name(), missing }
            }
            other => other,
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (communicator {})", self.step.name(), self.communicator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::{Disagreed, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;

    fn soon() -> Instant {
        Instant::now() + AMPLE
    }

    fn refused<T: fmt::Debug>(at: u32, theirs: At, own: At, said: Result<T, ControlError>) {
        match said.unwrap_err() {
            ControlError::Protocol { rank, detail } => {
                assert_eq!(
                    (rank, detail),
                    (
                        Rank::new(at),
                        format!("it is at: {theirs}, this rank is at: {own}{ONE_ORDER}")
                    )
                );
            }
            error => panic!("{error}"),
        }
    }

    #[test]
    fn ranks_at_different_steps_are_told_who_is_where_and_can_go_on() {
        let ends = LocalControl::world_of(WorldSize::new(3).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let (odd, seven) = (end.rank().get() == 2, Collective::new(end, 7));
                    let of_seven = |step| At { step, communicator: 7 };
                    for (most, other) in
                        Step::ALL.into_iter().zip(Step::ALL.into_iter().cycle().skip(1))
                    {
                        let (own, theirs, at) =
                            if odd { (other, most, 0) } else { (most, other, 2) };
                        refused(
                            at,
                            of_seven(theirs),
                            of_seven(own),
                            seven.exchange_at(own, b"hi", soon()),
                        );
                        assert_eq!(seven.exchange_at(most, b"hi", soon()).unwrap(), [b"hi"; 3]);
                        // The same step of another communicator is no less another.
                        let ((own, at), theirs) = if odd { ((256, 0), 7) } else { ((7, 2), 256) };
                        refused(
                            at,
                            At { step: most, communicator: theirs },
                            At { step: most, communicator: own },
                            Collective::new(end, own).exchange_at(most, b"hi", soon()),
                        );
                        assert_eq!(seven.exchange_at(most, b"", soon()).unwrap(), [b""; 3]);
                        let memory = |communicator| At { step: Step::Memory, communicator };
                        let said =
                            Collective::new(end, own).exchange_fds(&[], soon()).map_err(|error| {
                                match error {
                                    Disagreed::Control(error) => error,
                                    refused @ Disagreed::Refused { .. } => panic!("{refused:?}"),
                                }
                            });
                        refused(at, memory(theirs), memory(own), said);
                        assert!(seven.exchange_fds(&[], soon()).unwrap().iter().all(Vec::is_empty));
                    }
                    for garbled in [&b"\xffhi, all"[..], b"\x05", b""] {
                        let said = if odd {
                            end.exchange(garbled, soon())
                        } else {
                            seven.exchange_at(Step::Build, b"", soon())
                        };
                        assert_eq!(said.is_err(), !odd, "{said:?}");
                    }
                });
            }
        });
    }

    #[test]
    fn a_timeout_says_which_step_it_was() {
        let ends = LocalControl::world_of(WorldSize::new(2).unwrap());
        let late =
            Collective::new(&ends[0], 0).exchange_at(Step::Build, b"", Instant::now()).unwrap_err();
        assert_eq!(
            late.to_string(),
            "building an op: the deadline passed while waiting for rank 1"
        );
    }
}
