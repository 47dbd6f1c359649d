//! What the bindings to Python and to C share: ops whose kind and element type are known at run
//! time, errors by class, and handles by number.
//!
//! Invariant: nothing here decides how an op is executed, and no error loses its message.

mod activation;
mod error;
mod handles;
mod op;

pub use activation::NamedActivation;
pub use error::{Class, Error};
pub use handles::{Handles, OfProcess};
pub use op::{AnyOp, OpSpec, RawOperands, RawWeight};
