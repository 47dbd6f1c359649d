//! Time and the events to come.
//!
//! Invariant: time never goes back; events of one moment come in the order of planning.

use std::collections::BTreeMap;
use std::time::Duration;

/// Events to come, and the moment of the last event.
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

    /// Plans an event for `moment`, or for now if `moment` is past.
    pub(super) fn at(&mut self, moment: Duration, event: E) {
        self.to_come.insert((moment.max(self.now), self.planned), event);
        self.planned += 1;
    }

    /// Plans an event `time` from now.
    pub(super) fn after(&mut self, time: Duration, event: E) {
        self.at(self.now.saturating_add(time), event);
    }

    /// Takes the next event.
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
        assert_eq!(
            (clock.next(), clock.next(), clock.now()),
            (Some("first"), Some("second"), us(1))
        );
        clock.at(us(0), "now");
        assert_eq!((clock.next(), clock.now()), (Some("now"), us(1)), "time does not go back");
        assert_eq!((clock.next(), clock.next(), clock.now()), (Some("third"), None, us(2)));
    }
}
