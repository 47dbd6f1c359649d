//! Epochs are compared exactly, wherever on the circle of 2^32 numbers they lie.

use flux_core::signal::Epoch;
use proptest::prelude::*;

/// Epochs on both sides of the wrap, and anywhere.
fn epoch() -> impl Strategy<Value = Epoch> {
    prop_oneof![(0..8_u32).prop_map(|n| Epoch::new(n.wrapping_sub(4))), any::<u32>().prop_map(Epoch::new)]
}

proptest! {
    #[test]
    fn an_epoch_is_reached_by_itself_and_as_far_ahead_as_a_writer_can_be(e in epoch(), lead in 0..=Epoch::MAX_LEAD) {
        let seen = e.get().wrapping_add(lead);
        prop_assert!(e.reached_by(seen));
        prop_assert_eq!(Epoch::new(seen).before(lead), e);
    }

    #[test]
    fn a_word_raised_any_other_number_of_calls_ago_does_not_satisfy_a_wait(
        e in epoch(),
        ago in prop_oneof![1..16_u32, (0..16_u32).prop_map(|n| (1 << 31) - 8 + n), 1..u32::MAX - Epoch::MAX_LEAD],
    ) {
        prop_assert!(!e.reached_by(e.before(ago).get()));
    }

    #[test]
    fn consecutive_calls_use_the_two_halves_in_turn(e in epoch()) {
        prop_assert_eq!(e.half() + e.next().half(), 1);
        prop_assert_eq!(e.next().before(1), e);
    }
}
