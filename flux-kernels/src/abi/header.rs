//! The text of `abi.cuh`.

use super::{
    BulkCopy, Exchange, Fill, FillParams, GatheredRowsParams, InterleaveParams, ItemStamps,
    MAPS_OF_WEIGHT, Params, PingPong, QuantizeParams, RAW_END, RawReport, RmsNormParams,
    SENT_BYTES, UnfusedEpilogueParams, VerifyParams, Weight, WorkerStamps, declare_words,
};
use crate::element::{E4M3_MOST, LEAST_SCALE};
use crate::epilogue::{Activation, GELU_CUBIC, GELU_LINEAR};
use flux_core::layout::{self, ABORT_OFFSET, CLOSED_OFFSET, FaultRecord, LINE, control, fault};
use flux_core::machine::PUSHED_BYTES;
use flux_core::numerics::{SCALE_BLOCK, VECTOR_BYTES};
use flux_core::problem::MAX_WEIGHTS;
use flux_core::program::{Await, IN_MAINLOOP_LAG, NONE, RowSource, Sink, Transfer, WorkItem};
use flux_core::rank::MAX_WORLD;
use flux_core::{DType, Scales};
use std::fmt::Write as _;
use std::mem::offset_of;
use std::sync::LazyLock;

/// Declares a struct of flux-core whose fields are all 32-bit words: these.
macro_rules! words {
    ($type:ident: $($field:ident)+) => {{
        const _: () = assert!(
            size_of::<$type>() == 4 * [$(stringify!($field)),+].len(),
            "a field is missing",
        );
        declare_words(stringify!($type), size_of::<$type>(), &[$((stringify!($field), offset_of!($type, $field))),+])
    }};
}

/// The generated header that every kernel includes.
pub(crate) fn header() -> &'static str {
    static HEADER: LazyLock<String> = LazyLock::new(write);
    &HEADER
}

fn write() -> String {
    let mut text = String::from(
        "// Generated from flux-kernels/src/abi.\n#pragma once\n#include \
         \"types.cuh\"\n\nnamespace flux {\n\n",
    );
    let constants = [
        ("kNone", NONE),
        ("kMaxWorld", MAX_WORLD as u32),
        ("kMaxWeights", MAX_WEIGHTS as u32),
        ("kMapsOfWeight", MAPS_OF_WEIGHT as u32),
        ("kLine", LINE as u32),
        ("kCallingOffset", layout::calling_offset(0, 0) as u32),
        ("kSignalsOffset", layout::signal_offset(0, 0) as u32),
        ("kTimedOut", fault::TIMED_OUT),
        ("kInAnotherOp", fault::IN_ANOTHER_OP),
        ("kInMainloopLag", IN_MAINLOOP_LAG),
        ("kVectorBytes", VECTOR_BYTES),
        ("kScaleBlock", SCALE_BLOCK),
        ("kPushedBytes", PUSHED_BYTES as u32),
        ("kSentBytes", SENT_BYTES),
        ("kRawEnd", RAW_END),
    ];
    for (name, value) in constants {
        let _infallible = writeln!(text, "constexpr u32 {name} = {value}u;");
    }
    text += "\n// Values of an enum that are numbered from 0 on.\ntemplate <class Enum>\nconstexpr \
             u32 kCountOf = 0;\n\n";
    text += &counted(
        "RowSource",
        RowSource::ALL.map(|source| (format!("k{source:?}"), source as u32)).into_iter(),
    );
    text += &counted("Sink", Sink::ALL.map(|sink| (format!("k{sink:?}"), sink as u32)).into_iter());
    text += &counted("Fill", Fill::ALL.map(|fill| (format!("k{fill:?}"), fill as u32)).into_iter());
    let codes = [
        ("kTimeout", fault::TIMEOUT),
        ("kAborted", fault::ABORTED),
        ("kDisagreed", fault::DISAGREED),
    ];
    text += &enumeration("FaultCode", &codes);
    text += &enumeration(
        "FaultWait",
        &[("kSignal", fault::SIGNAL), ("kPushed", fault::PUSHED), ("kCall", fault::CALL)],
    );
    text += &dtypes();
    text += &activations();
    text += &words!(WorkItem: a_source a_outer row rows col cols sink out_outer dest slot partials raise counter raise_after await_first
        await_count late_first late_count k_first k_steps part parts await_group partial_slot);
    text += &words!(Await: signal peer k_step);
    text += &words!(Transfer: dest place row rows col cols raise step);
    text += &control_block();
    text += &fault_block();
    for mirror in [
        ItemStamps::MIRROR,
        WorkerStamps::MIRROR,
        Weight::MIRROR,
        Params::MIRROR,
        RmsNormParams::MIRROR,
        QuantizeParams::MIRROR,
        UnfusedEpilogueParams::MIRROR,
        GatheredRowsParams::MIRROR,
        FillParams::MIRROR,
        InterleaveParams::MIRROR,
        VerifyParams::MIRROR,
        RawReport::MIRROR,
        BulkCopy::MIRROR,
        PingPong::MIRROR,
        Exchange::MIRROR,
    ] {
        text += &mirror.declare();
    }
    text + "}  // namespace flux\n"
}

fn enumeration(name: &str, values: &[(&str, u32)]) -> String {
    let values: Vec<String> =
        values.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    format!("enum class {name} : u32 {{ {} }};\n\n", values.join(", "))
}

/// An enum whose numbers are places, with their count: what [`kCountOf`](write) says.
fn counted(name: &str, values: impl Iterator<Item = (String, u32)>) -> String {
    let values: Vec<_> = values.collect();
    debug_assert!(
        (0..).zip(&values).all(|(place, &(_, number))| place == number),
        "{name}: {values:?}"
    );
    let listed: Vec<_> = values.iter().map(|(value, number)| (value.as_str(), *number)).collect();
    format!(
        "{}template <>\nconstexpr u32 kCountOf<{name}> = {};\n\n",
        enumeration(name, &listed),
        values.len()
    )
}

/// The element types, the forms of scales and the bounds of quantised numbers, and for the harness
/// the bounds of their roundings.
fn dtypes() -> String {
    let case = |value: fn(DType) -> f64| -> String {
        let case = |dtype: DType| format!("t == DType::k{dtype:?} ? {:e}f : ", value(dtype) as f32);
        DType::ALL.map(case).concat()
    };
    format!(
        "{}{}constexpr float kE4m3Most = {E4M3_MOST:e}f, kLeastScale = {LEAST_SCALE:e}f;\n\
         constexpr float unit_roundoff(DType t) {{ return {}0.0f; }}\n\
         constexpr float least_roundoff(DType t) {{ return {}0.0f; }}\n\n",
        counted("DType", DType::ALL.map(|dtype| (format!("k{dtype:?}"), dtype as u32)).into_iter()),
        counted("Scales", Scales::ALL.map(|of| (format!("k{of:?}"), of as u32)).into_iter()),
        case(DType::unit_roundoff),
        case(DType::least_roundoff),
    )
}

/// The activations, constants of their formulas, and for the harness the bounds of their errors.
fn activations() -> String {
    let of_each = |value: fn(Activation) -> String| -> String {
        let case = |activation: Activation| {
            format!("a == Activation::{} ? {} : ", activation.cuda_name(), value(activation))
        };
        Activation::ALL.map(case).concat()
    };
    let slopes = of_each(|activation| format!("{:?}f", activation.slope()));
    let exact = of_each(|activation| activation.is_exact().to_string());
    format!(
        "{}constexpr float activation_slope(Activation a) {{ return {slopes}0.0f; }}\n\
         constexpr bool activation_is_exact(Activation a) {{ return {exact}false; }}\n\
         constexpr float kActivationError = {:e}f;\n\
         constexpr float kGeluLinear = {GELU_LINEAR:e}f, kGeluCubic = {GELU_CUBIC:e}f;\n\n",
        counted(
            "Activation",
            Activation::ALL
                .map(|activation| (activation.cuda_name().to_owned(), activation as u32))
                .into_iter()
        ),
        Activation::ERROR,
    )
}

/// Private to the rank.
fn control_block() -> String {
    let words = [
        ("epoch", control::EPOCH),
        ("ticket", control::TICKET),
        ("poison", control::POISON),
        ("pushed", control::PUSHED),
        ("stores_begun", control::STORES_BEGUN),
        ("stores_ended", control::STORES_ENDED),
    ];
    let words = words.map(|(name, offset)| (name, offset as usize));
    // The counters follow.
    declare_words("Control", control::COUNTERS as usize, &words)
}

/// In pinned host memory.
fn fault_block() -> String {
    let words = [
        ("state", offset_of!(FaultRecord, state)),
        ("code", offset_of!(FaultRecord, code)),
        ("wait", offset_of!(FaultRecord, wait)),
        ("rank", offset_of!(FaultRecord, rank)),
        ("peer", offset_of!(FaultRecord, peer)),
        ("signal", offset_of!(FaultRecord, signal)),
        ("expected", offset_of!(FaultRecord, expected)),
        ("seen", offset_of!(FaultRecord, seen)),
        ("epoch", offset_of!(FaultRecord, epoch)),
        ("abort", offset_of!(FaultRecord, abort)),
        ("abort_word", ABORT_OFFSET as usize),
        ("closed", CLOSED_OFFSET as usize),
    ];
    declare_words("Fault", layout::FAULT_BYTES as usize, &words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_declares_what_kernels_use() {
        let text = header();
        for line in [
            "enum class Sink : u32 \
             { kStore = 0, kSend = 1, kReduce = 2, kPartial = 3, kScatter = 4, kReduceRows = 5, kCopy = 6 };",
            "enum class Activation : u32 { kNone = 0, kGelu = 1, kSilu = 2, kRelu = 3 };",
            "constexpr u32 kNone = 4294967295u;",
            "template <>\nconstexpr u32 kCountOf<Sink> = 7;",
            "constexpr float kGeluLinear = 1.5957692e0f, kGeluCubic = 7.1354814e-2f;",
            "static_assert(sizeof(WorkItem) == 96);",
            "    u32 pad_516[31];\n    u32 stores_ended;\n",
            "static_assert(sizeof(Control) == 768);",
            "    u32 pad_40[22];\n    u32 abort_word;\n",
            "    u32 pad_132[31];\n    u32 closed;\n",
            "    const WorkItem* items;",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
