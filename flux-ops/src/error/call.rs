//! Why a call was refused or failed.

use super::BuildError;
use crate::tensor::{Layout, Location, TensorError};
use flux_core::problem::Shape;
use flux_core::{OpKind, ProblemError, Rank, Scales, WorldSize, words};
use flux_kernels::cpu::ExecuteError;
use flux_kernels::cuda::LaunchError;
use flux_kernels::{Extent, Operand, Presence};
use flux_transport::{Failure, TransportError};

/// Why a call was refused or failed.
///
/// Bad operands and streams are found before anything is launched, and a good call then works. The
/// peers wait for it until the deadline, unless this rank ends their waits by
/// [`Communicator::abort`](flux_transport::Communicator::abort). After [`CallError::Launch`] and
/// [`CallError::Fault`] the communicator is broken.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// An operand has another shape than the op, or rows of another `m` than the others.
    #[error(
        "{operand} is [{}, {}], but {op} with m = {m} takes [{}, {}] on rank {rank} of {world}: {}",
        found.rows, found.cols, expected.rows, expected.cols,
        shape_remedy(operand, *op, *expected, *found)
    )]
    Shape {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// The op.
        op: OpKind,
        /// Rows of the call.
        m: usize,
        /// This rank.
        rank: Rank,
        /// Number of ranks.
        world: WorldSize,
        /// What it takes.
        expected: Shape,
        /// What was given.
        found: Layout,
    },
    /// A description of memory is no operand.
    #[error("{operand}: {source}")]
    View {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// Why.
        source: TensorError,
    },
    /// The call has more rows than the op was built for.
    #[error(
        "m = {m} is above max_m = {max_m}, which the op was built with: build it with a larger \
         max_m, or split the call"
    )]
    TooManyRows {
        /// Rows of the call.
        m: usize,
        /// The most.
        max_m: usize,
    },
    /// The ranks cannot split so many rows.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The program for this `m` could not be made or be put on the device.
    #[error("a call with m = {m} has no program: {source}")]
    Program {
        /// Rows of the call.
        m: u32,
        /// What went wrong.
        source: Box<BuildError>,
    },
    /// The call is captured, and its program is not on the device.
    #[error(
        "a call with m = {m} cannot be captured: its program is not on the device; call \
         op.prepare(&[{m}]) before the capture"
    )]
    NotPrepared {
        /// Rows of the call.
        m: u32,
    },
    /// Another number of weights was given than the op was built for.
    #[error(
        "the op was built for {takes} weight{} and {given} {} given: give as many, each with its y",
        if *takes == 1 { "" } else { "s" },
        if *given == 1 { "was" } else { "were" }
    )]
    Weights {
        /// Weights of the op.
        takes: usize,
        /// Weights of the call.
        given: usize,
    },
    /// A weight's operand belongs to the weight before it.
    #[error(
        "a {operand} was given before its weight: give it behind, as .weight(&w, &mut \
         y).{operand}(&{operand})"
    )]
    Stray {
        /// The operand's [name](Operand::name).
        operand: &'static str,
    },
    /// The op was built with an operand that was not given.
    #[error(
        "the op was built with {}, and the call brings no {operand}: make it as {}, with a view of \
         shape ({}, {})",
        option_of(operand),
        call_with(operand),
        expected.rows,
        expected.cols
    )]
    NotGiven {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// What it takes.
        expected: Shape,
    },
    /// The op was built without an operand that was given.
    #[error(
        "the call brings a {operand} of shape ({}, {}), and the op was built without: leave it \
         out, or build the op with {}",
        found.rows, found.cols, option_of(operand)
    )]
    Unwanted {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// What was given.
        found: Layout,
    },
    /// Scales of gathered rows do not lie behind them.
    #[error(
        "scale_x of {op} does not lie behind the rows of x, with which it travels: use rows of at \
         least {needed} bytes, the last too, with the scales {k} bytes from the start of each"
    )]
    ScalesApart {
        /// The op.
        op: OpKind,
        /// Elements of a row.
        k: u32,
        /// Bytes of a row with its scales.
        needed: u64,
    },
    /// Rows cannot be quantised with such scales.
    #[error(
        "rows of k = {k} elements cannot be quantised with {scales} scales: use {} scales, and a k \
         that is a multiple of {multiple}",
        words::list(Scales::OF_QUANTIZED, "or")
    )]
    QuantizedColumns {
        /// Elements of a row.
        k: usize,
        /// The form of the scales.
        scales: Scales,
        /// Divisor of `k`.
        multiple: usize,
    },
    /// An operand of a [`Quantizer`](crate::Quantizer) has another shape, or should not be there.
    #[error(
        "{operand} is {}, but quantising these rows with {scales} scales takes {}",
        shape_of(*found), shape_of(*expected)
    )]
    Quantized {
        /// `gain`, `scale`, `out` or `out_scale`.
        operand: &'static str,
        /// The form of the scales.
        scales: Scales,
        /// What it takes.
        expected: Option<Layout>,
        /// What was given.
        found: Option<Layout>,
    },
    /// The norm's addend is no number that a mean of squares can have.
    #[error("eps = {value} of a norm: give a finite number, 0 or above")]
    Epsilon {
        /// The value given.
        value: f32,
    },
    /// A call on a device has no stream.
    #[error("the call is on the host's stream, and works on {location}: give one of its streams")]
    NoStream {
        /// Where the operands are.
        location: Location,
    },
    /// The op does not gather rows, which the call asks for.
    #[error("{op} gathers no rows, and an x_full was given: leave it out, or use ag_gemm")]
    NotGathered {
        /// The op.
        op: OpKind,
    },
    /// Gathered rows that carry their scales cannot be returned.
    #[error(
        "rows of x carry {scales} scales, and an x_full was given: leave it out, rows are returned \
         without scales of their own"
    )]
    GatheredScales {
        /// The form of the scales.
        scales: Scales,
    },
    /// An operand is on another device than the communicator.
    #[error(
        "{operand} is in {found}, but this rank's communicator works on {expected}: copy it there"
    )]
    Location {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// Where the communicator works.
        expected: Location,
        /// Where the operand is.
        found: Location,
    },
    /// An output shares memory with another operand, counted from the first element to the last.
    #[error(
        "{output} ({:#x}..{:#x}) overlaps {operand} ({:#x}..{:#x}): {}",
        written.start, written.end, other.start, other.end, remedy(output, operand)
    )]
    Overlap {
        /// `y`, `y_norm`, `y_norm_scale` or `x_full`; of a [`Quantizer`](crate::Quantizer) `out`
        /// or `out_scale`.
        output: &'static str,
        /// The other operand.
        operand: &'static str,
        /// Addresses of the output.
        written: std::ops::Range<u64>,
        /// Addresses of the other operand.
        other: std::ops::Range<u64>,
    },
    /// An operand's earlier uses were awaited on another stream than the call's.
    #[error(
        "the view of {operand} was made for stream {view:#x}, the call is on stream {call:#x}: \
         make the view for the call's stream"
    )]
    ViewStream {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// Handle of the view's stream.
        view: usize,
        /// Handle of the call's stream.
        call: usize,
    },
    /// The stream is in capture, and nobody has promised to keep what the graph will use.
    #[error(
        "the stream is in capture, and the op was built for eager calls: build it with \
         Builder::captures, which says what outlives the graph"
    )]
    Captured,
    /// The memory is not what its description says.
    #[error("{operand} at {address:#x} is not device memory: the driver does not know it ({code})")]
    NotDeviceMemory {
        /// The operand's [name](Operand::name).
        operand: &'static str,
        /// Its address.
        address: u64,
        /// The driver's error code.
        code: i32,
    },
    /// The communicator does not take the call: an earlier fault broke it, or the stream is of
    /// another device.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The kernel could not be launched.
    #[error(
        "the kernel could not be launched: {0}; the communicator is broken, rebuild it on every \
         rank"
    )]
    Launch(LaunchError),
    /// The host executor did not take the call.
    #[error(transparent)]
    Execute(ExecuteError),
    /// The call failed on some rank, and says what every rank was doing. `y` is undefined, and the
    /// communicator is broken until rebuilt.
    #[error(transparent)]
    Fault(Box<Failure>),
}

fn shape_of(layout: Option<Layout>) -> String {
    layout.map_or("not given".to_owned(), |of| format!("[{}, {}]", of.rows, of.cols))
}

/// What an operand of another shape should have.
fn shape_remedy(operand: &str, op: OpKind, expected: Shape, found: Layout) -> String {
    let exchanged = (expected.cols as usize, expected.rows as usize) == (found.rows, found.cols);
    match Operand::named(operand).map(|(operand, weight)| (operand.extent(), weight)) {
        Some((Extent::W, _)) if exchanged => {
            "it looks transposed: weights are [n, k], or [k, n] of an op built with \
             weights(WeightLayout::Kn)"
                .to_owned()
        }
        Some((Extent::W, 0)) => {
            let part = if op.reduces() { "inner" } else { "columns" };
            format!("give this rank's part of the weight, as op.{part}(rank) says")
        }
        Some((Extent::W, _)) => {
            "give this rank's part of the weight, as op.weight_columns(weight, rank) says"
                .to_owned()
        }
        Some((extent, _)) if extent.is_vector() => {
            format!("give one row of {} values", expected.cols)
        }
        _ if found.rows != expected.rows as usize => {
            "all operands have the rows of one m".to_owned()
        }
        _ => format!("give {} columns", expected.cols),
    }
}

/// What the memory of an output may be.
fn remedy(output: &str, other: &str) -> String {
    let or = if other == "residual" && output == "y" {
        ", or is the residual itself with the same rows"
    } else {
        ""
    };
    format!("{output} needs memory of its own{or}")
}

/// How a call brings an operand.
fn call_with(operand: &str) -> String {
    let given = match Operand::named(operand) {
        Some((known, _)) if known.presence() == Presence::Norm => {
            "norm(&gain, &mut y_norm)".to_owned()
        }
        Some((known, _)) if known.presence() == Presence::NormScale => {
            "norm(&gain, &mut y_norm).norm_scale(&norm_scale)".to_owned()
        }
        Some((known, _)) if known.presence() == Presence::Scales => {
            return "op.call(&x).scale_x(&scale_x).weight(&w, &mut y).scale_w(&scale_w).on(stream)"
                .to_owned();
        }
        Some((known, _)) => format!("{0}(&{0})", known.name(0)),
        None => operand.to_owned(),
    };
    format!("op.call(&x).weight(&w, &mut y).{given}.on(stream)")
}

/// The option that brings an operand.
fn option_of(operand: &str) -> String {
    match Operand::named(operand) {
        Some((known, _)) if known.presence() == Presence::Norm => "rms_norm(eps)".to_owned(),
        Some((known, _)) if known.presence() == Presence::NormScale => {
            "quantized_rms_norm(eps, Scales::Tensor)".to_owned()
        }
        Some((known, _)) if known.presence() == Presence::NormScales => {
            let apart = Scales::OF_QUANTIZED.into_iter().filter(|scales| scales.of_row(1) > 0);
            let scales = words::list(apart.map(|scales| format!("{scales}s")), "or");
            format!("quantized_rms_norm(eps, scales) and scales of {scales}")
        }
        Some((known, _)) if known.presence() == Presence::Scales => "operands of 8 bits".to_owned(),
        Some((known, _)) => format!("{}(true)", known.name(0)),
        None => operand.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_shape_is_told_what_differs() {
        let told = |operand, op, [rows, cols]: [u32; 2], found: [usize; 2]| {
            let (expected, found) = (Shape { rows, cols }, Layout::dense(found[0], found[1]));
            CallError::Shape {
                operand,
                op,
                m: 8,
                rank: Rank::new(0),
                world: WorldSize::new(2).unwrap(),
                expected,
                found,
            }
            .to_string()
        };
        let (gathers, sums) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let text =
            "x is [4, 60], but ag_gemm with m = 8 takes [4, 64] on rank 0 of 2: give 64 columns";
        assert_eq!(told("x", gathers, [4, 64], [4, 60]), text);
        assert!(
            told("x", gathers, [4, 64], [8, 60]).ends_with(": all operands have the rows of one m")
        );
        assert!(
            told("y", sums, [4, 64], [8, 64]).ends_with(": all operands have the rows of one m")
        );
        assert!(
            told("w", gathers, [16, 64], [32, 64])
                .ends_with(": give this rank's part of the weight, as op.columns(rank) says")
        );
        assert!(
            told("w", sums, [16, 32], [16, 64])
                .ends_with(": give this rank's part of the weight, as op.inner(rank) says")
        );
        for found in [[64, 16], [32, 16]] {
            let op = if found[0] == 64 { gathers } else { sums };
            let text = told("w", op, [found[1] as u32, found[0] as u32], found);
            assert!(text.contains("it looks transposed") && text.ends_with("(WeightLayout::Kn)"));
        }
        for found in [[16, 1], [1, 32], [8, 16]] {
            assert!(told("bias", gathers, [1, 16], found).ends_with(": give one row of 16 values"));
        }
    }

    #[test]
    fn an_operand_that_a_call_lacks_is_told_with_the_call_that_brings_it() {
        let expected = Shape { rows: 1, cols: 64 };
        assert_eq!(
            CallError::NotGiven { operand: "gain", expected }.to_string(),
            "the op was built with rms_norm(eps), and the call brings no gain: make it as \
             op.call(&x).weight(&w, &mut y).norm(&gain, &mut y_norm).on(stream), with a view of \
             shape (1, 64)"
        );
        for operand in ["bias", "bias[2]", "residual"] {
            let text = CallError::NotGiven { operand, expected }.to_string();
            let word = operand.split('[').next().unwrap();
            assert!(text.contains(&format!("with {word}(true)")), "{text}");
            assert!(text.contains(&format!(".{word}(&{word})")), "{text}");
        }
    }
}
