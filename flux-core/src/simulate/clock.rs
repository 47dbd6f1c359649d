//! Time, and what happens next.
//!
//! Invariant: time never goes back, and of events of one moment the one that was planned first
//! comes first.

use std::collections::BTreeMap;
use std::time::Duration;

/// Events to come, and the moment of the last one that has been.
#[derive(Debug)]
pub(super) struct Clock<E> {
    now: Duration,
    planned: u64,
    to_come: BTreeMap<(Duration, u64), E>,
}

impl<E> Clock<E> {
    pub(super) const fn new() -> Self {
        Self { now: Duration::ZERO, planned: 0, to_come: BTreeMap::new() }
    }

    pub(super) const fn now(&self) -> Duration {
        self.now
    }

    /// Plans an event for `moment`, or for now if that is over.
    pub(super) fn at(&mut self, moment: Duration, event: E) {
        self.to_come.insert((moment.max(self.now), self.planned), event);
        self.planned += 1;
    }

    /// The same, so much later than now.
    pub(super) fn after(&mut self, time: Duration, event: E) {
        self.at(self.now.saturating_add(time), event);
    }

    /// Goes on to the next event.
    pub(super) fn next(&mut self) -> Option<E> {
        let ((moment, _), event) = self.to_come.pop_first()?;
        self.now = moment;
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_then_as_they_were_planned() {
        let mut clock = Clock::new();
        let us = Duration::from_micros;
        clock.after(us(2), "third");
        clock.after(us(1), "first");
        clock.after(us(1), "second");
        assert_eq!((clock.next(), clock.next(), clock.now()), (Some("first"), Some("second"), us(1)));
        clock.at(us(0), "now");
        assert_eq!((clock.next(), clock.now()), (Some("now"), us(1)), "what is over is not gone back to");
        assert_eq!((clock.next(), clock.next(), clock.now()), (Some("third"), None, us(2)));
    }
}
