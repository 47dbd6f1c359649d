//! How the ranks of a broken communicator get a working one.
//!
//! Invariant: the new communicator shares only the device's context with the old one, so a rank
//! that was left out can do no harm. Errors name ranks by their old numbers.

mod numbers;
#[cfg(test)]
mod tests;

use super::communicator::{Communicator, Inner};
use super::connect::{connect, on_own_thread};
use super::failure::GATHER;
use crate::ConnectError;
use crate::backends::failing;
use crate::bootstrap::START;
use crate::bootstrap::control::{
    Answer, ControlPlane, GaveUp, REGROUPING, Regrouped, mask_of, ranks_of,
};
use crate::reason;
use crate::{ControlError, TransportError, World};
use flux_core::Rank;
use flux_core::layout::FaultRecord;
use numbers::OldNumbers;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Instant;

/// Who takes part in the new communicator. All ranks that do say the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rebuild {
    /// The ranks that are neither gone nor given up, renumbered in order. On one host only.
    Survivors,
    /// All ranks of the launch under their numbers. A new process with the same variables replaces
    /// each lost one. Also for stragglers that are alive.
    Whole,
}

impl Communicator {
    /// Makes a new communicator of the survivors, or of all ranks with replacements, with the same
    /// options. All of them rebuild at the same time. This one is broken from then on; drop it with
    /// its ops, which hold its memory.
    ///
    /// Ops are built again on the new one (`op.rebuild(&comm)`), and graphs captured again.
    ///
    /// ```
    /// use flux_transport::{Communicator, ConnectError, Rebuild, Select, World};
    /// let worlds = World::local(3)?;
    /// std::thread::scope(|scope| {
    ///     let rank = |world: World| {
    ///         let comm = Communicator::connect_blocking(&world, Select::Host)?;
    ///         if comm.rank().get() == 1 {
    ///             comm.abort(42);
    ///         }
    ///         // Nobody is gone, so all three survive.
    ///         let comm = comm.rebuild_blocking(Rebuild::Survivors)?;
    ///         assert_eq!((comm.world_size().get(), comm.status()), (3, Ok(())));
    ///         Ok::<(), ConnectError>(())
    ///     };
    ///     let spawn = |world| scope.spawn(move || rank(world));
    ///     let ranks: Vec<_> = worlds.into_iter().map(spawn).collect();
    ///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics"))
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Cancellation
    /// As of [`connect`](Self::connect): a dropped future leaves its thread to rebuild.
    ///
    /// # Errors
    /// [`ConnectError`], with ranks by their numbers in this communicator.
    /// [`ConnectError::GivenUp`] is final: the others go on without this rank.
    ///
    /// [`ControlError::Timeout`] names stragglers that the next attempt leaves out: ranks without
    /// an answer at the [deadline](Self::deadline), and ranks that do not come for 20 s more. In a
    /// later step it names ranks of which only those without an answer are left out.
    ///
    /// [`ControlError::Leader`] and [`TransportError::NoTurn`] give nobody up: mend the cause and
    /// rebuild again.
    pub async fn rebuild(&self, how: Rebuild) -> Result<Self, ConnectError> {
        self.inner.turns.free_of_this_thread()?;
        let comm = self.clone();
        on_own_thread(self.rank(), move || comm.rebuild_blocking(how)).await
    }

    /// As [`rebuild`](Self::rebuild), on this thread.
    ///
    /// # Errors
    /// [`ConnectError`], as there.
    pub fn rebuild_blocking(&self, how: Rebuild) -> Result<Self, ConnectError> {
        let hosts = self.inner.world.hosts().count();
        // All ranks see the same hosts, so each refuses it before anything breaks.
        if how == Rebuild::Survivors && hosts > 1 {
            return Err(ConnectError::AcrossHosts { hosts });
        }
        self.stop()?;
        match how {
            Rebuild::Survivors => {
                let Regrouped { control, members } = self.survivors()?;
                // A leader that was stopped meanwhile may make a group that the others have left.
                let named = |error| {
                    let left_out_by = self.inner.world.control().left_out_by();
                    left_out_by.map_or_else(
                        || OldNumbers::new(&members).connect_error(error),
                        |by| ConnectError::GivenUp { by },
                    )
                };
                self.connect_in(control)
                    .map_err(named)
                    .inspect_err(|error| self.stopped_in_connecting(error))
            }
            Rebuild::Whole => self.connect_in(self.whole()?),
        }
    }

    fn connect_in(&self, control: Arc<dyn ControlPlane>) -> Result<Self, ConnectError> {
        let inner = &self.inner;
        let world = inner.world.moved(control).connecting();
        connect(&world, &inner.options, Some(inner.world.lineage())).inspect_err(|_| disown(&world))
    }

    /// Breaks this communicator, tells the peers, and waits until this rank's calls have ended.
    fn stop(&self) -> Result<(), TransportError> {
        let inner = &self.inner;
        inner.turns.free_of_this_thread()?;
        if self.status().is_ok() {
            self.give_up(reason::REBUILT);
            // A wait that failed meanwhile was the first fault; asking about it finds the
            // straggler.
            let _ = self.status();
        }
        let _turn = self.turn()?;
        if let Err(error) = inner.health.transport().drain() {
            tracing::warn!(
                %error,
                rank = %self.rank(),
                "calls were under way when their communicator was rebuilt",
            );
        }
        Ok(())
    }

    fn survivors(&self) -> Result<Regrouped, ConnectError> {
        // A peer's calls may take as long to end, once they have failed.
        self.regrouped_by(Instant::now() + failing(self.deadline()))
    }

    /// Meets the survivors. A rank that neither comes by the deadline nor answers is given up. A
    /// rank that answers is waited for until `limit`: its calls may still have to end.
    fn regrouped_by(&self, limit: Instant) -> Result<Regrouped, ConnectError> {
        let Inner { health, world, .. } = &*self.inner;
        self.not_given_up()?;
        let mut until = self.until();
        loop {
            let without: Vec<Rank> = ranks_of(health.given_up()).collect();
            let regrouped = world.control().regroup(&without, until);
            until = self.until().min(limit);
            // Said before a peer was gone, and so heard by now: see `disown`.
            self.not_given_up()?;
            let error = match regrouped {
                Ok(regrouped) => return Ok(regrouped),
                Err(error) => error,
            };
            let (doubted, all_came) = match &error {
                ControlError::Timeout { missing, .. } => (mask_of(missing.iter().copied()), false),
                // A rank that was stopped meanwhile would stand in the way of every attempt.
                ControlError::Leader { source, .. } if source.kind() == ErrorKind::TimedOut => {
                    (!health.given_up(), true)
                }
                _ => return Err(error.into()),
            };
            let late = match doubted & self.silent() {
                0 if all_came => return Err(error.into()),
                0 if Instant::now() < limit => continue,
                0 => doubted,
                silent => silent,
            };
            health.exclude(ranks_of(late));
            return Err(ControlError::Timeout {
                step: REGROUPING,
                missing: ranks_of(late).collect(),
            }
            .into());
        }
    }

    fn not_given_up(&self) -> Result<(), ConnectError> {
        self.inner.health.given_up_by().map_or(Ok(()), |by| Err(ConnectError::GivenUp { by }))
    }

    /// Gives up ranks that missed a step of the new group, if they do not answer now. Others may
    /// have waited for such a rank, so one more attempt is better than blaming them.
    fn stopped_in_connecting(&self, error: &ConnectError) {
        if let ConnectError::Control(ControlError::Timeout { missing, .. }) = error {
            self.inner.health.exclude(ranks_of(mask_of(missing.iter().copied()) & self.silent()));
        }
    }

    /// The peers (bits) in the world that do not answer for this communicator when asked twice:
    /// they are stopped, or have dropped it. A rebuilding rank answers.
    fn silent(&self) -> u32 {
        let world = &self.inner.world;
        let silent = || {
            let answers = world.control().ask(world.communicator(), Instant::now() + GATHER);
            let silent =
                world.size().ranks().zip(answers).filter(|(_, answer)| *answer == Answer::Silent);
            mask_of(silent.map(|(rank, _)| rank)) & !mask_of([self.rank()])
        };
        match silent() {
            0 => 0,
            first => first & silent(),
        }
    }

    fn whole(&self) -> Result<Arc<dyn ControlPlane>, ConnectError> {
        let world: &World = &self.inner.world;
        if let Some(joining) = world.joining_again() {
            // A replacement takes as long to start as any rank of a launch.
            let deadline = Instant::now() + START.max(self.deadline());
            let joined = pollster::block_on(joining.join(deadline));
            // Who is alive and did not come may have gone on with the survivors.
            let left_out_by =
                || self.inner.health.given_up_by().or_else(|| world.control().left_out_by());
            return joined.map_err(|error| {
                left_out_by().map_or_else(|| error.into(), |by| ConnectError::GivenUp { by })
            });
        }
        let Regrouped { control, .. } = world.control().regroup(&[], self.until())?;
        match world.size().get() - control.world().get() {
            0 => Ok(control),
            lost => Err(ConnectError::NoReplacement { lost, world: world.size() }),
        }
    }
}

/// Leaves a group that did not connect. Members for whom it did connect learn that this rank goes
/// on from the old group.
fn disown(world: &World) {
    let others = world.size().ranks().filter(|&rank| rank != world.rank());
    world.control().give_up(&GaveUp {
        communicator: 0,
        late: mask_of(others),
        record: FaultRecord::default(),
    });
}
