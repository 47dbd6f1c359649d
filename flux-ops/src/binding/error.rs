//! Errors by what a caller can do about them.
//!
//! Invariant: the message is that of the Rust error, less what only Rust has. The ranks are those
//! at fault, where the error names them.

use crate::{BuildError, CallError};
use flux_kernels::cpu::ExecuteError;
use flux_transport::{
    BootstrapError, ConnectError, ControlError, Failure, Fault, Rank, TransportError, WorldError,
};

/// What kind of error it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// An operand or argument cannot be used; nothing was launched.
    Operand,
    /// The ranks did not become a communicator.
    Connect,
    /// An op, or the program of a call, could not be built.
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
            Fault::Timeout { late, .. } => {
                Self::of_ranks(Class::Timeout, message, late.iter().copied())
            }
            Fault::Disagreed { peer, .. } => Self::of_ranks(Class::Disagreed, message, [*peer]),
            Fault::PeerLost { rank, .. } => Self::of_ranks(Class::PeerLost, message, [*rank]),
            Fault::PeerLeft { rank, .. } => Self::of_ranks(Class::PeerLeft, message, [*rank]),
            Fault::Aborted { rank, reason, .. } => {
                Self { reason: Some(*reason), ..Self::of_ranks(Class::Aborted, message, [*rank]) }
            }
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
            ControlError::Timeout { missing, .. } => {
                Self::of_ranks(Class::Timeout, message, missing.iter().copied())
            }
            ControlError::PeerLost { rank } => Self::of_ranks(Class::PeerLost, message, [*rank]),
            ControlError::PeerLeft { rank } => Self::of_ranks(Class::PeerLeft, message, [*rank]),
            ControlError::Aborted { rank, reason } => {
                Self { reason: Some(*reason), ..Self::of_ranks(Class::Aborted, message, [*rank]) }
            }
            ControlError::OtherHost { .. } => Self::new(Class::Connect, message),
            ControlError::Protocol { rank, .. } => {
                Self::of_ranks(Class::Disagreed, message, [*rank])
            }
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
            | BuildError::SumOrder { .. }
            | BuildError::SequentialPartials { .. }
            | BuildError::Workers { .. }
            | BuildError::SmMargin { .. }
            | BuildError::Epsilon { .. }
            | BuildError::QuantizedNorm { .. }
            | BuildError::Option { .. }
            | BuildError::SeveralWeights { .. }
            | BuildError::GatedWeights { .. }
            | BuildError::ScaledWeights { .. }
            | BuildError::GatedTile { .. } => Self::operand(message),
            BuildError::Disagreement { .. } => Self::new(Class::Disagreed, message),
            BuildError::Peer { rank, .. } => Self::of_ranks(Class::Build, message, [*rank]),
            // Without the hint for asynchronous tasks, which only Rust has.
            BuildError::Transport { op, source } => {
                Self::from(source).within(format!("while building {op}: {source}"))
            }
            BuildError::Schedule(_)
            | BuildError::NoPlan { .. }
            | BuildError::NoNumerics { .. }
            | BuildError::NoQuantizedRows { .. }
            | BuildError::NoInvariantPlan { .. }
            | BuildError::NotLoaded { .. }
            | BuildError::Workspace { .. }
            | BuildError::ProgramMemory { .. }
            | BuildError::NoCollectives { .. }
            | BuildError::NoMessages { .. }
            | BuildError::NoKernel(_)
            | BuildError::Compute(_)
            | BuildError::Compile(_)
            | BuildError::Load(_)
            | BuildError::Device(_)
            | BuildError::Execute(_) => Self::new(Class::Build, message),
        }
    }
}

impl From<CallError> for Error {
    fn from(error: CallError) -> Self {
        let message = error.to_string();
        match error {
            CallError::Shape { .. }
            | CallError::View { .. }
            | CallError::TooManyRows { .. }
            | CallError::Problem(_)
            | CallError::NotPrepared { .. }
            | CallError::Weights { .. }
            | CallError::Stray { .. }
            | CallError::ScalesApart { .. }
            | CallError::QuantizedColumns { .. }
            | CallError::Quantized { .. }
            | CallError::Epsilon { .. }
            | CallError::NoStream { .. }
            | CallError::NotGiven { .. }
            | CallError::Unwanted { .. }
            | CallError::NotGathered { .. }
            | CallError::GatheredScales { .. }
            | CallError::Location { .. }
            | CallError::Overlap { .. }
            | CallError::ViewStream { .. }
            | CallError::Captured
            | CallError::NotDeviceMemory { .. } => Self::operand(message),
            CallError::Program { source, .. } => Self::from(*source).within(message),
            CallError::Transport(error) => error.into(),
            CallError::Launch(_) => Self::new(Class::Other, message),
            CallError::Execute(error) => Self::from(&error),
            CallError::Fault(failure) => Self::from(&*failure),
        }
    }
}

impl From<&ExecuteError> for Error {
    fn from(error: &ExecuteError) -> Self {
        let message = error.to_string();
        match error {
            ExecuteError::DType { .. }
            | ExecuteError::Operand { .. }
            | ExecuteError::Activation { .. }
            | ExecuteError::Gates { .. }
            | ExecuteError::NoSuchOperand { .. } => Self::operand(message),
            ExecuteError::Timeout { peer, .. } => {
                Self::of_ranks(Class::Timeout, message, [Rank::new(*peer)])
            }
            // The error names the rank that waited, not the one that aborted.
            ExecuteError::Aborted { abort, .. } => {
                Self { reason: Some(*abort), ..Self::new(Class::Aborted, message) }
            }
            ExecuteError::Disagreed { peer, .. } => {
                Self::of_ranks(Class::Disagreed, message, [Rank::new(*peer)])
            }
            // Memory, a defect of a program, or an earlier failure without a record.
            _ => Self::new(Class::Other, message),
        }
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        match &error {
            ConnectError::Bootstrap(bootstrap) => bootstrap.into(),
            ConnectError::Control(control) => control.into(),
            ConnectError::Transport(transport) => transport.into(),
            ConnectError::Disagreement { .. } => Self::new(Class::Disagreed, error.to_string()),
            _ => Self::new(Class::Connect, error.to_string()),
        }
    }
}

impl From<WorldError> for Error {
    fn from(error: WorldError) -> Self {
        match &error {
            WorldError::Bootstrap(bootstrap) => bootstrap.into(),
            _ => Self::new(Class::Connect, error.to_string()),
        }
    }
}

impl From<&BootstrapError> for Error {
    fn from(error: &BootstrapError) -> Self {
        let message = error.to_string();
        match error {
            // Whoever was denied may be a missing rank with another secret.
            BootstrapError::Timeout { missing, denied: 0, .. } => {
                Self::of_ranks(Class::Timeout, message, missing.iter().copied())
            }
            _ => Self::new(Class::Connect, message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Location;
    use flux_core::{DType, OpKind, Problem, ProblemError, TileShape, WorldSize};
    use flux_cuda::CudaError;
    use flux_kernels::cuda::LaunchError;
    use flux_kernels::{NoSuchTile, WeightLayout};
    use flux_transport::TransportKind;

    const ONE: Rank = Rank::new(1);

    fn problem() -> Problem {
        Problem::new(OpKind::GemmReduceScatter, 8, 16, 16, DType::Bf16, WorldSize::new(2).unwrap())
            .unwrap()
    }

    fn refused() -> LaunchError {
        LaunchError::Driver(CudaError::Call {
            call: "cuLaunchKernelEx",
            code: 700,
            name: "illegal address".to_owned(),
        })
    }

    fn of_transport(source: TransportError) -> BuildError {
        BuildError::Transport { op: "gemm_rs 8x16x16".to_owned(), source }
    }

    fn late() -> TransportError {
        ControlError::Timeout { step: "building an op", missing: vec![ONE] }.into()
    }

    fn no_memory() -> ExecuteError {
        ExecuteError::OutOfMemory { what: "partial sums", bytes: 64 }
    }

    fn waited(abort: Option<u32>) -> ExecuteError {
        let (rank, peer, wait, signal, epoch) = (0, 1, 0, 0, 1);
        match abort {
            Some(abort) => ExecuteError::Aborted { rank, peer, wait, signal, abort, epoch },
            None => ExecuteError::Timeout { rank, peer, wait, signal, expected: 1, seen: 0, epoch },
        }
    }

    fn assert_class(error: impl Into<Error>, class: Class, ranks: &[Rank]) {
        let error = error.into();
        assert_eq!((error.class, &*error.ranks), (class, ranks), "{}", error.message);
    }

    #[test]
    fn each_error_of_a_build_has_its_class() {
        let (plan, dtype) = ("tile=128x128x64".parse().unwrap(), DType::Bf16);
        let order = crate::SumOrder::PartsOfK;
        let lost = ControlError::PeerLost { rank: ONE };
        let tile = NoSuchTile {
            tile: TileShape::new(1, 1, 1),
            generation: flux_core::tile::Generation::Portable,
            numerics: DType::Bf16.into(),
        };
        let table = [
            (BuildError::Problem(ProblemError::Zero { name: "n" }), Class::Operand),
            (BuildError::SumOrder { plan, order }, Class::Operand),
            (BuildError::SequentialPartials { dtype }, Class::Operand),
            (BuildError::Workers { value: 0, max: 132, place: Location::Host }, Class::Operand),
            (BuildError::SmMargin { value: 132, sms: 132 }, Class::Operand),
            (BuildError::Epsilon { value: -1.0 }, Class::Operand),
            (BuildError::Option { op: OpKind::AllGatherGemm, option: "residual" }, Class::Operand),
            (BuildError::GatedWeights { weights: WeightLayout::Kn }, Class::Operand),
            (
                BuildError::NoInvariantPlan { problem: problem(), transport: TransportKind::Nccl },
                Class::Build,
            ),
            (BuildError::Workspace { needed: 2, limit: 1 }, Class::Build),
            (BuildError::NoKernel(tile), Class::Build),
            (BuildError::Load(refused()), Class::Build),
            (BuildError::Execute(no_memory()), Class::Build),
            (BuildError::Disagreement { requests: crate::Requests(Vec::new()) }, Class::Disagreed),
        ];
        for (error, class) in table {
            assert_class(error, class, &[]);
        }
        assert_class(BuildError::Peer { rank: ONE, reason: String::new() }, Class::Build, &[ONE]);
        assert_class(of_transport(late()), Class::Timeout, &[ONE]);
        assert_class(of_transport(lost.into()), Class::PeerLost, &[ONE]);
    }

    #[test]
    fn each_error_of_a_call_has_its_class() {
        let program = |source| CallError::Program { m: 8, source: Box::new(source) };
        let device =
            CudaError::Call { call: "cuMemcpy", code: 700, name: "illegal address".to_owned() };
        let memory = || TransportError::OutOfMemory { what: "workspace", bytes: 64 };
        let table = [
            (CallError::TooManyRows { m: 9, max_m: 8 }, Class::Operand),
            (CallError::NotPrepared { m: 8 }, Class::Operand),
            (CallError::Captured, Class::Operand),
            (CallError::Launch(refused()), Class::Other),
            (CallError::Transport(memory()), Class::Other),
            (CallError::Execute(no_memory()), Class::Other),
            (
                CallError::Execute(ExecuteError::NoSuchOperand {
                    op: OpKind::AllGatherGemm,
                    operand: "residual",
                }),
                Class::Operand,
            ),
            (CallError::Execute(ExecuteError::Poisoned { rank: 0 }), Class::Other),
            (CallError::Execute(waited(Some(7))), Class::Aborted),
            (
                program(BuildError::ProgramMemory {
                    problem: problem(),
                    bytes: 2,
                    limit: 1,
                    pinned: 0,
                }),
                Class::Build,
            ),
            (program(BuildError::Load(refused())), Class::Build),
            (program(BuildError::Device(device)), Class::Build),
            (program(of_transport(memory())), Class::Other),
        ];
        for (error, class) in table {
            assert_class(error, class, &[]);
        }
        assert_class(CallError::Execute(waited(None)), Class::Timeout, &[ONE]);
        assert_class(
            CallError::Execute(ExecuteError::Disagreed { rank: 0, peer: 1, epoch: 1 }),
            Class::Disagreed,
            &[ONE],
        );
        assert_class(program(of_transport(late())), Class::Timeout, &[ONE]);
        assert_eq!(Error::from(CallError::Execute(waited(Some(7)))).reason, Some(7));
        let said = Error::from(program(BuildError::Load(refused()))).message;
        assert!(
            said.starts_with("a call with m = 8 has no program: the kernel could not be prepared"),
            "{said}"
        );
    }

    #[test]
    fn a_rank_that_does_not_come_is_late_and_others_cannot_be_met() {
        let step = "waiting for the ranks";
        let late = |denied| {
            let missing = vec![ONE];
            BootstrapError::Timeout { step, missing, denied, sought: None }
        };
        assert_class(WorldError::from(late(0)), Class::Timeout, &[ONE]);
        assert_class(ConnectError::from(late(0)), Class::Timeout, &[ONE]);
        assert_class(WorldError::from(late(1)), Class::Connect, &[]);
        let lost = BootstrapError::Lost { rank: ONE, step };
        assert_class(WorldError::from(lost), Class::Connect, &[]);
        assert_class(WorldError::NoLauncher, Class::Connect, &[]);
    }

    #[test]
    fn other_languages_hear_nothing_of_asynchronous_tasks() {
        let error = Error::from(of_transport(late()));
        assert_eq!(
            error.message,
            "while building gemm_rs 8x16x16: building an op: the deadline passed while waiting for \
             rank 1"
        );
    }
}
