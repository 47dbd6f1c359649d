//! Errors of ops by the names of this interface, where the Rust ones differ.

use crate::error::{Error, flux_status};
use flux_ops::{BuildError, CallError, ProblemError};

/// The error of a call.
pub(crate) fn of_call(error: CallError) -> Error {
    match error {
        CallError::Captured => Error::operand(
            "the stream is in capture, and the op was created without FLUX_OP_CAPTURES: create it \
             with that",
        ),
        CallError::NotPrepared { m } => Error::operand(format!(
            "a call with m = {m} cannot be captured yet: call flux_op_prepare with it before the \
             capture"
        )),
        error @ CallError::Shape { .. } => {
            const NAMES: [(&str, &str); 4] = [
                ("op.columns(rank)", "flux_op_columns"),
                ("op.inner(rank)", "flux_op_inner"),
                ("op.weight_columns(weight, rank)", "flux_op_weight_columns"),
                ("an op built with weights(WeightLayout::Kn)", "an op with FLUX_OP_WEIGHTS_KN"),
            ];
            let words = error.to_string();
            Error::operand(NAMES.iter().fold(words, |words, (rust, c)| words.replace(rust, c)))
        }
        error => error.into(),
    }
}

/// The error of a build.
pub(crate) fn of_build(error: BuildError) -> Error {
    match error {
        BuildError::GatedWeights { .. } => Error::operand(
            "weights of gates and ups are read as [n, k]: create the op without FLUX_OP_WEIGHTS_KN",
        ),
        // A weight's columns have the name of their option.
        BuildError::Problem(
            ref problem @ (ProblemError::Alignment { name, .. }
            | ProblemError::TooSmall { name, .. }),
        ) if name.len() > 1 => {
            Error::operand(problem.to_string().replace(name, &name.replace('n', "options.columns")))
        }
        BuildError::Problem(ProblemError::OneWeight { what }) => {
            Error::operand(format!("{what} takes one weight: give zeros in options.columns"))
        }
        BuildError::SeveralWeights { .. } => Error::operand(
            "several weights are read as [n, k]: create the op without FLUX_OP_WEIGHTS_KN",
        ),
        BuildError::NoInvariantPlan { problem, transport } => Error::new(
            flux_status::FLUX_ERROR_BUILD,
            format!(
                "no plan of {problem} over the {transport} transport adds up alike for every m: \
                 create the op without FLUX_OP_BATCH_INVARIANT, or connect over another transport"
            ),
        ),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{flux_last_error_message, guard};
    use flux_ops::{DType, OpKind, Problem, WorldSize};
    use flux_transport::TransportKind;
    use std::ffi::CStr;

    #[test]
    fn an_op_that_has_no_invariant_plan_names_the_flag() {
        let problem =
            Problem::new(OpKind::GemmAllReduce, 8, 16, 16, DType::Bf16, WorldSize::new(2).unwrap())
                .unwrap();
        let error = BuildError::NoInvariantPlan { problem, transport: TransportKind::Mixed };
        assert_eq!(guard(|| Err(of_build(error))), flux_status::FLUX_ERROR_BUILD);
        // SAFETY: the message of this thread, which makes no call meanwhile.
        let said = unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap();
        assert!(
            said.ends_with(
                "create the op without FLUX_OP_BATCH_INVARIANT, or connect over another transport"
            ),
            "{said}"
        );
    }
}
