//! Which ranks have left a communicator in good order, and after which call.
//!
//! Invariant: earlier calls end whoever leaves; later ones end on no rank. A rank gives up once it
//! has begun such a call and knows of the departure, whichever comes last.

use crate::sync::locked;
use flux_core::Rank;
use flux_core::rank::MAX_WORLD;
use flux_core::signal::Epoch;
use std::sync::Mutex;

#[derive(Debug, Default)]
pub(super) struct Departures {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// By rank, the last call of those that have left.
    last: [Option<Epoch>; MAX_WORLD],
    /// The last call that this rank has begun.
    begun: Option<Epoch>,
}

impl Known {
    /// A rank that has left before the last call that this one has begun.
    fn missing(&self) -> Option<Rank> {
        let begun = self.begun?;
        let before =
            |last: Epoch| last != begun && begun.get().wrapping_sub(last.get()) <= u32::MAX / 2;
        (0..)
            .map(Rank::new)
            .zip(self.last)
            .find_map(|(rank, last)| last.is_some_and(before).then_some(rank))
    }
}

impl Departures {
    /// Notes that `rank` left after call `last`. Returns a rank that left before a begun call.
    pub(super) fn note(&self, rank: Rank, last: Epoch) -> Option<Rank> {
        let mut known = locked(&self.known);
        *known.last.get_mut(rank.index())? = Some(last);
        known.missing()
    }

    /// Takes note that this rank begins call `epoch`. Returns a rank that has left before it.
    pub(super) fn begin(&self, epoch: Epoch) -> Option<Rank> {
        let mut known = locked(&self.known);
        known.begun = Some(epoch);
        known.missing()
    }

    /// This rank has taken back call `epoch`, the last that it has begun.
    pub(super) fn take_back(&self, epoch: Epoch) {
        locked(&self.known).begun = Some(epoch.before(1));
    }

    /// The last call that this rank has begun, and not taken back.
    pub(super) fn begun(&self) -> Option<Epoch> {
        locked(&self.known).begun
    }

    pub(super) fn last_of(&self, rank: Rank) -> Option<Epoch> {
        locked(&self.known).last.get(rank.index()).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn calls_that_a_rank_has_made_before_it_left_need_it_no_more() {
        let departures = Departures::default();
        let rank = Rank::new(2);
        assert_eq!(
            (departures.note(rank, Epoch::new(7)), departures.last_of(rank)),
            (None, Some(Epoch::new(7)))
        );
        assert_eq!(
            [6, 7, 8].map(|call| departures.begin(Epoch::new(call))),
            [None, None, Some(rank)]
        );
        assert_eq!(departures.last_of(Rank::new(0)), None);
    }

    #[test]
    fn a_call_that_is_taken_back_was_not_begun() {
        let departures = Departures::default();
        assert_eq!(
            (departures.begun(), departures.begin(Epoch::new(3)), departures.begun()),
            (None, None, Some(Epoch::new(3)))
        );
        departures.take_back(Epoch::new(3));
        assert_eq!(
            (departures.begun(), departures.note(Rank::new(1), Epoch::new(2))),
            (Some(Epoch::new(2)), None)
        );
    }

    #[test]
    fn of_several_the_one_that_has_left_before_the_call_is_named() {
        let departures = Departures::default();
        assert_eq!(departures.begin(Epoch::new(0)), None);
        assert_eq!(
            departures.note(Rank::new(0), Epoch::new(0)),
            None,
            "it has made the last call, too"
        );
        assert_eq!(
            departures.note(Rank::new(1), Epoch::new(u32::MAX)),
            Some(Rank::new(1)),
            "numbers wrap"
        );
    }

    proptest! {
        /// Whatever comes first, and however the numbers wrap.
        #[test]
        fn a_call_is_missed_when_it_comes_after_the_last(
            first: u32,
            last in 0..9_u32,
            begun in 0..9_u32,
            told_first: bool,
        ) {
            let [last, begun] = [last, begun].map(|calls| Epoch::new(first.wrapping_add(calls)));
            let (departures, rank) = (Departures::default(), Rank::new(3));
            let found = if told_first {
                prop_assert_eq!(departures.note(rank, last), None);
                departures.begin(begun)
            } else {
                prop_assert_eq!(departures.begin(begun), None);
                departures.note(rank, last)
            };
            prop_assert_eq!(found.is_some(), begun.get().wrapping_sub(first) > last.get().wrapping_sub(first));
        }
    }
}
