//! What an op does to its sums before it rounds them, and to the rounded rows: as the command line
//! says it, and by name.

use crate::limits;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use flux_core::plan::Plan;
use flux_core::{OpKind, Problem, ProblemError};
use flux_ops::binding::NamedActivation;
use flux_ops::{Activation, EpilogueSpec, GateLayout, Operand, OperandSet};

/// An epilogue as the command line says it, but for what a command finds in a file.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct EpilogueArgs {
    /// Applied to sums and bias: an activation, or one of gates that are multiplied by ups. Of
    /// ag_gemm
    #[arg(
        long,
        visible_alias = "gates",
        value_name = "NAME",
        default_value = "none",
        value_parser = activations(),
    )]
    pub activation: NamedActivation,
    /// Also normalise the rows of the result, by RMSNorm with this epsilon. Of gemm_rs and gemm_ar
    #[arg(long, value_name = "EPS", value_parser = limits::not_negative::<f32>)]
    pub norm: Option<f32>,
}

/// Reads one of the activations, which the help lists.
fn activations() -> impl TypedValueParser<Value = NamedActivation> {
    let named = |word: String| NamedActivation::ALL.into_iter().find(|named| named.name == word);
    PossibleValuesParser::new(NamedActivation::ALL.map(|named| named.name))
        .try_map(move |word| named(word).ok_or("no activation"))
}

impl EpilogueArgs {
    /// All of it, with a bias and a residual where they are wanted.
    pub(crate) fn spec(&self, bias: bool, residual: bool) -> EpilogueSpec {
        let NamedActivation { activation, gates, .. } = self.activation;
        let rms_norm = self.norm.map(Into::into);
        let operands = OperandSet::EMPTY.with(Operand::Bias, bias);
        let operands = operands.with(Operand::Residual, residual);
        EpilogueSpec { operands, activation, gates, rms_norm }
    }
}

/// What of an epilogue `op` has.
pub(crate) fn of_op(epilogue: EpilogueSpec, op: OpKind) -> EpilogueSpec {
    let operands = epilogue.operands.iter().filter(|operand| operand.is_of(op)).collect();
    if op.gathers() {
        EpilogueSpec { operands, rms_norm: None, ..epilogue }
    } else {
        EpilogueSpec { operands, activation: Activation::None, gates: None, ..epilogue }
    }
}

/// A bias with everything that `op` can add to the sum with it, or apply to it.
pub fn with_bias(op: OpKind) -> impl Iterator<Item = EpilogueSpec> {
    let operands = OperandSet::EMPTY.with(Operand::Bias, true);
    let bias = EpilogueSpec { operands, ..EpilogueSpec::default() };
    let with = move |&activation| EpilogueSpec { activation, ..bias };
    let operands = operands.with(Operand::Residual, true);
    let residual = EpilogueSpec { operands, ..bias };
    let sums = [residual, EpilogueSpec { rms_norm: Some(1e-5.into()), ..residual }];
    let gated = |(activation, layout)| EpilogueSpec { activation, gates: Some(layout), ..bias };
    let gated =
        [(Activation::Silu, GateLayout::Concatenated), (Activation::Gelu, GateLayout::Interleaved)]
            .map(gated);
    let gated = gated.into_iter().filter(move |_| !op.reduces());
    Activation::of(op)
        .iter()
        .map(with)
        .chain(sums.into_iter().filter(move |_| op.reduces()))
        .chain(gated)
}

/// The same without gates where the columns of `problem`, or those of a plan's tile, cannot have
/// them.
pub(crate) fn for_columns_of(
    epilogue: EpilogueSpec,
    problem: &Problem,
    plan: Option<&Plan>,
) -> EpilogueSpec {
    let whole = problem.with_gates().is_ok() && plan.is_none_or(|plan| plan.tile.holds_gates());
    if whole { epilogue } else { EpilogueSpec { gates: None, ..epilogue } }
}

/// The problem of an op with this epilogue, whose ranks split gates with their ups.
pub(crate) fn problem_with(
    epilogue: EpilogueSpec,
    problem: Problem,
) -> Result<Problem, ProblemError> {
    if epilogue.gates.is_some() { problem.with_gates() } else { Ok(problem) }
}

/// What follows the name of a case, as in `+bias+swiglu`.
pub(crate) fn suffix(epilogue: EpilogueSpec) -> String {
    let EpilogueSpec { operands, activation, gates, rms_norm } = epilogue;
    let named = NamedActivation::ALL.into_iter().skip(1);
    let activation = named.filter(|named| (named.activation, named.gates) == (activation, gates));
    let words = operands.iter().map(|operand| operand.name(0)).chain(rms_norm.map(|_| "norm"));
    words.chain(activation.map(|named| named.name)).flat_map(|word| ["+", word]).collect()
}
