//! Ranks of several nodes: peer memory within each, NCCL's messages between them, and nothing
//! crosses twice.
//!
//! Invariant: a rank reaches the memory of its node peers, and exchanges messages with the ranks of its
//! rail only. What crosses nodes is passed on, or was added up, within a node; who waits for it
//! waits for a word that only a whole chunk brings.
//!
//! ```text
//! connect   identities -> a communicator for each rail, proven -> memory of each node's ranks, mapped there, proven -> outbox
//! a call    begin | exchange: fork two streams | kernel | finish: join both
//!           rail    round by round [wait for the chunk's flag] send and receive, raise the own signal
//!           node peers   own rows to the node peers; after each round what came, to the node peers, with the word that came
//! a fault   as on nccl
//! ```
//!
//! **Room.** As on nvlink, when a rank's kernel of call `e - 1` is done, all of its node peers have
//! ended call `e - 2`, whose half call `e` uses: it has heard from each in call `e - 1`. A rank's
//! streams are forked after that kernel, so what they and its kernel write at node peers overwrites
//! nothing that is read. What messages write lies in the own memory, and is asked for after that
//! kernel too.

mod check;
mod members;
mod passing;
mod transport;
mod workspace;

pub(crate) use members::Members;
pub(crate) use transport::Mixed;
