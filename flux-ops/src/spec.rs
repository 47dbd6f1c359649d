//! What an op is built for.
//!
//! Invariant: all that an op follows from is here. What ranks must agree on is in its text. What a
//! kind of op does not have is refused before any rank is asked.

use crate::error::BuildError;
use flux_core::plan::Plan;
use flux_core::tile::GATE_COLUMNS;
use flux_core::{DType, Numerics, OpKind, Partials, Problem, ProblemError, Scales, WorldSize};
use flux_kernels::{Activation, GateLayout, Operand, OperandSet, WeightLayout};
use flux_transport::Label;
use std::fmt;
use std::path::PathBuf;

/// What an op is built for. Fields are the options of [`Builder`](crate::Builder), which says what
/// each does; all but those of its table file, `max_workspace`, `workers` and `trace` are the same
/// on every rank.
///
/// ```
/// use flux_ops::{DType, FusedLinear, OpKind, OpSpec, Operand};
/// use flux_transport::{Communicator, Select, World};
/// let comm = Communicator::connect_blocking(&World::single(), Select::Host)?;
/// let mut spec = OpSpec::new(OpKind::GemmAllReduce, 512, 1024, 256, DType::F16);
/// spec.epilogue.operands.set(Operand::Residual, true);
/// assert!(FusedLinear::build(spec, &comm)?.explain().contains("with residual"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct OpSpec {
    /// The op.
    pub kind: OpKind,
    /// Most rows of a call.
    pub max_m: usize,
    /// Global output features.
    pub n: usize,
    /// Global inner features.
    pub k: usize,
    /// Of several weights the output features of each, `n` in all.
    pub columns: Option<Vec<usize>>,
    /// Element types.
    pub numerics: Numerics,
    /// How weights lie.
    pub weights: WeightLayout,
    /// What is done with sums, and with the rounded rows.
    pub epilogue: EpilogueSpec,
    /// Whether a row's bits do not depend on the rows beside it.
    pub batch_invariant: bool,
    /// In place of a plan table's or the cost model's.
    pub plan: Option<Plan>,
    /// The file of measured plans, in place of the user's.
    pub plan_table: Option<PathBuf>,
    /// Most bytes of the workspace.
    pub max_workspace: Option<u64>,
    /// How calls are launched.
    pub launch: LaunchOptions,
}

/// What an op does with its fp32 sums before it rounds them, and with the rounded rows; nothing by
/// default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EpilogueSpec {
    /// What calls bring for it, of the [optional](Operand::optional) ones: a residual is added
    /// after the bias.
    pub operands: OperandSet,
    /// Applied after these.
    pub activation: Activation,
    /// How gates and ups lie in `w` and the bias, where activated gates are multiplied by ups.
    pub gates: Option<GateLayout>,
    /// Of the rounded rows.
    pub rms_norm: Option<NormSpec>,
}

/// An RMSNorm of rounded rows, and the form in which it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NormSpec {
    /// What is added to the mean of a row's squares.
    pub eps: Epsilon,
    /// Scales of normalised rows of E4M3; none of rows of the type of `y`.
    pub scales: Scales,
}

impl From<f32> for NormSpec {
    fn from(eps: f32) -> Self {
        Self { eps: eps.into(), scales: Scales::None }
    }
}

/// What is added to the mean of a row's squares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Epsilon {
    bits: u32,
}

impl From<f32> for Epsilon {
    fn from(eps: f32) -> Self {
        Self { bits: eps.to_bits() }
    }
}

impl Epsilon {
    /// The number.
    pub const fn get(self) -> f32 {
        f32::from_bits(self.bits)
    }
}

/// Caller overrides for the launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct LaunchOptions {
    /// Threads of the host executor, or CTAs of the kernel.
    pub workers: Option<u32>,
    /// Whether each call leaves its time line.
    pub trace: bool,
    /// SMs that are left to others.
    pub sm_margin: u32,
    /// Whether calls may be captured in graphs.
    pub(crate) captures: bool,
}

impl OpSpec {
    /// An op of global extents without options, for calls with at most `max_m` rows.
    pub fn new(
        kind: OpKind,
        max_m: usize,
        n: usize,
        k: usize,
        numerics: impl Into<Numerics>,
    ) -> Self {
        Self {
            kind,
            max_m,
            n,
            k,
            columns: None,
            numerics: numerics.into(),
            weights: WeightLayout::default(),
            epilogue: EpilogueSpec::default(),
            batch_invariant: false,
            plan: None,
            plan_table: None,
            max_workspace: None,
            launch: LaunchOptions::default(),
        }
    }

    /// An op without options for this problem, and for calls with fewer rows.
    pub fn of_problem(problem: &Problem) -> Self {
        let [m, n, k] = [problem.m(), problem.n(), problem.k()].map(|extent| extent as usize);
        let columns: Vec<_> = problem.weights().iter().map(|&n| n as usize).collect();
        let columns = (columns.len() > 1).then_some(columns);
        Self { columns, ..Self::new(problem.op(), m, n, k, problem.numerics()) }
    }

    /// Lets calls be captured in CUDA graphs.
    ///
    /// # Safety
    /// As [`Builder::captures`](crate::Builder::captures).
    pub unsafe fn allow_captures(&mut self) {
        self.launch.captures = true;
    }

    /// The op and its extents, as errors name it.
    pub(crate) fn name(&self) -> String {
        format!("{} {}x{}x{}", self.kind, self.max_m, self.n, self.k)
    }

    /// The op as flight records name it: with its options, so that ops of equal extents differ.
    pub(crate) fn label(&self) -> Label {
        let EpilogueSpec { operands, activation, gates, rms_norm } = self.epilogue;
        let numerics = self.numerics.to_string();
        let operands = operands.iter().map(|operand| (true, operand.name(0)));
        let quantized = rms_norm.is_some_and(|norm| norm.scales != Scales::None);
        let norm = if quantized { "rms_norm.e4m3" } else { "rms_norm" };
        let further = [
            (activation != Activation::None, activation.name()),
            (gates.is_some(), "gates"),
            (rms_norm.is_some(), norm),
            (self.weights == WeightLayout::Kn, "kn"),
        ];
        let options = std::iter::once((self.numerics != DType::Bf16.into(), numerics.as_str()))
            .chain(operands)
            .chain(further);
        let given = options.filter(|(given, _)| *given);
        let name = given.fold(self.kind.to_string(), |name, (_, option)| name + "+" + option);
        Label::new(&name, [0; 3])
    }

    /// The problem with the most rows.
    pub(crate) fn largest(&self, world: WorldSize) -> Result<Problem, BuildError> {
        // What no u32 holds is no part of `n`; nor is `!15`, the largest multiple of 16 of a u32.
        let column = |&columns: &usize| u32::try_from(columns).unwrap_or(!15);
        let columns: Option<Vec<_>> =
            self.columns.as_ref().map(|columns| columns.iter().map(column).collect());
        let numerics = self.numerics;
        // An error that names a weight says more than one of their sum.
        columns
            .iter()
            .try_for_each(|columns| Problem::check_weights(self.kind, columns, numerics, world))?;
        let gated = self.epilogue.gates.is_some();
        if gated {
            Problem::check_gates(self.kind, column(&self.n), numerics, world)?;
        }
        let problem = Problem::new(self.kind, self.max_m, self.n, self.k, numerics, world)
            .map_err(of_most_rows)?;
        let problem = if gated { problem.with_gates()? } else { problem };
        Ok(if let Some(columns) = &columns { problem.with_weights(columns)? } else { problem })
    }

    /// Refuses options that the kind does not have.
    pub(crate) fn check_kind(&self) -> Result<(), BuildError> {
        let EpilogueSpec { operands, activation, gates, rms_norm } = self.epilogue;
        if let Some(operand) = operands.iter().find(|operand| !operand.is_of(self.kind)) {
            return Err(BuildError::Option { op: self.kind, option: operand.name(0) });
        }
        let partials = self.numerics.partials != Partials::Output;
        let of_sums: &[_] = &[("rms_norm", rms_norm.is_some()), ("partials", partials)];
        let of_gathers: &[_] = &[
            ("activation", activation != Activation::None),
            ("gates", gates.is_some()),
            ("several_weights", self.columns.is_some()),
        ];
        let foreign = if self.kind.gathers() { of_sums } else { of_gathers };
        match foreign.iter().copied().find(|(_, given)| *given) {
            Some((option, _)) => Err(BuildError::Option { op: self.kind, option }),
            None => Ok(()),
        }
    }

    /// Checks options against each other.
    pub(crate) fn check_options(&self) -> Result<(), BuildError> {
        let weights = self.weights;
        if let Some(NormSpec { eps, scales }) = self.epilogue.rms_norm {
            let value = eps.get();
            if !(value.is_finite() && value >= 0.0) {
                return Err(BuildError::Epsilon { value });
            }
            let multiple = Numerics::e4m3(scales, self.numerics.output).row_multiple() as usize;
            if scales != Scales::None && !self.n.is_multiple_of(multiple) {
                return Err(BuildError::QuantizedNorm { n: self.n, scales, multiple });
            }
        }
        if self.columns.as_ref().is_some_and(|of| of.len() > 1) && weights != WeightLayout::Nk {
            return Err(BuildError::SeveralWeights { weights });
        }
        let numerics = self.numerics;
        if numerics.scales != Scales::None && weights != WeightLayout::Nk {
            return Err(BuildError::ScaledWeights { weights, numerics });
        }
        if self.epilogue.gates.is_none() {
            return Ok(());
        }
        if weights != WeightLayout::Nk {
            return Err(BuildError::GatedWeights { weights });
        }
        match self.plan.filter(|plan| !plan.tile.holds_gates()) {
            Some(plan) => {
                Err(BuildError::GatedTile { tile: plan.tile, multiple: 2 * GATE_COLUMNS })
            }
            None => Ok(()),
        }
    }

    /// The text that the ranks compare: all that must be the same on every rank.
    pub(crate) fn agreement(&self) -> String {
        let Self {
            kind,
            max_m,
            n,
            k,
            columns,
            numerics,
            weights,
            epilogue,
            batch_invariant,
            plan,
            plan_table: _,
            max_workspace: _,
            launch: LaunchOptions { workers: _, trace: _, sm_margin, captures: _ },
        } = self;
        let columns = columns.as_ref();
        let parts = [
            Some(format!("{kind} max_m={max_m} n={n} k={k} {numerics}, {epilogue}")),
            columns.map(|columns| format!("weights of {columns:?} columns")),
            Some(plan.map_or_else(|| "plan of rank 0".to_owned(), |plan| plan.to_string())),
            (*weights != WeightLayout::default()).then(|| format!("weights {weights}")),
            batch_invariant.then(|| "batch-invariant".to_owned()),
            (*sm_margin > 0).then(|| format!("sm_margin={sm_margin}")),
            Some(concat!("flux ", env!("CARGO_PKG_VERSION")).to_owned()),
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

/// The rows of the largest problem have the name of their option.
fn of_most_rows(error: ProblemError) -> ProblemError {
    let name = "max_m";
    match error {
        ProblemError::Zero { name: "m" } => ProblemError::Zero { name },
        ProblemError::TooLarge { name: "m", value } => ProblemError::TooLarge { name, value },
        other => other,
    }
}

impl fmt::Display for EpilogueSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_bias = self.operands.has(Operand::Bias);
        f.write_str(if has_bias { "with bias" } else { "no bias" })?;
        for operand in self.operands.with(Operand::Bias, false).iter() {
            write!(f, ", with {}", operand.name(0))?;
        }
        if self.activation != Activation::None {
            write!(f, ", then {}", self.activation)?;
        }
        if let Some(layout) = self.gates {
            write!(f, ", {layout} gates times ups")?;
        }
        let Some(NormSpec { eps, scales }) = self.rms_norm else { return Ok(()) };
        write!(f, ", then rms_norm({:e})", eps.get())?;
        if scales == Scales::None { Ok(()) } else { write!(f, " as e4m3.{scales}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::TileShape;

    fn plain(kind: OpKind) -> OpSpec {
        OpSpec::new(kind, 16, 64, 64, DType::Bf16)
    }

    /// An option by its name, and how it is set.
    type Setting = (&'static str, fn(&mut OpSpec));

    const OF_SUMS: &[Setting] = &[
        ("residual", |spec| spec.epilogue.operands.set(Operand::Residual, true)),
        ("rms_norm", |spec| spec.epilogue.rms_norm = Some(1e-5.into())),
        ("rms_norm", |spec| {
            let scales = Scales::Row;
            spec.epilogue.rms_norm = Some(NormSpec { scales, ..NormSpec::from(1e-5) });
        }),
        ("partials", |spec| spec.numerics.partials = Partials::F32),
    ];
    const OF_GATHERS: &[Setting] = &[
        ("activation", |spec| spec.epilogue.activation = Activation::Gelu),
        ("gates", |spec| spec.epilogue.gates = Some(GateLayout::Interleaved)),
        ("several_weights", |spec| spec.columns = Some(vec![32, 32])),
    ];
    const OF_ALL: [Setting; 9] = [
        ("max_m", |spec| spec.max_m = 17),
        ("n", |spec| spec.n = 72),
        ("k", |spec| spec.k = 72),
        ("dtype", |spec| spec.numerics = DType::F16.into()),
        ("weights", |spec| spec.weights = WeightLayout::Kn),
        ("bias", |spec| spec.epilogue.operands.set(Operand::Bias, true)),
        ("batch_invariant", |spec| spec.batch_invariant = true),
        ("plan", |spec| spec.plan = Some(Plan::of(TileShape::new(128, 128, 64)))),
        ("sm_margin", |spec| spec.launch.sm_margin = 4),
    ];

    fn with(kind: OpKind, set: fn(&mut OpSpec)) -> OpSpec {
        let mut spec = plain(kind);
        set(&mut spec);
        spec
    }

    #[test]
    fn a_kind_has_its_own_options_and_is_refused_the_others() {
        for kind in OpKind::ALL {
            let (own, foreign) =
                if kind.gathers() { (OF_GATHERS, OF_SUMS) } else { (OF_SUMS, OF_GATHERS) };
            for (option, set) in own.iter().copied().chain(OF_ALL) {
                assert!(with(kind, set).check_kind().is_ok(), "{kind}, {option}");
            }
            for &(option, set) in foreign {
                let refused = with(kind, set).check_kind();
                assert!(
                    matches!(refused, Err(BuildError::Option { option: found, .. })
                        if found == option),
                    "{kind}, {option}"
                );
            }
        }
    }

    #[test]
    fn ops_that_differ_by_an_option_have_labels_that_differ() {
        let label = |spec: &OpSpec| spec.label().with_extents([16, 64, 64]).to_string();
        let kind = OpKind::GemmAllReduce;
        assert_eq!(label(&plain(kind)), "gemm_ar 16x64x64");
        let options = OF_SUMS.iter().chain(OF_GATHERS).copied().chain(OF_ALL);
        let unseen = ["max_m", "n", "k", "several_weights", "batch_invariant", "plan", "sm_margin"];
        for (option, set) in options.filter(|(option, _)| !unseen.contains(option)) {
            assert_ne!(label(&with(kind, set)), label(&plain(kind)), "{option}");
        }
        let mut all = plain(kind);
        (OF_SUMS.iter().chain(&OF_ALL)).for_each(|(_, set)| set(&mut all));
        assert_eq!(label(&all), "gemm_ar+fp16+bias+residual+rms_norm.e4m3+kn 16x64x64");
    }

    #[test]
    fn rows_that_no_op_has_are_named_by_their_option() {
        let refused = |max_m| {
            let spec = OpSpec { max_m, ..plain(OpKind::AllGatherGemm) };
            spec.largest(WorldSize::new(2).unwrap()).unwrap_err().to_string()
        };
        assert_eq!(refused(0), "max_m = 0: every extent must be at least 1");
        assert!(refused(1 << 25).starts_with("max_m = 33554432 is above"), "{}", refused(1 << 25));
        assert!(refused(1 << 25).ends_with("split the rows over several calls"));
    }

    #[test]
    fn gates_and_ups_are_padded_each() {
        for (n, rows) in [(104, 56), (100, 56), (8, 16)] {
            let mut spec = OpSpec { n, ..plain(OpKind::AllGatherGemm) };
            spec.epilogue.gates = Some(GateLayout::Concatenated);
            let text = spec.largest(WorldSize::new(2).unwrap()).unwrap_err().to_string();
            let remedy = format!("pad the gates and the ups with zeros to {rows} rows each");
            assert!(text.starts_with(&format!("n = {n} ")) && text.ends_with(&remedy), "{text}");
        }
    }

    #[test]
    fn ranks_compare_every_option_but_those_that_may_differ() {
        let kind = OpKind::AllGatherGemm;
        for (option, set) in OF_SUMS.iter().chain(OF_GATHERS).copied().chain(OF_ALL) {
            assert_ne!(with(kind, set).agreement(), plain(kind).agreement(), "{option}");
        }
        let may_differ: [Setting; 5] = [
            ("plan_table", |spec| spec.plan_table = Some("plans.csv".into())),
            ("max_workspace", |spec| spec.max_workspace = Some(1)),
            ("workers", |spec| spec.launch.workers = Some(1)),
            ("trace", |spec| spec.launch.trace = true),
            ("captures", |spec| spec.launch.captures = true),
        ];
        for (option, set) in may_differ {
            assert_eq!(with(kind, set).agreement(), plain(kind).agreement(), "{option}");
        }
    }
}
