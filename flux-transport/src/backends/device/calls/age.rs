//! Keeps the words that streams wait for recent.
//!
//! Invariant: the driver compares words by the sign of a difference modulo 2^32, so no awaited word
//! may be more than about 2^30 calls old.

use flux_core::signal::Epoch;
use flux_cuda::CudaError;

/// How far ahead of awaited epochs words are set to release waits. Also the maximal age of a word.
pub(crate) const AHEAD: u32 = 1 << 30;

/// The call before which all words of a workspace were last brought up to date.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refreshed(Epoch);

impl Refreshed {
    pub(crate) const fn new(first: Epoch) -> Self {
        Self(first)
    }

    /// Before call `epoch` writes a word: has `fill` bring all words to the call before it, if due.
    pub(crate) fn keep(
        &mut self,
        epoch: Epoch,
        fill: impl FnOnce(u32) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        if epoch.get().wrapping_sub(self.0.get()) >= AHEAD {
            fill(epoch.before(1).get())?;
            self.0 = epoch;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_word_is_ever_taken_for_ahead(
            first: u32,
            calls in prop::collection::vec(1u32..1 << 29, 1..40),
        ) {
            let mut refreshed = Refreshed::new(Epoch::new(first));
            // A word that no call writes.
            let (mut word, mut epoch) = (first.wrapping_sub(1), first);
            for more in calls {
                epoch = epoch.wrapping_add(more);
                refreshed
                    .keep(Epoch::new(epoch), |value| {
                        word = value;
                        Ok(())
                    })
                    .unwrap();
                prop_assert!(
                    word.wrapping_sub(epoch).cast_signed() < 0,
                    "{word} is taken for {epoch}"
                );
                prop_assert!(
                    word.wrapping_sub(epoch.wrapping_add(AHEAD)).cast_signed() < 0,
                    "what ends waits is ahead of it"
                );
            }
        }
    }

    #[test]
    fn what_could_not_be_filled_is_due_again() {
        let (mut refreshed, due) =
            (Refreshed::new(Epoch::FIRST), Epoch::new(Epoch::FIRST.get() + AHEAD));
        let refused =
            || Err(CudaError::Call { call: "cuMemsetD32Async", code: 1, name: String::new() });
        refreshed.keep(due.before(1), |_| refused()).unwrap();
        refreshed.keep(due, |_| refused()).unwrap_err();
        refreshed
            .keep(due, |value| {
                assert_eq!(value, due.before(1).get());
                Ok(())
            })
            .unwrap();
        refreshed.keep(due.next(), |_| refused()).unwrap();
    }
}
