//! Whether a communicator works, and what the ranks were doing when it did not.
//!
//! Invariant: whoever is told of a fault is told of the same one; the first to look asks the peers about it, and tells them whom this rank has given up, or who has been
//! before it did: it is not for its own sake that it comes no more. So it does of a peer in another op, which not all may find before this rank carries nothing any more.

use super::failure::{GATHER, Verdicts, late as late_ranks};
use super::{CallRecord, Communicator, Failure, Inner, RankReport};
use crate::control::{GaveUp, mask_of};
use crate::{Fault, TransportError};
use flux_core::layout::fault;
use std::time::Instant;

impl Communicator {
    pub(super) fn working(&self) -> Result<(), TransportError> {
        self.inner.health.status().map_err(|fault| TransportError::Broken { fault: self.gathered(fault).fault.clone() })
    }

    /// Whether the communicator still works, as far as is known, all that peers have said included. Waits for no device and no call: one under
    /// way may yet fail. A collective step that failed, as a build or a barrier, is no fault by itself: calls go on, and what says so is the next step, which
    /// is refused where the ranks are out of step, until they rebuild. Where it finds the first fault it asks the peers what they do, for at most 0.2 s, and tells them.
    ///
    /// # Errors
    /// The first fault. It stays, and no result of a call that had not finished before can be used; see [`rebuild`](Self::rebuild).
    pub fn status(&self) -> Result<(), Fault> {
        self.inner.world.control().settle();
        self.inner.health.status().map_err(|fault| self.gathered(fault).fault.clone())
    }

    /// The first fault with what every rank was doing; `None` while the communicator works. As [`status`](Self::status).
    pub fn failure(&self) -> Option<&Failure> {
        self.inner.world.control().settle();
        self.inner.health.status().err().map(|fault| self.gathered(fault))
    }

    /// This rank's last calls, oldest first, at most 64.
    pub fn calls(&self) -> Vec<CallRecord> {
        self.inner.flight.last()
    }

    /// How far what carries this rank's messages has come, in words, where the transport knows. Waits for nothing, so it can be asked while the device is stuck.
    pub fn progress(&self) -> Option<String> {
        self.inner.health.transport().progress()
    }

    /// The failure behind the first fault; the first to come here asks the peers, and tells them who was given up.
    pub(super) fn gathered(&self, fault: Fault) -> &Failure {
        let Inner { health, world, failure, .. } = &*self.inner;
        failure.get_or_init(|| {
            let (control, number) = (world.control(), world.communicator());
            let answers = control.ask(number, Instant::now() + GATHER);
            let ranks: Vec<RankReport> = world.size().ranks().zip(&answers).map(|(rank, answer)| RankReport::new(rank, answer)).collect();
            let Some(record) = health.own_record() else {
                if let Some(what) = health.said() {
                    control.give_up(&what);
                }
                return Failure { fault, ranks };
            };
            // In this order: whom a rank gave up is known before it counts as one that spoke. What it said before it answered, or left, has been heard.
            let spoke = health.spoke();
            let late = late_ranks(&record, &ranks, Verdicts { spoke, given_up: health.given_up() });
            if !late.is_empty() || record.code == fault::DISAGREED {
                health.exclude(late.iter().copied());
                control.give_up(&GaveUp { communicator: number, late: mask_of(late.iter().copied()), record });
            }
            // What was found first stays, but for who is late.
            let fault = if late.is_empty() { fault } else { Fault::from_record(&record, late) };
            Failure { fault, ranks }
        })
    }
}
