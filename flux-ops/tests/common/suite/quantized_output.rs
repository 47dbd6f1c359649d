//! Results that an AllGather-GEMM writes as 8-bit operands: the bits that a quantiser makes of the
//! rounded results, as `x` of the next op.

use super::scaled::{self, Inputs};
use super::{Case, Machine, Node, defaults};
use crate::common::{OpOptions, Values};
use flux_core::plan::{KSplit, Plan};
use flux_core::{DType, Numerics, OpKind, TileShape};
use flux_ops::{
    Activation, BuildError, CallError, F8E4M3, FusedLinear, GateLayout, Layout, OpSpec, Quantizer,
    Scales,
};
use half::bf16;

/// Of sums of integers some are larger than 448 times this.
const GIVEN: f32 = 0.5;

/// Forms of operands' scales and of results'.
const FORMS: [[Scales; 2]; 4] = [
    [Scales::Tensor, Scales::Tensor],
    [Scales::Row, Scales::Tensor],
    [Scales::Block, Scales::Tensor],
    [Scales::Block, Scales::Block],
];

/// Sums of integers are exact by every plan. From three ranks on the first has more columns.
fn case(world: u32, m: usize, scales: Scales, gates: Option<GateLayout>) -> Case<bf16> {
    let (w, group) = (world as usize, if scales == Scales::Block { 256 } else { 96 });
    let n = group * (w + w / 3) * if gates.is_some() { 2 } else { 1 };
    let numerics = Numerics::e4m3(scales, DType::Bf16);
    let case = scaled::case(OpKind::AllGatherGemm, [m, n, 256], world, numerics, Values::Integers);
    let case = case.finished(true, Values::Integers, Activation::Silu);
    if let Some(gates) = gates { case.gated(gates) } else { case }
}

/// Its own choice, split sums, and tiles of several forms: with rows of two consumers and of one,
/// with operands exchanged, and with a buffer that consumers share.
fn plans(machine: Machine, [_, of_y]: [Scales; 2], gated: bool) -> Vec<Option<Plan>> {
    if matches!(machine, Machine::TwoNodes { .. } | Machine::Messages(_)) {
        return vec![None];
    }
    let tiles = match (of_y, gated) {
        (Scales::Block, true) => &[(64, 256)][..],
        (Scales::Block, false) => &[(64, 128), (128, 128), (32, 128), (256, 128)],
        _ => &[(64, 96), (128, 128), (32, 128), (152, 128), (160, 192)],
    };
    let tiles = tiles.iter().map(|&(m, n)| Plan::of(TileShape::new(m, n, 128)));
    let split = tiles.clone().take(1).map(|plan| Plan { k: KSplit::SplitK(2), ..plan });
    // On the host tiles change nothing.
    let tiles = tiles.filter(|_| machine != Machine::Host);
    std::iter::once(None).chain(tiles.chain(split).map(Some)).collect()
}

/// The op with quantised results; none where the device's kernel has none of that form.
fn build(case: &Case<bf16>, of_y: Scales, plan: Option<Plan>, node: &Node) -> Option<FusedLinear> {
    let mut spec = scaled::spec(case, OpOptions::of(plan), node);
    spec.numerics.output_scales = of_y;
    match FusedLinear::build(spec, &node.comm) {
        Err(BuildError::NoNumerics { numerics, .. }) => {
            assert_eq!(numerics.output_scales, Scales::Block);
            None
        }
        // A tile of another generation.
        Err(BuildError::NoKernel(_)) if plan.is_some() => None,
        built => Some(built.unwrap()),
    }
}

/// Of rows with gaps: codes and scales, and what lies behind.
fn parts(memory: &[F8E4M3], layout: Layout, cols: usize, of_y: Scales) -> [Vec<u8>; 2] {
    let used = cols + 4 * of_y.of_row(cols as u32) as usize;
    let rows = memory.chunks(layout.row_stride);
    let bits = |of: &[F8E4M3]| of.iter().map(F8E4M3::to_bits).collect::<Vec<_>>();
    let written = rows.clone().flat_map(|row| bits(&row[..used]));
    let behind = rows.flat_map(|row| bits(row.get(layout.cols..).unwrap_or_default()));
    [written.collect(), behind.collect()]
}

/// Columns of `y`, and where it goes.
fn layout(case: &Case<bf16>, of_y: Scales, node: &Node) -> (usize, Layout) {
    let shape = case.y_shape(node.rank);
    let (rows, cols) = (shape.rows as usize, shape.cols as usize);
    let wide = cols + (4 * of_y.of_row(shape.cols) as usize).next_multiple_of(128);
    (cols, Layout::strided(rows, wide, wide + 32))
}

fn by_quantizer(
    y: &[bf16],
    of_y: Scales,
    (cols, layout): (usize, Layout),
    node: &Node,
) -> Vec<F8E4M3> {
    let quantizer = Quantizer::new(&node.comm).unwrap();
    let mut codes = node.poisoned::<F8E4M3>(layout.span());
    let (y, given) = (node.upload(y), node.upload(&[GIVEN]));
    let (y, given) = (node.view(&y, (layout.rows, cols)), node.view(&given, (1, 1)));
    let call = match of_y {
        Scales::Tensor => quantizer.tensor(&y, &given),
        of => quantizer.rows(&y, of),
    };
    call.write(&mut node.view_mut(&mut codes, layout), node.stream()).unwrap();
    node.download(&codes)
}

fn by_op(
    op: &FusedLinear,
    case: &Case<bf16>,
    of_y: Scales,
    layout: Layout,
    node: &Node,
) -> Vec<F8E4M3> {
    let mut codes = node.poisoned::<F8E4M3>(layout.span());
    let given = node.upload(&[GIVEN]);
    let given = node.view(&given, (1, 1));
    scaled::with_inputs(case, node, |Inputs { x, x_scale, w, w_scale, bias, .. }| {
        let (bias, mut y) = (bias.unwrap(), node.view_mut(&mut codes, layout));
        let call = op.call(&x).scale_x(&x_scale).quantized_weight(&w, &mut y);
        let call = call.scale_w(&w_scale).bias(&bias);
        let call = if of_y == Scales::Tensor { call.y_scale(&given) } else { call };
        call.on(node.stream()).unwrap();
    });
    node.download(&codes)
}

pub fn quantised_outputs_have_the_bits_of_the_quantizer(machine: Machine) {
    let gates = [None, Some(GateLayout::Interleaved), Some(GateLayout::Concatenated)];
    for world in machine.worlds(&[1, 2, 3, 4]) {
        for ([of_x, of_y], gates) in FORMS.into_iter().flat_map(|of| gates.map(|gates| (of, gates)))
        {
            // One row: shards without rows. Many: all rows of every tile.
            let many = (machine != Machine::Host).then_some(601);
            for m in [21 * world as usize - usize::from(world > 1), 1].into_iter().chain(many) {
                let case = case(world, m, of_x, gates);
                machine.run(world, defaults, |node| {
                    let plain = scaled::build(&case, OpOptions::default(), node);
                    let y = scaled::call_with(&plain, &case, node, None).unwrap();
                    let (cols, layout) = layout(&case, of_y, node);
                    let expected = by_quantizer(&y, of_y, (cols, layout), node);
                    for plan in plans(machine, [of_x, of_y], gates.is_some()) {
                        let Some(op) = build(&case, of_y, plan, node) else { continue };
                        let written = by_op(&op, &case, of_y, layout, node);
                        let [found, expected] =
                            [&written, &expected].map(|of| parts(of, layout, cols, of_y));
                        assert!(found == expected, "{}", op.explain());
                    }
                });
            }
        }
    }
}

/// Columns of different counts, which end within a tile.
pub fn several_quantised_outputs_have_the_bits_of_the_quantizer(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        for [of_x, of_y] in FORMS {
            let (w, k) = (world as usize, 256);
            let columns = [384, 128, 256].map(|columns| columns * w);
            machine.run(world, defaults, |node| {
                let numerics = Numerics::e4m3(of_x, DType::Bf16);
                let mut spec = OpSpec::new(OpKind::AllGatherGemm, 7, 768 * w, k, numerics);
                spec.launch.workers = node.workers;
                spec.columns = Some(columns.to_vec());
                let plain = FusedLinear::build(spec.clone(), &node.comm).unwrap();
                spec.numerics.output_scales = of_y;
                let op = match FusedLinear::build(spec, &node.comm) {
                    Err(BuildError::NoNumerics { .. }) => return,
                    built => built.unwrap(),
                };
                let rows = plain.rows(7, node.rank).unwrap().len();
                let wide = plain.problem(7).unwrap().gathered_columns() as usize;
                // Codes of small integers, whose scales of 1 are those of rows, too.
                let mut x: Vec<_> = (0..rows * wide)
                    .map(|at| F8E4M3::from_f32((at * 7 % 11) as f32 - 5.0))
                    .collect();
                for row in x.chunks_exact_mut(wide) {
                    for scale in row[k..].chunks_exact_mut(4) {
                        scale.copy_from_slice(&1.0_f32.to_le_bytes().map(F8E4M3::from_bits));
                    }
                }
                let w: Vec<_> =
                    (0..384 * k).map(|at| F8E4M3::from_f32((at * 5 % 13) as f32 - 6.0)).collect();
                let (x, w) = (node.upload(&x), node.upload(&w));
                let (ones, given) = (node.upload(&[1.0_f32; 384]), node.upload(&[GIVEN]));
                let given = node.view(&given, (1, 1));
                let x = node.view(&x, (rows, wide));
                let (x, scale_x) = match of_x {
                    Scales::Tensor => (x, node.view(&ones, (1, 1))),
                    of => x.with_scales(k, of).unwrap(),
                };
                let each = columns.map(|columns| columns / world as usize);
                let w = each.map(|n| node.view(&w, (n, k)));
                let scale_w = each.map(|n| match of_x {
                    Scales::Row => node.view(&ones, (1, n)),
                    Scales::Block => node.view(&ones, Layout::strided(n / 128, k / 128, 4)),
                    _ => node.view(&ones, (1, 1)),
                });
                let mut y = each.map(|n| node.poisoned::<bf16>(7 * n));
                let layouts = each.map(|n| {
                    let wide = n + (4 * of_y.of_row(n as u32) as usize).next_multiple_of(128);
                    Layout::strided(7, wide, wide + 16)
                });
                let mut codes = layouts.map(|of| node.poisoned::<F8E4M3>(of.span()));
                {
                    let mut at = 0..;
                    let mut y =
                        y.each_mut().map(|y| node.view_mut(y, (7, each[at.next().unwrap()])));
                    let mut at = 0..;
                    let mut codes =
                        codes.each_mut().map(|of| node.view_mut(of, layouts[at.next().unwrap()]));
                    let (mut call, mut quantized) = (
                        plain.call(&x).scale_x(&scale_x),
                        op.call::<_, bf16>(&x).scale_x(&scale_x),
                    );
                    for (((w, scale), y), codes) in
                        w.iter().zip(&scale_w).zip(&mut y).zip(&mut codes)
                    {
                        call = call.weight(w, y).scale_w(scale);
                        quantized = quantized.quantized_weight(w, codes).scale_w(scale);
                    }
                    call.on(node.stream()).unwrap();
                    let is_given = of_y == Scales::Tensor;
                    let call = if is_given { quantized.y_scale(&given) } else { quantized };
                    call.on(node.stream()).unwrap();
                }
                for (((y, codes), layout), n) in y.iter().zip(&codes).zip(layouts).zip(each) {
                    let expected = by_quantizer(&node.download(y), of_y, (n, layout), node);
                    let [found, expected] =
                        [&node.download(codes), &expected].map(|of| parts(of, layout, n, of_y));
                    assert!(found == expected, "{n} columns, {}", op.explain());
                }
            });
        }
    }
}

/// As a gated MLP: the second op reads what the first has written, where it lies.
pub fn quantised_outputs_are_the_operands_of_the_next_op(machine: Machine) {
    let next_op = OpKind::GemmAllReduce;
    if !machine.ops().contains(&next_op) {
        return;
    }
    for world in machine.worlds(&[1, 2, 4]) {
        for [of_x, of_y] in [FORMS[0], FORMS[3]] {
            let m = 9;
            let case = case(world, m, of_x, Some(GateLayout::Concatenated));
            machine.run(world, defaults, |node| {
                let Some(op) = build(&case, of_y, None, node) else { return };
                let plain = scaled::build(&case, OpOptions::default(), node);
                let y = scaled::call_with(&plain, &case, node, None).unwrap();
                let (cols, layout) = layout(&case, of_y, node);
                let from = [
                    by_op(&op, &case, of_y, layout, node),
                    by_quantizer(&y, of_y, (cols, layout), node),
                ];
                let (n, k) = (128, case.problem.n() as usize / 2);
                let numerics = Numerics::e4m3(of_y, DType::Bf16);
                let mut next = OpSpec::new(next_op, m, n, k, numerics);
                next.launch.workers = node.workers;
                let next = FusedLinear::build(next, &node.comm).unwrap();
                assert_eq!(
                    next.inner(node.rank).len(),
                    cols,
                    "a rank's columns are its inner part"
                );
                let weight: Vec<_> =
                    (0..n * cols).map(|at| F8E4M3::from_f32((at % 5) as f32 - 2.0)).collect();
                let (weight, ones) = (node.upload(&weight), node.upload(&[1.0_f32; 64]));
                let [found, expected] = from.map(|codes| {
                    let (codes, given) = (node.upload(&codes), node.upload(&[GIVEN]));
                    let mut y = node.poisoned::<bf16>(m * n);
                    {
                        let x = node.view(&codes, layout);
                        let (x, scale_x, scale_w) = if of_y == Scales::Block {
                            let (x, scale) = x.with_scales(cols, of_y).unwrap();
                            (x, scale, node.view(&ones, (1, cols / 128)))
                        } else {
                            (x, node.view(&given, (1, 1)), node.view(&ones, (1, 1)))
                        };
                        let (weight, mut y) =
                            (node.view(&weight, (n, cols)), node.view_mut(&mut y, (m, n)));
                        let call = next.call(&x).scale_x(&scale_x).weight(&weight, &mut y);
                        call.scale_w(&scale_w).on(node.stream()).unwrap();
                    }
                    node.download(&y)
                });
                assert!(found.iter().any(|y| y.to_f32() != 0.0) && found == expected);
            });
        }
    }
}

pub fn quantised_outputs_of_no_rows_are_nothing(machine: Machine) {
    for world in machine.worlds(&[1, 2]) {
        for [of_x, of_y] in FORMS {
            let case = case(world, 4, of_x, None);
            machine.run(world, defaults, |node| {
                let Some(op) = build(&case, of_y, None, node) else { return };
                let (_, layout) = layout(&case, of_y, node);
                let none = |layout: Layout| Layout { rows: 0, ..layout };
                let mut codes = node.poisoned::<F8E4M3>(0);
                let given = node.upload(&[GIVEN]);
                let given = node.view(&given, (1, 1));
                scaled::with_inputs(
                    &case,
                    node,
                    |Inputs { x, x_scale, w, w_scale, bias, .. }| {
                        let empty = node.poisoned::<F8E4M3>(0);
                        let no_scales = node.upload::<f32>(&[]);
                        let x = node.view(&empty, none(x.layout()));
                        let of_rows = node.view(&no_scales, none(x_scale.layout()));
                        let scale_x = if of_x == Scales::Tensor { &x_scale } else { &of_rows };
                        let (bias, mut y) =
                            (bias.unwrap(), node.view_mut(&mut codes, none(layout)));
                        let call = op.call(&x).scale_x(scale_x).quantized_weight(&w, &mut y);
                        let call = call.scale_w(&w_scale).bias(&bias);
                        let is_given = of_y == Scales::Tensor;
                        let call = if is_given { call.y_scale(&given) } else { call };
                        call.on(node.stream()).unwrap();
                    },
                );
            });
        }
    }
}

pub fn an_output_that_cannot_be_quantised_is_refused(machine: Machine) {
    machine.run(1, defaults, |node| {
        let refused = |numerics: Numerics, of_y, op, set: fn(&mut OpSpec)| {
            let mut spec = OpSpec::new(op, 8, 512, 256, numerics.with_output_scales(of_y));
            set(&mut spec);
            FusedLinear::build(spec, &node.comm).unwrap_err()
        };
        let (gathers, sums) = (OpKind::AllGatherGemm, OpKind::GemmReduceScatter);
        let [of_rows, of_blocks] =
            [Scales::Row, Scales::Block].map(|of| Numerics::e4m3(of, DType::Bf16));
        let as_it_is = |_: &mut OpSpec| {};
        for (numerics, of_y) in [
            (of_rows, Scales::Row),
            (of_rows, Scales::Block),
            (of_blocks, Scales::Row),
            (DType::Bf16.into(), Scales::Tensor),
        ] {
            let error = refused(numerics, of_y, gathers, as_it_is).to_string();
            assert!(error.ends_with("else take outputs of 16 bits, and a quantiser"), "{error}");
        }
        let error = refused(of_rows, Scales::Tensor, sums, as_it_is);
        assert!(matches!(error, BuildError::Option { option: "quantized", .. }), "{error}");
        let narrow = |spec: &mut OpSpec| {
            spec.plan = Some(Plan::of(TileShape::new(64, 128, 128)));
            spec.epilogue.gates = Some(GateLayout::Interleaved);
        };
        let error = refused(of_blocks, Scales::Block, gathers, narrow);
        assert_eq!(
            error.to_string(),
            "tiles of 64x128x128 split the outputs that share a scale: 128 columns of y take 256 \
             of a tile"
        );

        let case = case(1, 4, Scales::Row, None);
        let op = build(&case, Scales::Tensor, None, node).unwrap();
        let (cols, layout) = layout(&case, Scales::Tensor, node);
        let (mut codes, mut rounded) =
            (node.poisoned::<F8E4M3>(layout.span()), node.poisoned::<bf16>(4 * cols));
        let given = node.upload(&[GIVEN]);
        let given = node.view(&given, (1, 1));
        scaled::with_inputs(&case, node, |Inputs { x, x_scale, w, w_scale, bias, .. }| {
            let bias = bias.unwrap();
            let mut y = node.view_mut(&mut codes, layout);
            let call = op.call(&x).scale_x(&x_scale).quantized_weight(&w, &mut y);
            let error = call.scale_w(&w_scale).bias(&bias).on(node.stream()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "the op was built with quantized(Scales::Tensor), and the call brings no y_scale: \
                 make it as op.call(&x).quantized_weight(&w, &mut y).y_scale(&y_scale).on(stream), \
                 with a view of shape (1, 1)"
            );
            let mut y = node.view_mut(&mut rounded, (4, cols));
            let call = op.call(&x).scale_x(&x_scale).weight(&w, &mut y).scale_w(&w_scale);
            let error = call.bias(&bias).y_scale(&given).on(node.stream()).unwrap_err();
            assert!(
                matches!(error, CallError::View { operand: "y", .. })
                    && error.to_string().contains("e4m3"),
                "{error}"
            );
            let plain = scaled::build(&case, OpOptions::default(), node);
            let call = plain.call(&x).scale_x(&x_scale).weight(&w, &mut y).scale_w(&w_scale);
            let error = call.bias(&bias).y_scale(&given).on(node.stream()).unwrap_err();
            assert!(matches!(error, CallError::Unwanted { operand: "y_scale", .. }), "{error}");
        });
        assert!(node.download(&rounded).iter().all(|y| y.is_nan()), "a refused call wrote");
    });
}
