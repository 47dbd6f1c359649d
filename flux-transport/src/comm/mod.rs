//! The communicator: one rank's handle to all ranks' memory, and the order of its calls.

mod attachments;
mod automatic;
mod call;
mod communicator;
mod connect;
mod departures;
mod failure;
mod flight;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod health;
mod listener;
#[cfg(test)]
mod mock;
mod open;
mod rebuild;
mod root_cause;
mod status;
mod straggler;
mod terms;
mod turn;

pub use attachments::CommunicatorMemory;
pub use call::Call;
pub use communicator::Communicator;
pub use failure::{Doing, Failure, RankReport};
pub use flight::{CallRecord, CallState, Label};
pub use rebuild::Rebuild;
