//! Tile programs: a rank's whole schedule as a list of records.
//!
//! Invariant: a program made by [`TileProgram::build`] passes [`check::verify`] together with those
//! of the other ranks. Every reader relies on what is verified there, and on nothing else.

mod build;
pub mod check;
mod display;
mod error;
mod mainloop;
mod messages;
mod places;
mod record;
mod rounds;
pub mod route;
mod schedule;
#[cfg(test)]
mod tests;
mod tile_program;

pub(crate) use build::MOST_REDUCTIONS;
pub use error::ScheduleError;
pub(crate) use mainloop::most_partials;
pub use mainloop::{IN_MAINLOOP_GAP, IN_MAINLOOP_LAG};
pub use messages::{Channels, groups, in_batches_of};
pub use places::Places;
pub(crate) use places::widest_group;
pub use record::{Await, Forward, MAX_ITEMS, NONE, RowSource, Sink, Transfer, WorkItem};
pub use rounds::{End, Round};
pub use schedule::{Chunk, MAX_STREAM_K_WORKERS, Schedule};
pub use tile_program::TileProgram;
