//! Ranks of several nodes: peer memory within each node, NCCL's messages between them. Nothing
//! crosses twice. A GEMM-AllReduce is sequential: NCCL's AllReduce on a communicator of all ranks.
//!
//! Invariant: a rank reaches the memory of its node peers, and exchanges messages with the ranks
//! of its rail only. What crosses nodes is passed on, or is added up, within a node. A rank that
//! waits for it waits for a word that only a whole chunk brings.
//!
//! ```text
//! connect   identities, a communicator of all ranks and one for each rail, the memory of each
//!           node's ranks; each proven
//! a call    begin, start: fork two streams, kernel, launched, finish: join both
//!   rail    round by round: wait for the chunk's flag, send and receive, raise the own signal
//!   local   own rows to node peers; after each round what came, with the word that came
//! sums      of a GEMM-AllReduce, as on nccl, on the caller's stream
//! a fault   as on nccl
//! ```
//!
//! **Buffers.** When a rank's kernel of call `e - 1` is done, all of its node peers have ended
//! call `e - 2`, whose half call `e` uses: each has announced call `e - 1`. A rank's streams are
//! forked after that kernel, so they overwrite nothing at node peers that is still read.

mod check;
mod members;
mod passing;
mod transport;
mod workspace;

pub(crate) use members::Members;
pub(crate) use transport::Mixed;
