//! The text of `abi.cuh`.

use super::{BulkCopy, FillParams, ItemStamps, Params, PingPong, RawReport, VerifyParams, WorkerStamps, declare_words};
use crate::epilogue::Activation;
use flux_core::layout::{self, ABORT_OFFSET, FaultRecord, LINE, control, fault};
use flux_core::program::{Await, NONE, Transfer, WorkItem, sink, source};
use flux_core::rank::MAX_WORLD;
use flux_core::tile::HOPPER_SHARED_BYTES;
use std::fmt::Write as _;
use std::mem::offset_of;
use std::sync::LazyLock;

/// Declares a struct of flux-core whose fields are all 32-bit words: these.
macro_rules! words {
    ($type:ident: $($field:ident)+) => {{
        const _: () = assert!(size_of::<$type>() == 4 * [$(stringify!($field)),+].len(), "a field is missing");
        declare_words(stringify!($type), size_of::<$type>(), &[$((stringify!($field), offset_of!($type, $field))),+])
    }};
}

/// The generated header that every kernel includes.
pub(crate) fn header() -> &'static str {
    static HEADER: LazyLock<String> = LazyLock::new(write);
    &HEADER
}

fn write() -> String {
    let mut text = String::from("// Generated from flux-kernels/src/abi.\n#pragma once\n#include \"types.cuh\"\n\nnamespace flux {\n\n");
    let constants = [
        ("kNone", NONE),
        ("kMaxWorld", MAX_WORLD as u32),
        ("kLine", LINE as u32),
        ("kCallingOffset", layout::calling_offset(0, 0) as u32),
        ("kSignalsOffset", layout::signal_offset(0, 0) as u32),
        ("kTimedOut", fault::TIMED_OUT),
        ("kInAnotherOp", fault::IN_ANOTHER_OP),
        ("kActivations", Activation::ALL.len() as u32),
        ("kSharedBytesLimit", HOPPER_SHARED_BYTES),
    ];
    for (name, value) in constants {
        let _infallible = writeln!(text, "constexpr u32 {name} = {value}u;");
    }
    text += "\n";
    text += &enumeration("Source", &[("kCaller", source::CALLER), ("kGather", source::GATHER)]);
    let sinks = [
        ("kStore", sink::STORE),
        ("kSend", sink::SEND),
        ("kReduce", sink::REDUCE),
        ("kPartial", sink::PARTIAL),
        ("kScatter", sink::SCATTER),
        ("kReduceRows", sink::REDUCE_ROWS),
    ];
    text += &enumeration("Sink", &sinks);
    let codes = [("kTimeout", fault::TIMEOUT), ("kAborted", fault::ABORTED), ("kDisagreed", fault::DISAGREED)];
    text += &enumeration("FaultCode", &codes);
    text += &enumeration("FaultWait", &[("kSignal", fault::SIGNAL), ("kPushed", fault::PUSHED), ("kCall", fault::CALL)]);
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
        Params::MIRROR,
        FillParams::MIRROR,
        VerifyParams::MIRROR,
        RawReport::MIRROR,
        BulkCopy::MIRROR,
        PingPong::MIRROR,
    ] {
        text += &mirror.declare();
    }
    text + "}  // namespace flux\n"
}

fn enumeration(name: &str, values: &[(&str, u32)]) -> String {
    let values: Vec<String> = values.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    format!("enum class {name} : u32 {{ {} }};\n\n", values.join(", "))
}

/// The activations, and for the harness the bounds of their errors.
fn activations() -> String {
    let name = |activation: Activation| {
        let (word, mut name) = (activation.to_string(), String::from("k"));
        name.extend(word[..1].to_uppercase().chars().chain(word[1..].chars()));
        name
    };
    let names = Activation::ALL.map(name);
    let values: Vec<_> = names.iter().zip(Activation::ALL).map(|(name, activation)| (name.as_str(), activation as u32)).collect();
    let of_each = |value: fn(Activation) -> String| -> String {
        let case = |(name, activation)| format!("a == Activation::{name} ? {} : ", value(activation));
        names.iter().zip(Activation::ALL).map(case).collect::<Vec<_>>().concat()
    };
    let slopes = of_each(|activation| format!("{:?}f", activation.slope()));
    let exact = of_each(|activation| activation.is_exact().to_string());
    format!(
        "{}constexpr float activation_slope(Activation a) {{ return {slopes}0.0f; }}\n\
         constexpr bool activation_is_exact(Activation a) {{ return {exact}false; }}\n\
         constexpr float kActivationError = {:e}f;\n\n",
        enumeration("Activation", &values),
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
    ];
    declare_words("Fault", layout::FAULT_BYTES as usize, &words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_are_numbered_in_order() {
        assert!(Activation::ALL.iter().enumerate().all(|(i, &activation)| activation as usize == i));
    }

    #[test]
    fn the_header_declares_what_kernels_use() {
        let text = header();
        for line in [
            "enum class Sink : u32 { kStore = 0, kSend = 1, kReduce = 2, kPartial = 3, kScatter = 4, kReduceRows = 5 };",
            "enum class Activation : u32 { kNone = 0, kGelu = 1, kSilu = 2, kRelu = 3 };",
            "constexpr u32 kNone = 4294967295u;",
            "static_assert(sizeof(WorkItem) == 96);",
            "    u32 pad_516[31];\n    u32 stores_ended;\n",
            "static_assert(sizeof(Control) == 768);",
            "    u32 pad_40[22];\n    u32 abort_word;\n",
            "    const WorkItem* items;",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
