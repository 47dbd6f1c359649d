//! 8-bit operands with scales: of a tensor, of rows, of blocks.
//!
//! A case holds the dequantised operands in bf16, which is exact: codes have four significant bits,
//! and scales are powers of two.

use super::{Case, Check, Machine, Node, defaults};
use crate::common::{OPS, OpOptions, Values};
use flux_core::numerics::SCALE_BLOCK;
use flux_core::plan::{KSplit, Plan, RowMapping};
use flux_core::problem::Shape;
use flux_core::{DType, Numerics, OpKind, Partials, Problem, Rank, Scales, TileShape, WorldSize};
use flux_kernels::harness::data::raw;
use flux_ops::{
    Activation, BuildError, CallError, Element, EpilogueSpec, F8E4M3, FusedLinear, GateLayout,
    Layout, OpSpec, Operand, OperandSet, TensorMut, TensorRef, WeightLayout,
};
use half::bf16;

const WORLDS: [u32; 4] = [1, 2, 3, 4];
const X_SEED: u64 = 5;
const W_SEED: u64 = 6;

/// Extents with partial tiles. From three ranks on the first third has a group more.
fn shape(op: OpKind, world: u32, scales: Scales) -> [usize; 3] {
    let (w, group) = (world as usize, if scales == Scales::Block { 128 } else { 16 });
    let (more, m) = (w / 3 * group, 21 * w - usize::from(w > 1));
    let split = |least: usize| least.next_multiple_of(group) * w + more;
    let whole = |least: usize| least.next_multiple_of(group);
    match op {
        OpKind::AllGatherGemm => [m, split(144), whole(272)],
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => [m, whole(144), split(272)],
    }
}

/// Of operands with four significant bits, as codes have.
pub(super) fn case(
    op: OpKind,
    [m, n, k]: [usize; 3],
    world: u32,
    numerics: Numerics,
    values: Values,
) -> Case<bf16> {
    let world = WorldSize::new(world).unwrap();
    let problem = Problem::new(op, m, n, k, numerics, world).unwrap();
    Case::of(problem, values, 41)
        .with_operands(|v: bf16| bf16::from_f32(F8E4M3::from_f32(v.to_f32()).to_f32()))
}

/// The power of two that a line's codes at a block are larger by.
fn shift(seed: u64, line: u32, block: u32) -> i32 {
    (raw(seed, line, block) % 8).cast_signed()
}

/// An operand's codes, and its scales: one, one a line, or one a block.
struct Scaled {
    codes: Vec<F8E4M3>,
    scales: Vec<f32>,
}

/// Divides lines of values by their scales. Scales of blocks hold for `lines_of_block` lines.
fn scaled(values: &[bf16], cols: usize, form: Scales, lines_of_block: usize, seed: u64) -> Scaled {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    let block = |col: usize| (col / SCALE_BLOCK as usize) as u32;
    for (line, row) in values.chunks_exact(cols).enumerate() {
        let of = |col| match form {
            Scales::None | Scales::Tensor => shift(seed, 0, 0),
            Scales::Row => shift(seed, line as u32, 0),
            Scales::Block => shift(seed, (line / lines_of_block) as u32, block(col)),
        };
        let code = |(col, v): (usize, &bf16)| F8E4M3::from_f32(v.to_f32() * 2_f32.powi(of(col)));
        codes.extend(row.iter().enumerate().map(code));
        let has_scales = match form {
            Scales::None | Scales::Tensor => line == 0,
            Scales::Row => true,
            Scales::Block => line % lines_of_block == 0,
        };
        let step = if form == Scales::Block { SCALE_BLOCK as usize } else { cols };
        if has_scales {
            scales.extend((0..cols).step_by(step).map(|col| 2_f32.powi(-of(col))));
        }
    }
    Scaled { codes, scales }
}

pub(super) fn build(case: &Case<bf16>, options: OpOptions, node: &Node) -> FusedLinear {
    let mut spec = OpSpec::of_problem(&case.problem);
    spec.plan = options.plan;
    spec.launch.workers = options.workers.or(node.workers);
    let operands = OperandSet::EMPTY.with(Operand::Bias, case.has_bias());
    spec.epilogue = EpilogueSpec {
        operands: operands.with(Operand::Residual, case.has_residual()),
        activation: case.activation,
        gates: case.gates,
        rms_norm: options.rms_norm,
    };
    FusedLinear::build(spec, &node.comm).unwrap()
}

/// One call on fresh buffers. Rows of an AllGather-GEMM carry their scales, those of the others
/// have them apart.
fn call(op: &FusedLinear, case: &Case<bf16>, node: &Node) -> Result<Vec<bf16>, CallError> {
    call_with(op, case, node, None)
}

/// With a gain and a place for quantised rows, of an op with a norm.
pub(super) fn call_with(
    op: &FusedLinear,
    case: &Case<bf16>,
    node: &Node,
    norm: Option<(&TensorRef<'_, bf16>, &mut TensorMut<'_, F8E4M3>)>,
) -> Result<Vec<bf16>, CallError> {
    let (problem, rank) = (&case.problem, node.rank);
    let form = problem.numerics().scales;
    let [x_shape, w_shape] = [problem.x_shape(rank), problem.w_shape(rank)];
    let seed = |seed| {
        seed + 16
            * u64::from(if form == Scales::Tensor && problem.op().gathers() {
                0
            } else {
                rank.get()
            })
    };
    let of_x = scaled(&case.x(rank), x_shape.cols as usize, form, 1, seed(X_SEED));
    let of_w =
        scaled(&case.w(rank), w_shape.cols as usize, form, SCALE_BLOCK as usize, seed(W_SEED));
    let carried = problem.op().gathers() && problem.rows_carry_scales();
    let x_memory =
        node.upload(&if carried { rows_with_scales(problem, x_shape, &of_x) } else { of_x.codes });
    let x_scales = node.upload(&of_x.scales);
    let (w, w_scales) = (node.upload(&of_w.codes), node.upload(&of_w.scales));
    let dense = |s: Shape| Layout::dense(s.rows as usize, s.cols as usize);
    let ly = dense(case.y_shape(rank));
    let mut y = node.poisoned(ly.span());
    let [bias, residual] =
        [case.bias(rank), case.residual(rank)].map(|of| of.map(|of| node.upload(&of)));
    let cols = problem.n_local(rank) as usize;
    let (bias, residual) = (
        bias.as_ref().map(|bias| node.view(bias, (cols,))),
        residual.as_ref().map(|rows| node.view(rows, ly)),
    );
    let rows = x_shape.rows as usize;
    let w_scale_shape = match form {
        Scales::None | Scales::Tensor => (1, 1),
        Scales::Row => (1, w_shape.rows as usize),
        Scales::Block => (w_shape.rows as usize / 128, w_shape.cols as usize / 128),
    };
    {
        let (x, x_scale): (TensorRef<'_, F8E4M3>, TensorRef<'_, f32>) = if carried {
            let wide = (rows, problem.gathered_columns() as usize);
            node.view(&x_memory, wide).with_scales(problem.k() as usize, form).unwrap()
        } else {
            let count = form.of_row(x_shape.cols) as usize;
            let layout = if count == 0 { (1, 1) } else { (rows, count) };
            (node.view(&x_memory, dense(x_shape)), node.view(&x_scales, layout))
        };
        let (w, w_scale) = (node.view(&w, dense(w_shape)), node.view(&w_scales, w_scale_shape));
        let mut y = node.view_mut(&mut y, ly);
        let call = op.call(&x).scale_x(&x_scale).weight(&w, &mut y).scale_w(&w_scale);
        let call = if let Some(bias) = &bias { call.bias(bias) } else { call };
        let call = if let Some(residual) = &residual { call.residual(residual) } else { call };
        let call = if let Some((gain, y_norm)) = norm { call.norm(gain, y_norm) } else { call };
        call.on(node.stream())?;
    }
    Ok(node.download(&y))
}

/// Rows of codes, the scales of each behind it.
fn rows_with_scales(problem: &Problem, shape: Shape, x: &Scaled) -> Vec<F8E4M3> {
    let (cols, wide) = (shape.cols as usize, problem.gathered_columns() as usize);
    let count = problem.numerics().scales.of_row(shape.cols) as usize;
    let rows = x.codes.chunks_exact(cols).zip(x.scales.chunks_exact(count));
    rows.flat_map(|(codes, scales)| {
        let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).map(F8E4M3::from_bits);
        let padding = std::iter::repeat_n(F8E4M3::from_bits(0x7f), wide - cols - 4 * count);
        codes.iter().copied().chain(scales).chain(padding)
    })
    .collect()
}

/// The op's own choice, split sums, and for sums flattened rows.
fn plans(machine: Machine, op: OpKind) -> Vec<Option<Plan>> {
    if matches!(machine, Machine::TwoNodes { .. } | Machine::Messages(_)) {
        return vec![None];
    }
    // Every kernel of 8-bit operands has it.
    let tile = TileShape::new(64, 128, 128);
    let split = Plan { k: KSplit::SplitK(2), ..Plan::of(tile) };
    let flattened = Plan { rows: RowMapping::Flattened, ..Plan::of(tile) };
    let two = Plan { rows: RowMapping::FlattenedTwoExchanges, ..Plan::of(tile) };
    let all = [Some(split), Some(flattened), (op == OpKind::GemmAllReduce).then_some(two)];
    std::iter::once(None).chain(all.into_iter().flatten().map(Some)).collect()
}

fn all_numerics() -> impl Iterator<Item = Numerics> {
    Scales::OF_QUANTIZED.into_iter().map(|scales| Numerics::e4m3(scales, DType::Bf16))
}

pub fn scaled_integers_give_the_exact_result(machine: Machine) {
    for (world, &op) in machine
        .worlds(&WORLDS)
        .into_iter()
        .flat_map(|w| machine.ops().iter().map(move |op| (w, op)))
    {
        for numerics in all_numerics() {
            let partials = if op.reduces() { Partials::F32 } else { Partials::Output };
            let case = case(
                op,
                shape(op, world, numerics.scales),
                world,
                numerics.with_partials(partials),
                Values::Integers,
            )
            .with_residual(Values::Integers);
            let case = if op.gathers() {
                case.finished(true, Values::Integers, Activation::Relu)
            } else {
                case
            };
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                for plan in plans(machine, op) {
                    let op = build(&case, OpOptions::of(plan), node);
                    let y = call(&op, &case, node).unwrap();
                    case.assert_equal(&expected, &op, node.rank, &y, "a call");
                }
            });
        }
    }
}

/// Random numbers, with gates where an op has them.
pub fn scaled_numbers_stay_within_the_bound(machine: Machine) {
    for (world, &op) in machine
        .worlds(&[1, 3])
        .into_iter()
        .flat_map(|w| machine.ops().iter().map(move |op| (w, op)))
    {
        for numerics in all_numerics() {
            let [m, n, k] = shape(op, world, numerics.scales);
            let n = if op.gathers() { 2 * n } else { n };
            let case = case(op, [m, n, k], world, numerics, Values::Reals);
            let case = if op.gathers() {
                case.finished(false, Values::Reals, Activation::Silu)
                    .gated(GateLayout::Concatenated)
            } else {
                case.with_residual(Values::Reals)
            };
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let op = build(&case, OpOptions::default(), node);
                let y = call(&op, &case, node).unwrap();
                case.assert_close(&expected, &op, node.rank, &y, "a call");
            });
        }
    }
}

/// Rows and their scales of one call are not those of another.
pub fn scaled_rows_change_with_every_call(machine: Machine) {
    let numerics = Numerics::e4m3(Scales::Row, DType::Bf16).with_partials(Partials::F32);
    for world in machine.worlds(&[2, 3]) {
        let layers = OPS.iter().filter(|op| machine.ops().contains(op)).map(|&op| {
            let [most, n, k] = shape(op, world, Scales::Row);
            let rows = [most, 1, 7, world as usize * 5, 2];
            rows.map(|m| {
                let case = case(op, [m, n, k], world, numerics, Values::Integers);
                (case.expected_on(machine), case)
            })
        });
        let layers: Vec<_> = layers.collect();
        machine.run(world, defaults, |node| {
            let ops: Vec<_> =
                layers.iter().map(|cases| build(&cases[0].1, OpOptions::default(), node)).collect();
            for turn in 0..10 {
                for (op, cases) in ops.iter().zip(&layers) {
                    let (expected, case) = &cases[turn * 3 % cases.len()];
                    let y = call(op, case, node).unwrap();
                    case.assert_equal(expected, op, node.rank, &y, &format!("turn {turn}"));
                }
            }
        });
    }
}

pub fn scales_that_do_not_fit_are_refused(machine: Machine) {
    let numerics = Numerics::e4m3(Scales::Row, DType::Bf16);
    machine.run(1, defaults, |node| {
        let case = case(OpKind::AllGatherGemm, [8, 32, 64], 1, numerics, Values::Integers);
        let op = build(&case, OpOptions::default(), node);
        let (x, w, mut y) = (
            node.upload(&vec![F8E4M3::from_f32(1.0); 8 * 128]),
            node.upload(&vec![F8E4M3::from_f32(1.0); 32 * 64]),
            node.poisoned::<bf16>(8 * 32),
        );
        let (ones, few) = (node.upload(&[1_f32; 32]), node.upload(&[1_f32; 16]));
        let w = node.view(&w, (32, 64));
        let (wide, scale) = node.view(&x, (8, 128)).with_scales(64, Scales::Row).unwrap();
        let mut y = node.view_mut(&mut y, (8, 32));
        let ones_view = node.view(&ones, (1, 32));
        let error = op.call(&wide).weight(&w, &mut y).scale_w(&ones_view).on(node.stream());
        assert!(matches!(error, Err(CallError::NotGiven { operand: "scale_x", .. })), "{error:?}");
        let apart = node.view(&ones, Layout::strided(8, 1, 1));
        let error =
            op.call(&wide).scale_x(&apart).weight(&w, &mut y).scale_w(&ones_view).on(node.stream());
        assert!(
            matches!(error, Err(CallError::ScalesApart { k: 64, needed: 128, .. })),
            "{error:?}"
        );
        let short = node.view(&few, (1, 16));
        let error =
            op.call(&wide).scale_x(&scale).weight(&w, &mut y).scale_w(&short).on(node.stream());
        assert!(matches!(error, Err(CallError::Shape { operand: "scale_w", .. })), "{error:?}");
        let mut all = node.poisoned::<F8E4M3>(8 * 64);
        let mut x_full = node.view_mut(&mut all, (8, 64));
        let call = op.call(&wide).scale_x(&scale).gathered(&mut x_full);
        let error = call.weight(&w, &mut y).scale_w(&ones_view).on(node.stream()).unwrap_err();
        let said = "rows of x carry row scales, and an x_full was given: leave it out, rows are \
                    returned without scales of their own";
        assert_eq!(error.to_string(), said);
        let mut spec = OpSpec::of_problem(&case.problem);
        spec.weights = WeightLayout::Kn;
        let error = FusedLinear::build(spec, &node.comm).unwrap_err();
        assert!(matches!(error, BuildError::ScaledWeights { .. }), "{error}");
        assert_eq!(node.rank, Rank::new(0));
    });
}
