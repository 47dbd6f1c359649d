//! The errors of an op: when it is built ([`BuildError`]) and when it is called ([`CallError`]).
//!
//! Invariant: an error that is not a fault leaves the communicator and the op usable.

mod build;
mod call;

pub use build::{BuildError, Requests};
pub use call::CallError;

flux_core::debug_is_text!(BuildError, CallError);
