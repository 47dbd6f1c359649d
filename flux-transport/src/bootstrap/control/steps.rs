//! Serialises the steps that several threads of a rank take in one world.
//!
//! Invariant: one thread at a time is in a step, and steps are numbered in order. After the first
//! failure, also a turn that does not come in time, nobody takes another. Nobody takes a step of a
//! communicator that is aborted.

use super::error::ControlError;
use super::inquiry::{mask_of, ranks_of};
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
    /// Whether steps of a communicator have ended, and by whom.
    fn aborted(&self, communicator: u32) -> Option<ControlError> {
        let found = self.aborted.iter().find(|abort| abort.communicator == communicator)?;
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
        (step, communicator): (&'static str, u32),
        deadline: Instant,
        take: impl FnOnce(u64) -> Result<T, ControlError>,
    ) -> Result<T, ControlError> {
        let left = deadline.saturating_duration_since(Instant::now());
        let busy = |state: &mut State| {
            state.taken && state.failed.is_none() && state.aborted(communicator).is_none()
        };
        let (mut state, _) = self
            .ended
            .wait_timeout_while(locked(&self.state), left, busy)
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(aborted) = state.aborted(communicator) {
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
                0 => mask_of([rank]),
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

    /// Ends the steps of a communicator, if it is the first to do so. Whoever waits in one must be
    /// woken.
    pub(crate) fn abort(&self, communicator: u32, by: Rank, reason: u32) {
        let mut state = locked(&self.state);
        if state.aborted(communicator).is_none() {
            state.aborted.push(Abort { communicator, by, reason });
        }
        self.ended.notify_all();
    }

    /// Why a step of a communicator ends before its deadline.
    pub(crate) fn aborted(&self, communicator: u32) -> Option<ControlError> {
        locked(&self.state).aborted(communicator)
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
                steps.take(OWN, ("exchange", 0), after(60 * SECOND), |number| {
                    steps.awaits([Rank::new(3)]);
                    taken.send(()).unwrap();
                    is_let_go.recv_timeout(60 * SECOND).unwrap();
                    Ok(number)
                })
            });
            is_taken.recv_timeout(60 * SECOND).unwrap();
            match steps.take(OWN, ("barrier", 0), after(SECOND / 20), |_| Ok(())).unwrap_err() {
                ControlError::Timeout { step: "barrier", missing } => {
                    assert_eq!(missing, [Rank::new(3)]);
                }
                other => panic!("{other}"),
            }
            // Its peers take that step next, so nobody here takes another, whatever becomes of the
            // one in progress.
            let refused = || {
                steps
                    .take(OWN, ("exchange", 0), after(60 * SECOND), |_| Ok(()))
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
    fn steps_of_several_threads_are_numbered_one_after_the_other() {
        let (steps, taken) = (Steps::default(), Mutex::new(Vec::new()));
        let hundred = || {
            for _ in 0..100 {
                let note = |number| {
                    taken.try_lock().unwrap().push(number);
                    Ok(())
                };
                steps.take(OWN, ("barrier", 0), after(60 * SECOND), note).unwrap();
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(hundred))));
        assert_eq!(taken.into_inner().unwrap(), (0..400).collect::<Vec<_>>());
    }
}
