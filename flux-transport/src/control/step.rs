//! What an exchange is for, so that ranks that are at different steps find out instead of taking each other's words for their own.
//!
//! Invariant: every message of a communicator, of one that is being made too, begins with its step. All ranks see all of them, so either all go on or none does, and after
//! a mismatch they are still in step: each has taken one.

use super::{ControlError, ControlPlane};
use std::time::Instant;

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
    /// The second: whether each rank can.
    Ready,
}

impl Step {
    const ALL: [Self; 7] = [Self::Exchange, Self::Barrier, Self::Connect, Self::Reserve, Self::Memory, Self::Build, Self::Ready];

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

/// Gives `payload` to every rank at this step, and returns what each gave, by rank.
///
/// # Errors
/// The control plane's, and [`ControlError::Protocol`] with the first rank that is at another step.
pub(crate) fn exchange_at(control: &dyn ControlPlane, step: Step, payload: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>, ControlError> {
    let mut message = Vec::with_capacity(1 + payload.len());
    message.push(step as u8);
    message.extend_from_slice(payload);
    let said = control.exchange(&message, deadline).map_err(|error| match error {
        ControlError::Timeout { missing, .. } => ControlError::Timeout { step: step.name(), missing },
        other => other,
    })?;
    let body = |(rank, mut said): (_, Vec<u8>)| {
        if said.first() == Some(&(step as u8)) {
            said.remove(0);
            return Ok(said);
        }
        let theirs = Step::ALL.into_iter().find(|&step| said.first() == Some(&(step as u8))).map_or("a step that is not known", Step::name);
        Err(ControlError::Protocol { rank, detail: format!("it is at: {theirs}, this rank is at: {}", step.name()) })
    };
    control.world().ranks().zip(said).map(body).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::LocalControl;
    use flux_core::{Rank, WorldSize};
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn ranks_at_different_steps_are_told_who_is_where_and_can_go_on() {
        let ends = LocalControl::world_of(WorldSize::new(3).unwrap());
        std::thread::scope(|scope| {
            for end in &ends {
                scope.spawn(move || {
                    let odd = end.rank().get() == 2;
                    for (most, other) in Step::ALL.into_iter().zip(Step::ALL.into_iter().cycle().skip(1)) {
                        let (own, theirs, at) = if odd { (other, most, 0) } else { (most, other, 2) };
                        match exchange_at(end, own, b"hi", soon()).unwrap_err() {
                            ControlError::Protocol { rank, detail } => {
                                assert_eq!(rank, Rank::new(at));
                                assert_eq!(detail, format!("it is at: {}, this rank is at: {}", theirs.name(), own.name()));
                            }
                            error => panic!("{error}"),
                        }
                        assert_eq!(exchange_at(end, most, b"hi", soon()).unwrap(), [b"hi"; 3]);
                    }
                    let said =
                        if odd { end.exchange(b"\xffhi", soon()).map(drop) } else { exchange_at(end, Step::Build, b"", soon()).map(drop) };
                    assert_eq!(said.is_err(), !odd, "{said:?}");
                });
            }
        });
    }

    #[test]
    fn a_timeout_says_which_step_it_was() {
        let ends = LocalControl::world_of(WorldSize::new(2).unwrap());
        let late = exchange_at(&ends[0], Step::Build, b"", Instant::now()).unwrap_err();
        assert_eq!(late.to_string(), "building an op: the deadline passed while waiting for rank 1");
    }
}
