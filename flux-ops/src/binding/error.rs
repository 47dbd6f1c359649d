//! Errors by what a caller can do about them.
//!
//! Invariant: the message is that of the Rust error, and the ranks are those at fault, where the
//! error names them.

use crate::{BuildError, CallError};
use flux_transport::{ConnectError, ControlError, Failure, Fault, Rank, TransportError, WorldError};

/// What kind of error it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// An operand or argument cannot be used; nothing was launched.
    Operand,
    /// The ranks did not become a communicator.
    Connect,
    /// An op could not be built.
    Build,
    /// The ranks build or call different ops.
    Disagreed,
    /// A peer's process is gone.
    PeerLost,
    /// A peer has left in good order.
    PeerLeft,
    /// A peer did not come by the deadline.
    Timeout,
    /// A peer has given the communicator up.
    Aborted,
    /// Anything else, as the driver's errors.
    Other,
}

/// An error for another language.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What kind it is.
    pub class: Class,
    /// What happened, and what to do.
    pub message: String,
    /// The ranks at fault.
    pub ranks: Vec<Rank>,
    /// The reason of an abort.
    pub reason: Option<u32>,
}

impl Error {
    /// An error of no rank.
    pub fn new(class: Class, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), ranks: Vec::new(), reason: None }
    }

    /// An operand or argument that cannot be used.
    pub fn operand(message: impl Into<String>) -> Self {
        Self::new(Class::Operand, message)
    }

    fn of_ranks(class: Class, message: String, ranks: impl IntoIterator<Item = Rank>) -> Self {
        Self { ranks: ranks.into_iter().collect(), ..Self::new(class, message) }
    }

    /// The same with the message of the error that it is part of.
    fn within(self, message: String) -> Self {
        Self { message, ..self }
    }
}

impl From<&Fault> for Error {
    fn from(fault: &Fault) -> Self {
        let message = fault.to_string();
        match fault {
            Fault::Timeout { late, .. } => Self::of_ranks(Class::Timeout, message, late.iter().copied()),
            Fault::Disagreed { peer, .. } => Self::of_ranks(Class::Disagreed, message, [*peer]),
            Fault::PeerLost { rank, .. } => Self::of_ranks(Class::PeerLost, message, [*rank]),
            Fault::PeerLeft { rank, .. } => Self::of_ranks(Class::PeerLeft, message, [*rank]),
            Fault::Aborted { rank, reason, .. } => Self { reason: Some(*reason), ..Self::of_ranks(Class::Aborted, message, [*rank]) },
            _ => Self::new(Class::Other, message),
        }
    }
}

impl From<&Failure> for Error {
    fn from(failure: &Failure) -> Self {
        Self::from(&failure.fault).within(failure.to_string())
    }
}

impl From<&ControlError> for Error {
    fn from(error: &ControlError) -> Self {
        let message = error.to_string();
        match error {
            ControlError::Timeout { missing, .. } => Self::of_ranks(Class::Timeout, message, missing.iter().copied()),
            ControlError::PeerLost { rank } => Self::of_ranks(Class::PeerLost, message, [*rank]),
            ControlError::PeerLeft { rank } => Self::of_ranks(Class::PeerLeft, message, [*rank]),
            ControlError::Protocol { rank, .. } => Self::of_ranks(Class::Disagreed, message, [*rank]),
            _ => Self::new(Class::Other, message),
        }
    }
}

impl From<&TransportError> for Error {
    fn from(error: &TransportError) -> Self {
        let message = error.to_string();
        match error {
            TransportError::Broken { fault } => Self::from(fault).within(message),
            TransportError::Control(error) => error.into(),
            TransportError::Disagreement { .. } => Self::new(Class::Disagreed, message),
            TransportError::WrongStream { .. } => Self::operand(message),
            _ => Self::new(Class::Other, message),
        }
    }
}

impl From<TransportError> for Error {
    fn from(error: TransportError) -> Self {
        Self::from(&error)
    }
}

impl From<BuildError> for Error {
    fn from(error: BuildError) -> Self {
        let message = error.to_string();
        match &error {
            BuildError::Problem(_)
            | BuildError::Epsilon { .. }
            | BuildError::Option { .. }
            | BuildError::GatedRows { .. }
            | BuildError::GatedWeights { .. }
            | BuildError::GatedTile { .. } => Self::operand(message),
            BuildError::Disagreement { .. } => Self::new(Class::Disagreed, message),
            BuildError::Peer { rank, .. } => Self::of_ranks(Class::Build, message, [*rank]),
            BuildError::Transport { source, .. } => Self::from(source).within(message),
            _ => Self::new(Class::Build, message),
        }
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match &error {
            CallError::Transport(error) => error.into(),
            CallError::Fault(failure) => Self::from(&**failure),
            CallError::Launch(_) => Self::new(Class::Other, error.to_string()),
            _ => Self::operand(error.to_string()),
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        match &error {
            ConnectError::Control(control) => control.into(),
            ConnectError::Transport(transport) => transport.into(),
            ConnectError::Disagreement { .. } => Self::new(Class::Disagreed, error.to_string()),
            _ => Self::new(Class::Connect, error.to_string()),
        }
    }
}

impl From<WorldError> for Error {
    fn from(error: WorldError) -> Self {
        Self::new(Class::Connect, error.to_string())
    }
}
