//! The signal protocol.

mod epoch;

pub use epoch::Epoch;
