//! Epochs anywhere on the circle of 2^32 numbers.

use flux_core::signal::Epoch;
use proptest::prelude::*;

/// Epochs on both sides of the wrap, and others.
fn epoch() -> impl Strategy<Value = Epoch> {
    prop_oneof![
        (0..8_u32).prop_map(|n| Epoch::new(n.wrapping_sub(4))),
        any::<u32>().prop_map(Epoch::new)
    ]
}

proptest! {
    #[test]
    fn consecutive_calls_use_the_two_halves_in_turn(e in epoch()) {
        prop_assert_eq!(e.half() + e.next().half(), 1);
        prop_assert_eq!(e.next().before(1), e);
    }
}
