//! Errors as Python sees them.
//!
//! Invariant: an exception's class says what the caller can do. Its message names ops, operands and
//! arguments as Python does. It has the ranks at fault where the error has them.

use crate::operand;
use crate::ops::Kind;
use flux_ops::binding::{self, Class};
use flux_ops::{BuildError, CallError, Operand};
use flux_transport::{ConnectError, Failure, Rank, TransportError, WorldError};
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
        Python::attach(|py| {
            error
                .exception(py)
                .map_or_else(|other| other, |value| Self::from_value(value.into_bound(py)))
        })
    }
}

/// An error whose message needs Python's words alone.
macro_rules! in_words_of_python {
    ($($error:ty),*) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                let error = binding::Error::from(error);
                Self(binding::Error { message: in_python(&error.message), ..error })
            }
        })*
    };
}

in_words_of_python!(binding::Error, ConnectError, TransportError, WorldError, &Failure);

impl From<BuildError> for Error {
    fn from(error: BuildError) -> Self {
        let in_python = match error {
            BuildError::Epsilon { value } => binding::Error::operand(format!(
                "eps = {value} of norm: give a finite number, 0 or above"
            )),
            BuildError::GatedWeights { .. } => binding::Error::operand(
                "weights of gates and ups are read as [n, k], and weight is a transposed view: \
                 give weight as a contiguous [n, k]",
            ),
            BuildError::SeveralWeights { .. } => binding::Error::operand(
                "several weights are read as [n, k]: leave out transposed, and give weights that \
                 are no transposed views",
            ),
            BuildError::NoInvariantPlan { problem, transport } => {
                let what = format!(
                    "no plan of {problem} over the {transport} transport adds up alike for every m"
                );
                let remedy = "call flux_tp.init without batch_invariant, or with another transport";
                binding::Error::new(Class::Build, format!("{what}: {remedy}"))
            }
            error => error.into(),
        };
        in_python.into()
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        Self::of_call(error, 1)
    }
}

impl Error {
    /// The error of a call with so many weights.
    pub(crate) fn of_call(mut error: CallError, weights: usize) -> Self {
        let named = |operand| named(operand, weights);
        match &mut error {
            CallError::Shape { operand, .. }
            | CallError::View { operand, .. }
            | CallError::Location { operand, .. }
            | CallError::NotDeviceMemory { operand, .. } => *operand = named(operand),
            CallError::Overlap { output, operand, .. } => {
                (*output, *operand) = (named(output), named(operand));
            }
            _ => {}
        }
        let in_python = match error {
            CallError::NotPrepared { m } => binding::Error::operand(format!(
                "a call with m = {m} cannot be captured: its program is not on the device; call \
                 flux_tp.prepare(..., rows=[{m}]) before the capture"
            )),
            CallError::TooManyRows { m, max_m } => binding::Error::operand(format!(
                "m = {m} is above max_m = {max_m}: call flux_tp.init with a larger max_m, or split \
                 the call"
            )),
            error => error.into(),
        };
        in_python.into()
    }
}

/// An operand's name in Python, of a call with so many weights.
fn named(given: &'static str, weights: usize) -> &'static str {
    Operand::named(given).map_or(given, |(known, index)| operand::name(known, index, weights))
}

/// What other faces call by names that Python has not.
const PHRASES: [(&str, &str); 4] = [
    ("; rebuild it", "; call flux_tp.init and make modules anew on every rank, or restart the job"),
    (", rebuild it on every rank", ": call flux_tp.init and make modules anew on every rank"),
    ("build ops with a smaller max_m", "call flux_tp.init with a smaller max_m"),
    ("deadline = ", "timeout = "),
];

/// A message in Python's words.
fn in_python(message: &str) -> String {
    let message = PHRASES
        .iter()
        .fold(message.to_owned(), |message, (theirs, ours)| message.replace(theirs, ours));
    named_ops(&message)
}

/// A message with Python's names of the ops. A longer name, as a kernel's, stays.
fn named_ops(message: &str) -> String {
    let is_of_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = message.split_inclusive(|c| !is_of_word(c)).map(|part| {
        let word = part.trim_end_matches(|c| !is_of_word(c));
        let named = Kind::ALL.into_iter().find(|(_, kind)| kind.op().name() == word);
        named.map_or_else(|| part.to_owned(), |(name, _)| part.replace(word, name))
    });
    words.collect()
}

/// The error of joining the launcher's world.
pub(crate) fn of_world(error: WorldError) -> Error {
    match error {
        WorldError::NoLauncher => Error::new(
            Class::Connect,
            "no launcher's variables are set: start the program with torchrun, srun, mpirun or \
             `flux-bench launch`, or give a torch ProcessGroup as group",
        ),
        error => error.into(),
    }
}
