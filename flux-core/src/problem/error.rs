//! Why a shape cannot be executed.

use super::{MAX_EXTENT, MAX_WEIGHTS};
use crate::numerics::VECTOR_BYTES;
use crate::{DType, Numerics, Scales, words};

/// Why a shape cannot be executed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// An extent is zero.
    #[error("{name} = 0: every extent must be at least 1")]
    Zero {
        /// `m`, `n` or `k`; of an op's largest call `max_m`.
        name: &'static str,
    },
    /// An extent is beyond [`MAX_EXTENT`].
    #[error(
        "{name} = {value} is above the limit {MAX_EXTENT}: split the {}",
        if name.contains('m') { "rows over several calls" } else { "layer over several ops" }
    )]
    TooLarge {
        /// `m`, `n` or `k`; of an op's largest call `max_m`.
        name: &'static str,
        /// The given value.
        value: usize,
    },
    /// A row of an operand would not be a multiple of 16 bytes, or a block with a scale not whole.
    #[error(
        "{name} = {value} is not a multiple of {multiple}: {} are required; {}",
        required(*multiple, *gated),
        pad(name, *padded, *gated)
    )]
    Alignment {
        /// `n`, `k`, or `n[i]` of one of several weights.
        name: &'static str,
        /// The given value.
        value: u32,
        /// Elements of 16 bytes or of a block with a scale; twice as many with gates.
        multiple: u32,
        /// The next aligned value that the ranks can share.
        padded: u32,
        /// Whether `n` counts gates and ups.
        gated: bool,
    },
    /// An extent that is split over the ranks has fewer groups than ranks.
    #[error(
        "{name} = {value} is too small for {world} ranks of at least {multiple} each: {}",
        pad(name, *padded, *gated)
    )]
    TooSmall {
        /// `n`, `k`, or `n[i]` of one of several weights.
        name: &'static str,
        /// The given value.
        value: u32,
        /// Elements of 16 bytes or of a block with a scale; twice as many with gates.
        multiple: u32,
        /// Number of ranks.
        world: u32,
        /// The least value.
        padded: u32,
        /// Whether `n` counts gates and ups.
        gated: bool,
    },
    /// There are no weights, or too many.
    #[error(
        "{count} weights: an AllGather-GEMM takes 1 to {MAX_WEIGHTS} beside each other; use \
         several ops, or one weight of all their rows"
    )]
    Weights {
        /// The given number.
        count: usize,
    },
    /// The columns of several weights are not those of the op.
    #[error("n = {n}, and the weights have {sum} columns together: give their sum as n")]
    Columns {
        /// The op's.
        n: u32,
        /// The weights'.
        sum: u64,
    },
    /// No op has these element types.
    #[error(
        "no op has the element types {numerics}: outputs are {}; operands have the same type, or \
         are {} with scales of {}, which take no fast accumulation",
        words::list(DType::OUTPUTS, "or"),
        words::list(DType::QUANTIZED, "or"),
        words::list(Scales::OF_QUANTIZED.map(|of| format!("a {of}")), "or")
    )]
    Numerics {
        /// The given ones.
        numerics: Numerics,
    },
    /// The op does not take several weights.
    #[error("{what} takes one weight: leave out several_weights")]
    OneWeight {
        /// What does not.
        what: &'static str,
    },
}

crate::debug_is_text!(ProblemError);

/// What an extent consists of.
fn required(multiple: u32, gated: bool) -> &'static str {
    let group = if gated { multiple / 2 } else { multiple };
    // No element is less than a byte.
    if group > VECTOR_BYTES { "whole scale blocks" } else { "rows of 16-byte multiples" }
}

/// How an extent becomes one that the ranks can share.
fn pad(name: &str, padded: u32, gated: bool) -> String {
    if gated {
        format!("pad the gates and the ups with zeros to {} rows each", padded / 2)
    } else {
        format!("pad {name} with zeros to {padded}")
    }
}
