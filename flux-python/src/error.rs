//! Errors as Python sees them.
//!
//! Invariant: an exception's class says what the caller can do, its message is that of the Rust
//! error, and it names the ranks at fault where the error does.

use flux_ops::{BuildError, CallError, TensorError};
use flux_transport::{ConnectError, ControlError, Failure, Fault, Rank, TransportError, WorldError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

/// An error that becomes an exception of `flux_tp.errors`.
#[derive(Clone, Debug)]
pub(crate) struct Error {
    /// Name of the class.
    class: &'static str,
    pub(crate) message: String,
    /// The ranks at fault.
    ranks: Vec<u32>,
    /// Of an abort.
    reason: Option<u32>,
}

impl Error {
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), ranks: Vec::new(), reason: None }
    }

    /// An operand or argument that cannot be used.
    pub(crate) fn operand(message: impl Into<String>) -> Self {
        Self::new("OperandError", message)
    }

    fn of_ranks(class: &'static str, message: String, ranks: impl IntoIterator<Item = Rank>) -> Self {
        Self { ranks: ranks.into_iter().map(Rank::get).collect(), ..Self::new(class, message) }
    }

    /// The same with the message of the error that it is part of.
    fn within(self, message: String) -> Self {
        Self { message, ..self }
    }

    /// The exception.
    pub(crate) fn exception(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let class = py.import("flux_tp.errors")?.getattr(self.class)?;
        let ranks = PyTuple::new(py, &self.ranks)?.into_any();
        let reason = self.reason.into_pyobject(py)?.into_any();
        let named = [("ranks", ranks), ("reason", reason)].into_py_dict(py)?;
        Ok(class.call((self.message.as_str(),), Some(&named))?.unbind())
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| error.exception(py).map_or_else(|other| other, |value| Self::from_value(value.into_bound(py))))
    }
}

impl From<&Fault> for Error {
    fn from(fault: &Fault) -> Self {
        let message = fault.to_string();
        match fault {
            Fault::Timeout { late, .. } => Self::of_ranks("TimeoutError", message, late.iter().copied()),
            Fault::Disagreed { peer, .. } => Self::of_ranks("DisagreedError", message, [*peer]),
            Fault::PeerLost { rank, .. } => Self::of_ranks("PeerLostError", message, [*rank]),
            Fault::PeerLeft { rank, .. } => Self::of_ranks("PeerLeftError", message, [*rank]),
            Fault::Aborted { rank, reason, .. } => Self { reason: Some(*reason), ..Self::of_ranks("AbortedError", message, [*rank]) },
            _ => Self::new("FluxError", message),
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
            ControlError::Timeout { missing, .. } => Self::of_ranks("TimeoutError", message, missing.iter().copied()),
            ControlError::PeerLost { rank } => Self::of_ranks("PeerLostError", message, [*rank]),
            ControlError::PeerLeft { rank } => Self::of_ranks("PeerLeftError", message, [*rank]),
            ControlError::Protocol { rank, .. } => Self::of_ranks("DisagreedError", message, [*rank]),
            _ => Self::new("FluxError", message),
        }
    }
}

impl From<&TransportError> for Error {
    fn from(error: &TransportError) -> Self {
        let message = error.to_string();
        match error {
            TransportError::Broken { fault } => Self::from(fault).within(message),
            TransportError::Control(error) => error.into(),
            TransportError::Disagreement { .. } => Self::new("DisagreedError", message),
            TransportError::WrongStream { .. } => Self::operand(message),
            _ => Self::new("FluxError", message),
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
            BuildError::Problem(_) | BuildError::Epsilon { .. } => Self::operand(message),
            BuildError::Disagreement { .. } => Self::new("DisagreedError", message),
            BuildError::Peer { rank, .. } => Self::of_ranks("BuildError", message, [*rank]),
            BuildError::Transport { source, .. } => Self::from(source).within(message),
            _ => Self::new("BuildError", message),
        }
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        match &error {
            CallError::Transport(error) => error.into(),
            CallError::Fault(failure) => Self::from(&**failure),
            CallError::Launch(_) => Self::new("FluxError", error.to_string()),
            _ => Self::operand(error.to_string()),
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        match &error {
            ConnectError::Control(control) => control.into(),
            ConnectError::Transport(transport) => transport.into(),
            ConnectError::Disagreement { .. } => Self::new("DisagreedError", error.to_string()),
            _ => Self::new("ConnectError", error.to_string()),
        }
    }
}

impl From<WorldError> for Error {
    fn from(error: WorldError) -> Self {
        let message = match &error {
            WorldError::NoLauncher => "no launcher's variables are set: start the program with torchrun, srun, mpirun or \
                                       `flux-bench launch`, or give a torch ProcessGroup as group"
                .to_owned(),
            other => other.to_string(),
        };
        Self::new("ConnectError", message)
    }
}

/// A view of memory that is no operand.
pub(crate) fn of_view(operand: &'static str) -> impl Fn(TensorError) -> Error {
    move |error| Error::operand(format!("{operand}: {error}"))
}
