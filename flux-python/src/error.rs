//! Errors as Python sees them.
//!
//! Invariant: an exception's class says what the caller can do, its message is that of the Rust
//! error, and it names the ranks at fault where the error does.

use flux_ops::CallError;
use flux_ops::binding::{self, Class};
use flux_transport::{Rank, WorldError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyTuple};

/// An error that becomes an exception of `flux_tp.errors`.
#[derive(Clone, Debug)]
pub(crate) struct Error(binding::Error);

impl Error {
    pub(crate) fn new(class: Class, message: impl Into<String>) -> Self {
        Self(binding::Error::new(class, message))
    }

    /// An operand or argument that cannot be used.
    pub(crate) fn operand(message: impl Into<String>) -> Self {
        Self(binding::Error::operand(message))
    }

    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }

    /// The exception.
    pub(crate) fn exception(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let binding::Error { class, message, ranks, reason } = &self.0;
        let class = py.import("flux_tp.errors")?.getattr(name(*class))?;
        let ranks = PyTuple::new(py, ranks.iter().copied().map(Rank::get))?.into_any();
        let reason = reason.into_pyobject(py)?.into_any();
        let named = [("ranks", ranks), ("reason", reason)].into_py_dict(py)?;
        Ok(class.call((message.as_str(),), Some(&named))?.unbind())
    }
}

/// The name of the exception's class.
const fn name(class: Class) -> &'static str {
    match class {
        Class::Operand => "OperandError",
        Class::Connect => "ConnectError",
        Class::Build => "BuildError",
        Class::Disagreed => "DisagreedError",
        Class::PeerLost => "PeerLostError",
        Class::PeerLeft => "PeerLeftError",
        Class::Timeout => "TimeoutError",
        Class::Aborted => "AbortedError",
        Class::Other => "FluxError",
    }
}

impl From<Error> for PyErr {
    fn from(error: Error) -> Self {
        Python::attach(|py| error.exception(py).map_or_else(|other| other, |value| Self::from_value(value.into_bound(py))))
    }
}

impl<E: Into<binding::Error>> From<E> for Error {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

/// The error of a call, by Python's names of the operands.
pub(crate) fn of_call(error: CallError) -> Error {
    match error {
        CallError::View { operand: "w", source } => Error::operand(format!("weight: {source}")),
        CallError::View { operand: "y", source } => Error::operand(format!("out: {source}")),
        error => error.into(),
    }
}

/// The error of joining the launcher's world.
pub(crate) fn of_world(error: WorldError) -> Error {
    match error {
        WorldError::NoLauncher => Error::new(
            Class::Connect,
            "no launcher's variables are set: start the program with torchrun, srun, mpirun or `flux-bench launch`, or give a torch \
             ProcessGroup as group",
        ),
        error => error.into(),
    }
}
