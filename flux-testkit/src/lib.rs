//! What a result must be, in fp64, and what tests make results of.
//!
//! Invariant: nothing here comes from what it checks. By [`mod@reference`] `flux-bench` checks its
//! rows, too; the rest is for tests.

mod case;
pub mod reference;
#[cfg(feature = "strategies")]
pub mod strategies;

pub use case::{Case, Expected, Sums, Values};
