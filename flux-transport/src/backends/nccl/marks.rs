//! Events that bound the collectives of sequential calls, for whom no kernel waits.
//!
//! Invariant: a mark is noted before anything of its collective is enqueued. So the oldest open
//! mark is that of the collective that the device comes to next, or is in. Nobody asks the driver
//! under the lock. A gather has its mark at its start, as the kernel behind it stamps its end. A
//! sum has it at its end, as the kernel ahead stamps its start: the event that ends its call.
//!
//! Calls in good order are followed by stamps alone. For a mark that stays the oldest for a moment
//! the driver is [asked](super::collective_stall).

use crate::sync::locked;
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, CudaError, Event};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Which end of a collective a mark is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Start,
    End,
}

/// What is known of calls without the driver, by their numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamps {
    /// The last sequential call whose kernel has ended.
    pub(super) closed: Epoch,
    /// The last call whose rounds a side stream has come to.
    pub(super) rounds: Epoch,
    /// The last call that was made.
    pub(super) made: Epoch,
}

impl Stamps {
    /// Whether `call` is `from` or between that and the last call: not one that is long over.
    const fn reaches(self, call: Epoch, from: Epoch) -> bool {
        call.get().wrapping_sub(from.get()) <= self.made.get().wrapping_sub(from.get())
    }

    /// Whether call `a` was made after call `b`, neither of which is after the last.
    pub(super) fn is_later(self, a: Epoch, b: Epoch) -> bool {
        let age = |call: Epoch| self.made.get().wrapping_sub(call.get());
        age(a) < age(b)
    }

    /// Whether the collective of `epoch` with such a mark is over. Calls end in order.
    const fn are_past(self, epoch: Epoch, bound: Bound) -> bool {
        if matches!(bound, Bound::Start) && self.reaches(self.closed, epoch) {
            return true;
        }
        let next = epoch.next();
        epoch.get() != self.made.get()
            && (self.reaches(self.closed, next) || self.reaches(self.rounds, next))
    }
}

/// The mark of a collective that is not known to be over.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    pub(super) epoch: Epoch,
    pub(super) bound: Bound,
    event: Arc<Event>,
    /// Whether the event is this mark already.
    pub(super) recorded: bool,
}

impl Mark {
    /// Whether the device is past it. Asks the driver.
    pub(super) fn is_passed(&self) -> Result<bool, CudaError> {
        Ok(self.recorded && self.event.is_done()?)
    }
}

/// The marks of a rank, oldest first.
#[derive(Debug, Default)]
pub(super) struct Marks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    open: VecDeque<Mark>,
    spare: Vec<Arc<Event>>,
}

impl Marks {
    /// Notes the mark of call `epoch`. Its event is to be recorded, and then
    /// [said to be](Self::recorded).
    pub(super) fn open(
        &self,
        device: &CudaDevice,
        epoch: Epoch,
        bound: Bound,
    ) -> Result<Arc<Event>, CudaError> {
        let spare = locked(&self.0).spare.pop();
        let event = spare.map_or_else(|| Event::new(device).map(Arc::new), Ok)?;
        let mark = Mark { epoch, bound, event: Arc::clone(&event), recorded: false };
        locked(&self.0).open.push_back(mark);
        Ok(event)
    }

    /// Says that the newest mark's event was recorded.
    pub(super) fn recorded(&self) {
        if let Some(mark) = locked(&self.0).open.back_mut() {
            mark.recorded = true;
        }
    }

    /// The oldest mark, without those of collectives that are over.
    pub(super) fn oldest(&self, stamps: Stamps) -> Option<Mark> {
        let State { open, spare } = &mut *locked(&self.0);
        while let Some(mark) = open.pop_front_if(|mark| stamps.are_past(mark.epoch, mark.bound)) {
            spare.push(mark.event);
        }
        open.front().cloned()
    }

    /// Forgets the mark of call `epoch`, whose collective is over, if it is the oldest.
    pub(super) fn close(&self, epoch: Epoch) {
        let State { open, spare } = &mut *locked(&self.0);
        spare.extend(open.pop_front_if(|mark| mark.epoch == epoch).map(|mark| mark.event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Call by call what kernels and side streams have stamped.
    #[test]
    fn a_collective_is_over_by_its_own_stamp_or_one_of_a_later_call() {
        for first in [7, u32::MAX - 1] {
            let call = |n: u32| Epoch::new(first.wrapping_add(n));
            let past = |bound, closed: u32, rounds: u32, made: u32| {
                let stamps =
                    Stamps { closed: call(closed), rounds: call(rounds), made: call(made) };
                stamps.are_past(call(1), bound)
            };
            // The kernel behind a gather ends after it, that ahead of a sum before it.
            assert!(!past(Bound::Start, 0, 0, 1) && past(Bound::Start, 1, 0, 1));
            assert!(!past(Bound::End, 0, 0, 1) && !past(Bound::End, 1, 0, 1));
            assert!(!past(Bound::End, 1, 0, 9) && past(Bound::End, 2, 0, 9));
            // Messages of a later call begin after it.
            assert!(past(Bound::End, 1, 2, 2) && past(Bound::Start, 0, 3, 3));
            // Stamps of calls that are long over say nothing, however old they are.
            for old in [1_u32 << 30, 1 << 31, u32::MAX - 9] {
                let old = 0_u32.wrapping_sub(old).wrapping_sub(20);
                assert!(!past(Bound::End, 1, old, 5) && !past(Bound::Start, old, 0, 5));
                assert!(!past(Bound::End, old, old, 5));
            }
        }
    }
}
