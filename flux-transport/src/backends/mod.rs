//! The backends: how ranks share memory, and what moves data between them.
//!
//! Invariant: a backend knows nothing of the communicator, which sees it as a [`Transport`].

mod connect_error;
pub(crate) mod device;
mod error;
mod fault;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod held;
pub(crate) mod host;
mod jobs;
mod kind;
pub(crate) mod mixed;
pub(crate) mod nccl;
mod nodes;
pub(crate) mod nvlink;
mod offer;
mod options;
pub(crate) mod pcie;
mod registry;
mod transport;
mod view;

pub use connect_error::ConnectError;
pub(crate) use device::limits::failing;
pub use error::TransportError;
pub use fault::{Fault, Wait};
pub use held::HeldBytes;
pub use jobs::{
    CollectiveKind, Job, LibraryCollective, MessageRounds, RowTransfers, Source, StagedTransfer,
    Started,
};
pub use kind::{Capabilities, Mover, PeerStores, TransportKind};
pub(crate) use nodes::{asked, grouped};
pub use options::{Options, ParseSelectError, Select};
pub(crate) use transport::Transport;
pub use view::WorkspaceView;
