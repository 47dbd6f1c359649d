//! Normalised rows that an op writes as 8-bit operands: the bits that a quantiser makes of its
//! rounded rows, as `x` of the next op.

use super::norm::gain;
use super::{Case, Check, Machine, Node, Number, build, build_case, defaults, layouts, scaled};
use crate::common::{OpOptions, Values};
use flux_core::plan::{Plan, RowMapping};
use flux_core::{DType, Numerics, OpKind, Partials};
use flux_ops::{
    BuildError, CallError, Epsilon, F8E4M3, FusedLinear, Layout, NormSpec, OpSpec, Quantizer,
    Scales, TensorRef,
};
use half::{bf16, f16};

const EPS: f32 = 1e-5;
const GIVEN: f32 = 0.03125;
const N: usize = 256;

fn ops(machine: Machine) -> impl Iterator<Item = OpKind> {
    machine.ops().iter().copied().filter(|op| op.reduces())
}

fn norm(scales: Scales) -> NormSpec {
    NormSpec { scales, ..NormSpec::from(EPS) }
}

/// Codes with what lies behind them and between rows, and scales of their own, as bits.
#[derive(Debug, PartialEq)]
struct Written {
    codes: Vec<u8>,
    scales: Vec<u32>,
}

/// Where normalised rows of a form go, in rows with gaps.
#[derive(Clone, Copy)]
struct Place {
    scales: Scales,
    apart: bool,
    codes: Layout,
    of_scales: Layout,
}

/// The forms, with scales behind rows and apart.
fn places(rows: usize) -> impl Iterator<Item = Place> {
    let both = |scales: Scales| [false, true].map(|apart| (scales, apart));
    let groups = |scales: Scales| scales.of_row(N as u32) as usize;
    Scales::OF_QUANTIZED
        .into_iter()
        .flat_map(both)
        .filter(move |&(scales, apart)| !apart || groups(scales) > 0)
        .map(move |(scales, apart)| {
            let behind = if apart { 0 } else { (4 * groups(scales)).next_multiple_of(128) };
            let of_scales = Layout::strided(groups(scales), rows.max(1), rows + 3);
            let codes = Layout::strided(rows, N + behind, N + behind + 32);
            Place { scales, apart, codes, of_scales }
        })
}

macro_rules! written {
    ($node:ident, $place:ident, |$codes:ident, $given:ident, $scales:ident| $call:expr) => {{
        let mut codes = $node.poisoned::<F8E4M3>($place.codes.span());
        let mut scales = $node.upload(&vec![f32::NAN; $place.of_scales.span().max(1)]);
        let given = $node.upload(&[GIVEN]);
        {
            let $given = $node.view(&given, (1, 1));
            let mut $codes = $node.view_mut(&mut codes, $place.codes);
            let mut $scales = $place.apart.then(|| $node.view_mut(&mut scales, $place.of_scales));
            $call;
        }
        Written {
            codes: $node.download(&codes).iter().map(F8E4M3::to_bits).collect(),
            scales: $node.download(&scales).into_iter().map(f32::to_bits).collect(),
        }
    }};
}

/// What the op is to write behind its rounded rows.
fn by_quantizer<T: Number>(node: &Node, y: &[T], place: Place) -> Written {
    let quantizer = Quantizer::new(&node.comm).unwrap();
    let (y, gain) = (node.upload(y), node.upload(&gain::<T>(N)));
    let (y, gain) = (node.view(&y, (place.codes.rows, N)), node.view(&gain, (N,)));
    written!(node, place, |codes, given, scales| {
        let call = match place.scales {
            Scales::Tensor => quantizer.tensor(&y, &given),
            of => quantizer.rows(&y, of),
        };
        let call = call.rms_norm(&gain, Epsilon::from(EPS));
        let call = if let Some(scales) = &mut scales { call.scales_to(scales) } else { call };
        call.write(&mut codes, node.stream()).unwrap();
    })
}

/// `y` of a call with a residual, and what it writes of its norm.
fn by_op<T: Number>(
    op: &FusedLinear,
    case: &Case<T>,
    node: &Node,
    place: Place,
) -> (Vec<T>, Written) {
    let (lx, lw, ly) = layouts(case, node.rank);
    let (x, w) = (node.upload(&case.x(node.rank)), node.upload(&case.w(node.rank)));
    let (gain, residual) = (gain::<T>(N), case.residual(node.rank).unwrap());
    let (gain, residual) = (node.upload(&gain), node.upload(&residual));
    let mut y = node.poisoned(ly.span());
    let written = written!(node, place, |codes, given, scales| {
        let (x, w, gain) = (node.view(&x, lx), node.view(&w, lw), node.view(&gain, (N,)));
        let (residual, mut y) = (node.view(&residual, ly), node.view_mut(&mut y, ly));
        let call = op.call(&x).weight(&w, &mut y).residual(&residual).norm(&gain, &mut codes);
        let call = if place.scales == Scales::Tensor { call.norm_scale(&given) } else { call };
        let call = if let Some(scales) = &mut scales { call.norm_scales_to(scales) } else { call };
        call.on(node.stream()).unwrap();
    });
    (node.download(&y), written)
}

fn same_bits<T: Number>(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2, 4])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        let k = 24 * world as usize;
        // One row: shards without rows.
        for m in [21 * world as usize - usize::from(world > 1), 1] {
            let case = Case::<T>::new(op, [m, N, k], world, Values::Integers, 151)
                .with_residual(Values::Integers);
            let expected = case.expected_on(machine);
            let flattened = Plan { rows: RowMapping::Flattened, ..Plan::of(machine.tiles()[0]) };
            machine.run(world, defaults, |node| {
                let rows = layouts(&case, node.rank).2.rows;
                for (place, plan) in places(rows).flat_map(|of| [(of, None), (of, Some(flattened))])
                {
                    let rms_norm = Some(norm(place.scales));
                    let op = build_case(&case, OpOptions { rms_norm, ..OpOptions::of(plan) }, node);
                    let (y, written) = by_op(&op, &case, node, place);
                    case.assert_equal(&expected, &op, node.rank, &y, "with a quantised norm");
                    assert!(written == by_quantizer(node, &y, place), "{}", op.explain());
                }
            });
        }
    }
}

pub fn quantised_norms_have_the_bits_of_the_quantizer(machine: Machine) {
    same_bits::<bf16>(machine);
    same_bits::<f16>(machine);
}

/// 8-bit operands, whose norms are those of the next op with the same scales.
pub fn scaled_products_have_quantised_norms(machine: Machine) {
    for (world, op) in machine
        .worlds(&[1, 2])
        .into_iter()
        .flat_map(|world| ops(machine).map(move |op| (world, op)))
    {
        for scales in Scales::OF_QUANTIZED {
            let numerics = Numerics::e4m3(scales, DType::Bf16).with_partials(Partials::F32);
            let extents = [5 * world as usize, N, 256 * world as usize];
            let case = scaled::case(op, extents, world, numerics, Values::Integers);
            let expected = case.expected_on(machine);
            machine.run(world, defaults, |node| {
                let rows = layouts(&case, node.rank).2.rows;
                let gain_memory = node.upload(&gain::<bf16>(N));
                let gain = node.view(&gain_memory, (N,));
                let of_norm = if scales == Scales::Tensor { Scales::Row } else { scales };
                let options = OpOptions { rms_norm: Some(norm(of_norm)), ..OpOptions::default() };
                let op = scaled::build(&case, options, node);
                let of = |place: &Place| place.scales == of_norm && !place.apart;
                let place = places(rows).find(of).unwrap();
                let y;
                let written = written!(node, place, |codes, _given, _scales| {
                    y = scaled::call_with(&op, &case, node, Some((&gain, &mut codes))).unwrap();
                });
                case.assert_equal(&expected, &op, node.rank, &y, "with a quantised norm");
                assert!(written == by_quantizer(node, &y, place), "{}", op.explain());
            });
        }
    }
}

/// The rows that an op before has normalised, as they lie.
pub fn quantised_norms_are_gathered_as_they_are(machine: Machine) {
    for world in machine.worlds(&[1, 2, 4]) {
        machine.run(world, defaults, |node| {
            let (rows, wide, w) = (3, N + 128, world as usize);
            let m = rows * w;
            let (workers, rms_norm) = (node.workers, Some(norm(Scales::Block)));
            let options = OpOptions { workers, rms_norm, ..OpOptions::default() };
            let sums = OpKind::GemmReduceScatter;
            let sums = build::<bf16>(sums, [m, N, 16 * w], options, &node.comm).unwrap();
            let numerics = Numerics::e4m3(Scales::Block, DType::Bf16);
            let mut next = OpSpec::new(OpKind::AllGatherGemm, m, 128 * w, N, numerics);
            next.launch.workers = workers;
            let next = FusedLinear::build(next, &node.comm).unwrap();
            // Row `i` of the sums is `i + 1` everywhere, times ranks and `k`.
            let x: Vec<_> = (0..m * 16).map(|at| bf16::from_f32((at / 16 + 1) as f32)).collect();
            let ones = node.upload(&vec![bf16::ONE; 16 * N]);
            let x = node.upload(&x);
            let mut h = node.poisoned::<bf16>(rows * N);
            let mut codes = node.poisoned::<F8E4M3>(rows * wide);
            {
                let (x, weight) = (node.view(&x, (m, 16)), node.view(&ones, (N, 16)));
                let (gain, mut h) = (node.view(&ones, (N,)), node.view_mut(&mut h, (rows, N)));
                let mut codes = node.view_mut(&mut codes, (rows, wide));
                let call = sums.call(&x).weight(&weight, &mut h).norm(&gain, &mut codes);
                call.on(node.stream()).unwrap();
            }
            let (weight, scale_w) =
                (node.upload(&vec![F8E4M3::from_f32(1.0); 128 * N]), node.upload(&[0.5_f32; 2]));
            let mut y = node.poisoned::<bf16>(m * 128);
            {
                let (x, scale_x) =
                    node.view(&codes, (rows, wide)).with_scales(N, Scales::Block).unwrap();
                let (weight, scale_w) = (node.view(&weight, (128, N)), node.view(&scale_w, (1, 2)));
                let mut y = node.view_mut(&mut y, (m, 128));
                let call = next.call(&x).scale_x(&scale_x).weight(&weight, &mut y);
                call.scale_w(&scale_w).on(node.stream()).unwrap();
            }
            // Normalised rows of equal elements are ones.
            let expected = bf16::from_f32(N as f32 / 2.0);
            assert!(node.download(&y).iter().all(|&y| y == expected), "{y:?}");
        });
    }
}

pub fn quantised_norms_of_no_rows_are_nothing(machine: Machine) {
    for op in ops(machine) {
        machine.run(1, defaults, |node| {
            for place in places(0) {
                let rms_norm = Some(norm(place.scales));
                let options = OpOptions { rms_norm, residual: true, ..OpOptions::default() };
                let op = build::<bf16>(op, [8, N, 32], options, &node.comm).unwrap();
                let memory = node.upload(&[bf16::ONE; 32 * N]);
                let [x, y] = [(0, 32), (0, N)];
                let mut result = node.poisoned::<bf16>(0);
                let written = written!(node, place, |codes, given, scales| {
                    let (x, w) = (node.view(&memory, x), node.view(&memory, (N, 32)));
                    let (gain, residual) = (node.view(&memory, (N,)), node.view(&memory, y));
                    let mut y = node.view_mut(&mut result, y);
                    let call = op.call(&x).weight(&w, &mut y).residual(&residual);
                    let call = call.norm(&gain, &mut codes);
                    let is_given = place.scales == Scales::Tensor;
                    let call = if is_given { call.norm_scale(&given) } else { call };
                    let call = match &mut scales {
                        Some(scales) => call.norm_scales_to(scales),
                        None => call,
                    };
                    call.on(node.stream()).unwrap();
                });
                assert!(written.scales.iter().all(|&bits| f32::from_bits(bits).is_nan()));
            }
        });
    }
}

pub fn a_quantised_norm_that_does_not_fit_is_refused(machine: Machine) {
    let op = OpKind::GemmAllReduce;
    if !machine.ops().contains(&op) {
        return;
    }
    machine.run(1, defaults, |node| {
        let built = |op, n, scales| {
            let options = OpOptions { rms_norm: Some(norm(scales)), ..OpOptions::default() };
            build::<bf16>(op, [4, n, 32], options, &node.comm)
        };
        for (n, scales, multiple) in [(144, Scales::Block, 128), (24, Scales::Row, 16)] {
            let refused = built(op, n, scales).unwrap_err();
            let said = format!(
                "normalised rows of n = {n} elements cannot be quantised with {scales} scales: n \
                 must be a multiple of {multiple}; use other scales, or a norm of 16 bits"
            );
            assert_eq!(refused.to_string(), said);
        }
        let refused = built(OpKind::AllGatherGemm, N, Scales::Row).unwrap_err();
        assert!(matches!(refused, BuildError::Option { option: "rms_norm", .. }), "{refused}");

        let [of_tensor, of_rows] =
            [Scales::Tensor, Scales::Row].map(|scales| built(op, N, scales).unwrap());
        let memory = node.upload(&[bf16::ONE; 32 * N]);
        let mut y = node.poisoned::<bf16>(4 * N);
        let mut rounded = node.poisoned::<bf16>(4 * N);
        let mut codes = node.poisoned::<F8E4M3>(4 * (N + 128));
        let mut scales = node.upload(&[f32::NAN; 8]);
        let (x, w) = (node.view(&memory, (4, 32)), node.view(&memory, (N, 32)));
        let gain: TensorRef<'_, bf16> = node.view(&memory, (N,));
        macro_rules! refused {
            ($op:expr, $to:ident, $layout:expr $(, $operand:ident($($of:expr),*))*) => {
                $op.call(&x)
                    .weight(&w, &mut node.view_mut(&mut y, (4, N)))
                    .norm(&gain, &mut node.view_mut(&mut $to, $layout))
                    $(.$operand($($of),*))*
                    .on(node.stream())
                    .unwrap_err()
            };
        }
        let error = refused!(of_tensor, codes, (4, N));
        assert_eq!(
            error.to_string(),
            "the op was built with quantized_rms_norm(eps, Scales::Tensor), and the call brings no \
             norm_scale: make it as op.call(&x).weight(&w, &mut y).norm(&gain, &mut \
             y_norm).norm_scale(&norm_scale).on(stream), with a view of shape (1, 1)"
        );
        let error = refused!(of_rows, codes, (4, N));
        let said = "y_norm is [4, 256], but gemm_ar with m = 4 takes [4, 384] on rank 0 of 1: give \
                    384 columns";
        assert_eq!(error.to_string(), said);
        let error = refused!(
            of_rows,
            rounded,
            (4, N),
            norm_scales_to(&mut node.view_mut(&mut scales, (1, 4)))
        );
        assert!(
            matches!(error, CallError::View { operand: "y_norm", .. })
                && error.to_string().contains("e4m3"),
            "{error}"
        );
        let error = refused!(
            of_rows,
            codes,
            (4, N),
            norm_scales_to(&mut node.view_mut(&mut scales, (1, 3)))
        );
        assert!(matches!(error, CallError::Shape { operand: "y_norm_scale", .. }), "{error}");
        let given = node.upload(&[GIVEN]);
        let given = node.view(&given, (1, 1));
        let error = refused!(of_rows, codes, (4, N + 128), norm_scale(&given));
        assert!(matches!(error, CallError::Unwanted { operand: "norm_scale", .. }), "{error}");
        let error = refused!(
            of_tensor,
            codes,
            (4, N),
            norm_scale(&given),
            norm_scales_to(&mut node.view_mut(&mut scales, (1, 4)))
        );
        assert!(matches!(error, CallError::Unwanted { operand: "y_norm_scale", .. }), "{error}");
        drop(given);
        assert!(node.download(&y).iter().all(|y| y.is_nan()), "a refused call wrote");
    });
}

pub fn ranks_agree_on_the_form_of_the_norm(machine: Machine) {
    for op in ops(machine) {
        for world in machine.worlds(&[2]) {
            machine.run(world, defaults, |node| {
                let scales = if node.rank.get() == 1 { Scales::Block } else { Scales::Row };
                let (workers, rms_norm) = (node.workers, Some(norm(scales)));
                let options = OpOptions { workers, rms_norm, ..OpOptions::default() };
                let shape = [16, N, 32 * world as usize];
                let refused = build::<bf16>(op, shape, options, &node.comm).unwrap_err();
                assert!(matches!(refused, BuildError::Disagreement { .. }), "{refused}");
                assert!(refused.to_string().contains("rms_norm(1e-5) as e4m3.row"), "{refused}");
            });
        }
    }
}
