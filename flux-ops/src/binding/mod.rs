//! What the bindings to Python and to C share: activations by name, errors by class, handles by
//! number, and lists in words.
//!
//! Invariant: nothing here decides how an op is executed, and no error loses its message.

mod activation;
mod error;
mod handles;

pub use activation::NamedActivation;
pub use error::{Class, Error};
pub use flux_core::words;
pub use handles::{Handles, OfProcess};
