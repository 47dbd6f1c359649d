//! Serialises the steps that several threads of a rank take in one world.
//!
//! Invariant: one thread at a time is in a step, and steps are numbered in order. After the first
//! failure, also a turn that does not come in time, nobody takes another. An abort ends the steps
//! of its communicator; one that is made to rebuild does not end those that its rank has taken part
//! in.

use super::error::ControlError;
use super::inquiry::{mask_of, ranks_of};
use crate::reason;
use crate::sync::locked;
use flux_core::Rank;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

#[derive(Debug, Default)]
pub(crate) struct Steps {
    state: Mutex<State>,
    ended: Condvar,
    /// Whom (bits) the step in progress waits for.
    awaited: AtomicU32,
}

#[derive(Debug, Default)]
struct State {
    number: u64,
    /// Whether a thread is in the step before it.
    taken: bool,
    failed: Option<String>,
    aborted: Vec<Abort>,
}

#[derive(Clone, Copy, Debug)]
struct Abort {
    communicator: u32,
    by: Rank,
    reason: u32,
}

impl State {
    /// Whether a step of a communicator has ended that waits for `missing`, and by whom.
    fn aborted(&self, communicator: u32, missing: u32) -> Option<ControlError> {
        let ends = |abort: &&Abort| {
            abort.communicator == communicator
                && (abort.reason != reason::REBUILT || mask_of([abort.by]) & missing != 0)
        };
        let found = self.aborted.iter().find(ends)?;
        Some(ControlError::Aborted { rank: found.by, reason: found.reason })
    }
}

struct InStep<'s>(&'s Steps);

impl Steps {
    /// Runs `take` as the next step, with its number, once no other thread is in one. It ends when
    /// [`aborted`](Self::aborted) says so of its communicator.
    ///
    /// # Errors
    /// Those of `take`; [`ControlError::Timeout`] if another thread's step does not end in time;
    /// [`ControlError::Aborted`] of an aborted communicator; [`ControlError::Protocol`] after a
    /// failure.
    pub(crate) fn take<T>(
        &self,
        rank: Rank,
        step: &'static str,
        communicator: u32,
        deadline: Instant,
        take: impl FnOnce(u64) -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let own = mask_of([rank]);
        let busy = |state: &mut State| {
            state.taken && state.failed.is_none() && state.aborted(communicator, own).is_none()
        };
        let (mut state, _) = self
            .ended
            .wait_timeout_while(locked(&self.state), left, busy)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(aborted) = state.aborted(communicator, own) {
            return Err(aborted);
        }
        if let Some(first) = &state.failed {
            let detail = format!(
                "an earlier step of this rank failed, so it is out of step with its peers, in all \
                 communicators of the world: rebuild them on every rank, or make a new world \
                 ({first})"
            );
            return Err(ControlError::Protocol { rank, detail });
        }
        if state.taken {
            drop(state);
            let awaited = match self.awaited.load(Ordering::Relaxed) {
                // It is on its way, or at its end.
                0 => own,
                awaited => awaited,
            };
            return Err(
                self.fail(ControlError::Timeout { step, missing: ranks_of(awaited).collect() })
            );
        }
        let number = state.number;
        (state.number, state.taken) = (number + 1, true);
        drop(state);
        let _in_step = InStep(self);
        take(number).map_err(|error| self.fail(error))
    }

    /// Ends the steps of a communicator, if it is the first abort by that rank. Whoever waits in
    /// one must be woken.
    pub(crate) fn abort(&self, communicator: u32, by: Rank, reason: u32) {
        let mut state = locked(&self.state);
        let known = |abort: &Abort| (abort.communicator, abort.by) == (communicator, by);
        if !state.aborted.iter().any(known) {
            state.aborted.push(Abort { communicator, by, reason });
        }
        self.ended.notify_all();
    }

    /// Why a step of a communicator ends before its deadline, for a rank that waits for `missing`
    /// (bits), itself among them. What these ranks gave before they aborted has come.
    pub(crate) fn aborted(&self, communicator: u32, missing: u32) -> Option<ControlError> {
        locked(&self.state).aborted(communicator, missing)
    }

    /// Notes whom the step in progress waits for from now on.
    pub(crate) fn awaits(&self, ranks: impl IntoIterator<Item = Rank>) {
        self.awaited.store(mask_of(ranks), Ordering::Relaxed);
    }

    /// Notes a failure, if it is the first.
    fn fail(&self, error: ControlError) -> ControlError {
        locked(&self.state).failed.get_or_insert_with(|| error.to_string());
        self.ended.notify_all();
        error
    }
}

impl Drop for InStep<'_> {
    fn drop(&mut self) {
        let Self(steps) = self;
        steps.awaits([]);
        locked(&steps.state).taken = false;
        steps.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    const OWN: Rank = Rank::new(0);
    const SECOND: Duration = Duration::from_secs(1);

    fn after(time: Duration) -> Instant {
        Instant::now() + time
    }

    #[test]
    fn a_step_waits_for_another_threads_no_longer_than_its_own_deadline_and_names_whom_that_waits_for()
     {
        let steps = Steps::default();
        let (taken, is_taken) = channel();
        let (let_go, is_let_go) = channel();
        std::thread::scope(|scope| {
            let steps = &steps;
            let long = scope.spawn(move || {
                steps.take(OWN, "exchange", 0, after(60 * SECOND), |number| {
                    steps.awaits([Rank::new(3)]);
                    taken.send(()).unwrap();
                    is_let_go.recv_timeout(60 * SECOND).unwrap();
                    Ok(number)
                })
            });
            is_taken.recv_timeout(60 * SECOND).unwrap();
            match steps.take(OWN, "barrier", 0, after(SECOND / 20), |_| Ok(())).unwrap_err() {
                ControlError::Timeout { step: "barrier", missing } => {
                    assert_eq!(missing, [Rank::new(3)]);
                }
                other => panic!("{other}"),
            }
            // Its peers take that step next, so nobody here takes another, whatever becomes of the
            // one in progress.
            let refused = || {
                steps
                    .take(OWN, "exchange", 0, after(60 * SECOND), |_| Ok(()))
                    .unwrap_err()
                    .to_string()
            };
            let text = refused();
            assert!(
                text.starts_with("rank 0: ")
                    && text.ends_with("(barrier: the deadline passed while waiting for rank 3)"),
                "{text}"
            );
            let_go.send(()).unwrap();
            assert_eq!(long.join().unwrap().unwrap(), 0);
            assert_eq!(refused(), text);
        });
    }

    #[test]
    fn a_rank_that_rebuilds_ends_no_step_that_it_has_taken_part_in() {
        let (steps, [left, other]) = (Steps::default(), [1, 2].map(Rank::new));
        steps.abort(7, left, reason::REBUILT);
        assert!(steps.aborted(7, mask_of([other])).is_none());
        assert!(steps.aborted(7, mask_of([left, other])).is_some());
        assert!(steps.aborted(8, mask_of([left])).is_none());
        let taken = |communicator| steps.take(OWN, "barrier", communicator, after(60 * SECOND), Ok);
        assert!(taken(7).is_ok(), "it may have what it waits for");
        // Of a caller's abort, whoever the step waits for.
        steps.abort(7, other, 3);
        assert!(steps.aborted(7, mask_of([left])).is_some() && taken(7).is_err());
        // Of this rank's own.
        steps.abort(8, OWN, reason::REBUILT);
        assert!(taken(8).is_err());
    }

    #[test]
    fn steps_of_several_threads_are_numbered_one_after_the_other() {
        let (steps, taken) = (Steps::default(), Mutex::new(Vec::new()));
        let hundred = || {
            for _ in 0..100 {
                let note = |number| {
                    taken.try_lock().unwrap().push(number);
                    Ok(())
                };
                steps.take(OWN, "barrier", 0, after(60 * SECOND), note).unwrap();
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(hundred))));
        assert_eq!(taken.into_inner().unwrap(), (0..400).collect::<Vec<_>>());
    }
}
