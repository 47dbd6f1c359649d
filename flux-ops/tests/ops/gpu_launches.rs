//! Calls back to back on a GPU, where a kernel begins while the one ahead ends.
//!
//! On a machine with one GPU a world of one rank runs, as ranks that share a GPU do not begin early.

use crate::common::suite::{self, Number};
use crate::common::{Case, Machine, Node, OPS, OpOptions, Values, build, build_case};
use cudarc::driver::CudaStream;
use flux_core::OpKind;
use flux_cuda::{Launch, Module};
use flux_ops::{FusedLinear, GateLayout};
use half::bf16;

fn on_gpus(test: fn(Machine)) {
    let found = match crate::common::launched::launched() {
        Some(_) => Err("ranks of a launch may share a GPU".to_owned()),
        None => crate::common::gpus::count().map(Machine::Gpus),
    };
    crate::common::where_found::run("gpu_launches", found, test);
}

/// Worlds whose ranks have a GPU each.
fn worlds(machine: Machine) -> Vec<u32> {
    let Machine::Gpus(count) = machine else { return Vec::new() };
    machine.worlds(&[1, 2, 4]).into_iter().filter(|&world| world <= count).collect()
}

/// Kernels that know nothing of what comes behind them. Their parameter is a [`Words`].
const FOREIGN: &[u8] = b"
.version 7.0
.target sm_80
.address_size 64

// Sets all words.
.visible .entry fill(.param .align 8 .b8 words[24]) {
    .reg .b32 %i, %stride, %count, %value, %t, %n;
    .reg .b64 %to, %at;
    .reg .pred %past;
    ld.param.u64 %to, [words];
    ld.param.u32 %count, [words + 8];
    ld.param.u32 %value, [words + 12];
    mov.u32 %i, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mov.u32 %t, %tid.x;
    mad.lo.u32 %i, %i, %n, %t;
    mov.u32 %stride, %nctaid.x;
    mul.lo.u32 %stride, %stride, %n;
again:
    setp.ge.u32 %past, %i, %count;
    @%past bra done;
    mad.wide.u32 %at, %i, 4, %to;
    st.global.u32 [%at], %value;
    add.u32 %i, %i, %stride;
    bra again;
done:
    ret;
}

// Counts the words that differ.
.visible .entry count(.param .align 8 .b8 words[24]) {
    .reg .b32 %i, %stride, %count, %value, %t, %n;
    .reg .b64 %to, %at, %wrong;
    .reg .pred %past, %same;
    ld.param.u64 %to, [words];
    ld.param.u32 %count, [words + 8];
    ld.param.u32 %value, [words + 12];
    ld.param.u64 %wrong, [words + 16];
    mov.u32 %i, %ctaid.x;
    mov.u32 %n, %ntid.x;
    mov.u32 %t, %tid.x;
    mad.lo.u32 %i, %i, %n, %t;
    mov.u32 %stride, %nctaid.x;
    mul.lo.u32 %stride, %stride, %n;
again:
    setp.ge.u32 %past, %i, %count;
    @%past bra done;
    mad.wide.u32 %at, %i, 4, %to;
    ld.global.u32 %t, [%at];
    setp.eq.u32 %same, %t, %value;
    @!%same red.global.add.u32 [%wrong], 1;
    add.u32 %i, %i, %stride;
    bra again;
done:
    ret;
}
\0";

/// 32-bit words on the device, a value, and where those that differ are counted.
#[repr(C)]
#[derive(Clone, Copy)]
struct Words {
    address: u64,
    count: u32,
    value: u32,
    wrong: u64,
}

/// Two elements of this value.
fn pair(value: f32) -> u32 {
    u32::from(bf16::from_f32(value).to_bits()) * 0x1_0001
}

/// Weights that a foreign kernel writes right before a call are those that the call multiplies.
#[test]
fn weights_written_before_a_call_are_never_stale() {
    on_gpus(|machine| {
        for world in worlds(machine) {
            for op in OPS {
                let w = world as usize;
                let [m, n, k] = [16 * w, 1024 * w, 512 * w];
                machine.run(world, suite::defaults, |node| {
                    let op =
                        build::<bf16>(op, [m, n, k], OpOptions::default(), &node.comm).unwrap();
                    rewritten_weights(node, &op, m, 100_000 / 6);
                });
            }
        }
    });
}

/// Calls an op on rows of ones, with weights that are all another number each time.
fn rewritten_weights(node: &Node, op: &FusedLinear, m: usize, calls: u32) {
    let p = op.problem(m).unwrap();
    let [lx, lw, ly] = [p.x_shape(node.rank), p.w_shape(node.rank), p.y_shape(node.rank)];
    let elements = |shape: flux_core::problem::Shape| vec![bf16::ONE; shape.elements()];
    let (x, w, mut y) =
        (node.upload(&elements(lx)), node.upload(&elements(lw)), node.upload(&elements(ly)));
    let wrong = node.upload(&[bf16::ZERO; 2]);
    let stream = untracked(node);
    let raw = node.stream().raw().unwrap();
    let module = Module::load(FOREIGN).unwrap();
    let [fill, count] = [c"fill", c"count"].map(|name| module.function(name, 0).unwrap());
    let foreign = |function, address, elements: usize, value| {
        let (count, wrong) = (elements as u32 / 2, node.address(&wrong));
        let launch = Launch {
            grid: (132, 1),
            threads: 256,
            shared_bytes: 0,
            stream: raw,
            programmatic: false,
        };
        // SAFETY: the parameters are those of both kernels, and the words live to the end.
        unsafe { module.launch(function, launch, &Words { address, count, value, wrong }) }
            .unwrap();
    };
    let [of_w, of_y] = [node.address(&w), node.address(&y)];
    for call in 0..calls {
        let value = (call % 7 + 1) as f32;
        foreign(fill, of_w, lw.elements(), pair(value));
        op.forward(
            &node.view(&x, (lx.rows as usize, lx.cols as usize)),
            &node.view(&w, (lw.rows as usize, lw.cols as usize)),
            &mut node.view_mut(&mut y, (ly.rows as usize, ly.cols as usize)),
            node.stream(),
        )
        .unwrap();
        // Powers of two times small numbers: exact in every sum.
        foreign(count, of_y, ly.elements(), pair(value * p.k() as f32));
    }
    stream.synchronize().unwrap();
    op.status().unwrap();
    let wrong = node.download(&wrong).iter().fold(0, |sum, word| sum | word.to_bits());
    assert_eq!(wrong, 0, "rank {}: {p} multiplied stale weights", node.rank);
}

/// Calls that load their first weights early give the bits of calls one at a time, whatever comes
/// ahead of them.
#[test]
fn constant_weights_change_no_bit() {
    on_gpus(|machine| {
        for world in worlds(machine) {
            for op in OPS {
                let w = world as usize;
                let [n, k] = if op.gathers() { [328 * w, 456] } else { [584, 392 * w] };
                let cases = [129, 1, 16, 64].map(|rows| case_of(op, [rows * w, n, k], world, 47));
                machine.run(world, suite::defaults, |node| {
                    back_to_back(node, &cases, OpOptions::default());
                    if op.gathers() {
                        let shape = [129 * w, 512 * w, 456];
                        let gated = case_of(op, shape, world, 47).gated(GateLayout::Interleaved);
                        back_to_back(node, &[gated], OpOptions::default());
                    }
                });
            }
        }
    });
}

/// The stream of a rank whose memory is used on no other, so that no event lies between calls.
fn untracked(node: &Node) -> &CudaStream {
    let stream = node.cuda_stream().unwrap();
    // SAFETY: all memory of this rank is used on this one stream.
    unsafe { stream.context().disable_event_tracking() };
    stream
}

fn case_of(op: OpKind, extents: [usize; 3], world: u32, seed: u64) -> Case<bf16> {
    Case::new(op, extents, world, Values::Reals, seed)
}

/// Enqueues calls of all cases in turn, and compares them with calls one at a time. The first case
/// has the most rows.
fn back_to_back<T: Number>(node: &Node, cases: &[Case<T>], options: OpOptions) {
    let stream = untracked(node);
    let op = build_case(&cases[0], options, node);
    let expected: Vec<_> = cases.iter().map(|case| suite::call(&op, case, node).unwrap()).collect();
    let mut calls: Vec<_> = (0..24)
        .map(|call| {
            let case = &cases[call % cases.len()];
            let (lx, lw, ly) = suite::layouts(case, node.rank);
            let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
            ((x, lx), (w, lw), (node.poisoned::<T>(ly.span()), ly))
        })
        .collect();
    for ((x, lx), (w, lw), (y, ly)) in &mut calls {
        let (x, w, mut y) = (node.view(x, *lx), node.view(w, *lw), node.view_mut(y, *ly));
        op.call(&x).weight(&w, &mut y).constant_weights().on(node.stream()).unwrap();
    }
    stream.synchronize().unwrap();
    for (call, (_, _, (y, _))) in calls.iter().enumerate() {
        let case = &cases[call % cases.len()];
        assert!(
            node.download(y) == expected[call % cases.len()],
            "rank {}: call {call} of {} differs",
            node.rank,
            case.problem
        );
    }
    op.status().unwrap();
}
