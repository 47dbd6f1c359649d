//! The fp64 reference on the host, over a rank's whole output.
//!
//! Invariant: operands are generated anew from their seeds, and the tolerance of an element is
//! derived from its own terms ([`flux_testkit::reference`]).
//!
//! Small integers are exact: the output equals the rounded sum of the rounded partials, and before
//! GELU and SiLU nothing is off.

use super::verdict::{MadeBy, Verdict, Violation};
use crate::harness::data::{self, Window};
use crate::harness::{Fill, Operands, bias_window, elements, scaled, y_window};
use flux_core::Rank;
use flux_kernels::{Element, Operand};
use flux_testkit::reference::{Finished, Reduction, Sum, Terms, normalised};

/// Checks `rank`'s dense output `y` against the reference.
///
/// # Panics
/// When `y` does not hold exactly the rank's elements.
pub fn verify<X: Element, Y: Element>(
    operands: &Operands,
    rank: Rank,
    y: &[Y],
    made_by: MadeBy,
) -> Verdict {
    let problem = &operands.problem;
    let (window, product) = (operands.y_window(rank), y_window(problem, rank));
    assert_eq!(y.len(), elements(window), "{window:?}");
    let k = problem.k();
    let x = rows_of_x::<X>(operands, window.row0, window.rows);
    let w = rows_of_w::<X>(operands, product.col0, product.cols);
    let bias = if operands.has(Operand::Bias) {
        operand::<Y>(operands, operands.seed_bias, bias_window(problem, rank))
    } else {
        vec![0.0; product.cols as usize]
    };
    let residual = operands
        .has(Operand::Residual)
        .then(|| operand::<Y>(operands, operands.seed_residual, window));
    let mut verdict = Verdict::default();
    for (row, (x, y)) in
        x.chunks_exact(k as usize).zip(y.chunks_exact(window.cols as usize)).enumerate()
    {
        let way = way_of_row(operands, window.row0 + row as u32, made_by);
        for (col, &y) in y.iter().enumerate() {
            let added =
                residual.as_ref().map_or(0.0, |rows| rows[row * window.cols as usize + col]);
            let sum_of = |column: u32| {
                let (column, k) = (column as usize, k as usize);
                sum(operands, way, x, &w[column * k..][..k], [bias[column], added])
            };
            let (column, up) = columns_of(operands, rank, col as u32);
            let expected = finish(operands, sum_of(column), up.map(sum_of));
            verdict.judge(
                &expected,
                y.to_f32(),
                Violation { rank: rank.get(), weight: 0, row: row as u32, col: col as u32 },
            );
        }
    }
    verdict
}

/// Checks elements of `rank`'s output as [`verify`] does, each with its row and column.
pub(crate) fn verify_elements<X: Element, Y: Element>(
    operands: &Operands,
    rank: Rank,
    found: &[(u32, u32, Y)],
    made_by: MadeBy,
) -> Verdict {
    let window = y_window(&operands.problem, rank);
    let mut verdict = Verdict::default();
    for &(row, col, y) in found {
        let row0 = window.row0 + row;
        let way = way_of_row(operands, row0, made_by);
        let sum_of = |column: u32| {
            let col0 = window.col0 + column;
            let added = [
                (Operand::Bias, operands.seed_bias, 0),
                (Operand::Residual, operands.seed_residual, row0),
            ];
            let added = added.map(|(of, seed, row0)| {
                let at = Window { row0, col0, rows: 1, cols: 1 };
                if operands.has(of) { operand::<Y>(operands, seed, at)[0] } else { 0.0 }
            });
            let (x, w) = (rows_of_x::<X>(operands, row0, 1), rows_of_w::<X>(operands, col0, 1));
            sum(operands, way, &x, &w, added)
        };
        let (column, up) = columns_of(operands, rank, col);
        let expected = finish(operands, sum_of(column), up.map(sum_of));
        verdict.judge(&expected, y.to_f32(), Violation { rank: rank.get(), weight: 0, row, col });
    }
    verdict
}

/// Lines of either operand in a sample.
const SAMPLED: u32 = 64;

/// The root mean square of the deviations of a sample of `rank`'s dense output over that of the
/// reference, a row and a column of each of [`SAMPLED`] equal parts. Of products alone.
///
/// # Panics
/// When `y` does not hold the rank's elements.
pub(crate) fn rms_error<X: Element, Y: Element>(operands: &Operands, rank: Rank, y: &[Y]) -> f64 {
    let window = y_window(&operands.problem, rank);
    let cols: Vec<_> = sampled(window.cols)
        .map(|col| (col, rows_of_w::<X>(operands, window.col0 + col, 1)))
        .collect();
    let (mut errors, mut references) = (0.0, 0.0);
    for row in sampled(window.rows) {
        let x = rows_of_x::<X>(operands, window.row0 + row, 1);
        for (col, w) in &cols {
            let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(x * w)).sum();
            let found = y[row as usize * window.cols as usize + *col as usize].to_f32();
            errors += (f64::from(found) - exact).powi(2);
            references += exact.powi(2);
        }
    }
    (errors / references).sqrt()
}

/// One of each of [`SAMPLED`] equal parts of so many, anywhere in it.
fn sampled(count: u32) -> impl Iterator<Item = u32> {
    let parts = count.min(SAMPLED);
    let border = move |part: u32| (u64::from(count) * u64::from(part) / u64::from(parts)) as u32;
    (0..parts).map(move |part| {
        let (first, end) = (border(part), border(part + 1));
        first + data::raw(0, part, count) % (end - first)
    })
}

/// Checks `rank`'s normalised rows against the norm of its rows `y`, in fp64.
pub(crate) fn verify_norm<T: Element>(
    rank: Rank,
    y: &[T],
    y_norm: &[T],
    gain: &[T],
    eps: f32,
) -> Verdict {
    let wide = |narrow: &[T]| narrow.iter().map(|v| v.to_f32()).collect::<Vec<_>>();
    let (cols, gain) = (gain.len(), wide(gain));
    let mut verdict = Verdict::default();
    for (row, (y, y_norm)) in (0..).zip(y.chunks_exact(cols).zip(y_norm.chunks_exact(cols))) {
        let expected = normalised(&wide(y), &gain, eps, T::DTYPE);
        for (col, (found, expected)) in (0..).zip(y_norm.iter().zip(expected)) {
            let at = Violation { rank: rank.get(), weight: 0, row, col };
            verdict.judge(&expected, found.to_f32(), at);
        }
    }
    verdict.of_wrong_elements()
}

/// Rows of the global `x`, dequantised.
fn rows_of_x<X: Element>(operands: &Operands, row0: u32, rows: u32) -> Vec<f32> {
    scaled::rows_of_x::<X>(&operands.problem, operands.generator_of_x(), row0, rows)
}

/// Rows of the global `w`, dequantised.
fn rows_of_w<X: Element>(operands: &Operands, row0: u32, rows: u32) -> Vec<f32> {
    scaled::rows_of_w::<X>(&operands.problem, operands.generator_of_w(), row0, rows)
}

/// A window of a global operand, as the elements' exact values.
fn operand<T: Element>(operands: &Operands, seed: u64, window: Window) -> Vec<f32> {
    let mut narrow = vec![T::from_f32(0.0); elements(window)];
    data::fill(&mut narrow, window, seed, operands.fill);
    let mut wide = vec![0.0; narrow.len()];
    T::widen(&narrow, &mut wide);
    wide
}

/// How the partial sums of this row come together. An owner keeps its own.
fn way_of_row(operands: &Operands, row: u32, made_by: MadeBy) -> Reduction {
    let MadeBy { flattened, unfused, nodes } = made_by;
    let keeps = (!flattened && !unfused).then(|| operands.problem.owner_of(row).0);
    Reduction { keeps, nodes, collective: unfused }
}

/// The column of a rank's product that its `y` has in column `col`; with gates that of the gate,
/// and that of its up.
fn columns_of(operands: &Operands, rank: Rank, col: u32) -> (u32, Option<u32>) {
    operands.epilogue.gates.map_or((col, None), |layout| {
        let (gate, up) = layout.rows_of(col, operands.problem.n_local(rank));
        (gate, Some(up))
    })
}

/// The sum of a row of `x` and a row of `w`, a bias and a residual where there are any.
fn sum(operands: &Operands, way: Reduction, x: &[f32], w: &[f32], added: [f32; 2]) -> Sum {
    let given = [Operand::Bias, Operand::Residual].into_iter().zip(added);
    let has = |(operand, _): &(Operand, f32)| operands.has(*operand);
    let added: Vec<f32> = given.filter(has).map(|(_, value)| value).collect();
    let sum = Terms::new(&operands.problem, x, w).sum(&added, way);
    if operands.fill == Fill::SmallInts && !way.collective { sum.of_integers() } else { sum }
}

/// The expected element, of integers without a bound where nothing makes them inexact.
fn finish(operands: &Operands, sum: Sum, up: Option<Sum>) -> Finished {
    let numerics = operands.problem.numerics();
    let element = sum.finished(up, operands.epilogue.activation, numerics);
    let is_known = sum.off == 0.0 && up.is_none_or(|up| up.off == 0.0);
    if operands.fill == Fill::SmallInts && is_known && operands.epilogue.activation.is_exact() {
        return Finished { exact: element.rounded, bound: 0.0, ..element };
    }
    element
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::epilogue::with_bias;
    use flux_core::OpKind;
    use flux_core::{DType, Nodes, Problem, WorldSize};
    use flux_ops::{Activation, EpilogueSpec, GateLayout, OperandSet};
    use half::bf16;

    /// The output by definition, in another order of summation than the reference's.
    fn outputs(operands: &Operands, rank: Rank, made_by: MadeBy) -> Vec<bf16> {
        let MadeBy { flattened, nodes, .. } = made_by;
        let p = &operands.problem;
        let at = |seed, row, col| {
            f64::from(bf16::from_f32(data::value(operands.fill, seed, row, col)).to_f32())
        };
        let (window, product) = (operands.y_window(rank), y_window(p, rank));
        let whole = |row0, rows| Window { row0, col0: 0, rows, cols: p.k() };
        let k = p.k() as usize;
        let x = operand::<bf16>(operands, operands.seed_x, whole(window.row0, window.rows));
        let w = operand::<bf16>(operands, operands.seed_w, whole(product.col0, product.cols));
        let mut y = Vec::new();
        for row in window.row0..window.row0 + window.rows {
            let (owner, _) = p.owner_of(row);
            let EpilogueSpec { operands: of_epilogue, activation, gates, rms_norm: _ } =
                operands.epilogue;
            let [bias, residual] =
                [Operand::Bias, Operand::Residual].map(|operand| of_epilogue.has(operand));
            let x = &x[(row - window.row0) as usize * k..][..k];
            let sum_of = |col: u32| {
                let w = &w[(col - product.col0) as usize * k..][..k];
                let sources = if p.op() == OpKind::AllGatherGemm { 1 } else { p.world().get() };
                let sent = |sum: f64| f64::from(bf16::from_f64(sum).to_f32());
                let mut sums = vec![0.0; sources as usize];
                for source in (0..sources).rev() {
                    let inner = p.inner(Rank::new(source));
                    let mut part = 0.0;
                    for at in (inner.start as usize..inner.end as usize).rev() {
                        part += f64::from(x[at] * w[at]);
                    }
                    // Whoever adds up for the owner in the source's node.
                    let relay =
                        nodes.rank(nodes.node_of(Rank::new(source)), nodes.local_of(owner)).get();
                    sums[if sources == 1 { 0 } else { relay as usize }] +=
                        if sources == 1 || source == relay { part } else { sent(part) };
                }
                let own = |source: usize| sources == 1 || (source == owner.index() && !flattened);
                let sum: f64 = sums
                    .iter()
                    .enumerate()
                    .map(|(source, &sum)| if own(source) { sum } else { sent(sum) })
                    .sum();
                let sum = sum + if bias { at(operands.seed_bias, 0, col) } else { 0.0 };
                sum + if residual { at(operands.seed_residual, row, col) } else { 0.0 }
            };
            for col in 0..window.cols {
                let n = product.cols;
                let (gate, up) = match gates {
                    None => (col, None),
                    Some(GateLayout::Concatenated) => (col, Some(n / 2 + col)),
                    Some(GateLayout::Interleaved) => (2 * col, Some(2 * col + 1)),
                };
                let up = up.map_or(1.0, |up| sum_of(product.col0 + up) as f32);
                y.push(bf16::from_f32(activation.apply(sum_of(product.col0 + gate) as f32) * up));
            }
        }
        y
    }

    /// Neither flattened nor grouped.
    fn plain(operands: &Operands) -> MadeBy {
        let nodes = Nodes::apart(operands.problem.world());
        MadeBy { flattened: false, unfused: false, nodes }
    }

    fn cases() -> impl Iterator<Item = (Operands, Rank)> {
        let world = WorldSize::new(4).unwrap();
        let problems =
            OpKind::ALL.map(|op| Problem::new(op, 12, 72, 1064, DType::Bf16, world).unwrap());
        let fills = [Fill::Uniform, Fill::SmallInts];
        let plain = problems
            .into_iter()
            .flat_map(move |p| fills.map(|f| (Operands::new(p, 3, 1, f), Rank::new(2))));
        plain.flat_map(|(operands, rank)| {
            let epilogues =
                std::iter::once(EpilogueSpec::default()).chain(with_bias(operands.problem.op()));
            epilogues.map(move |epilogue| (operands.with_epilogue(epilogue), rank))
        })
    }

    #[test]
    fn the_right_output_passes() {
        for (operands, rank) in cases() {
            let world = operands.problem.world();
            let (apart, two) = (Nodes::apart(world), Nodes::new(world, 2).unwrap());
            for (flattened, nodes) in [(false, apart), (true, apart), (false, two)] {
                let sent = MadeBy { flattened, unfused: false, nodes };
                let verdict =
                    verify::<bf16, bf16>(&operands, rank, &outputs(&operands, rank, sent), sent);
                assert!(verdict.ok(), "{operands:?}: {verdict}");
                assert!(verdict.max_rel_err() < 0.01, "{operands:?}: {verdict}");
            }
        }
    }

    #[test]
    fn an_element_that_is_wrong_is_named() {
        for (operands, rank) in cases() {
            let window = operands.y_window(rank);
            let (row, col) = (2, 5);
            let wrong_values: [fn(bf16) -> bf16; 3] =
                [|_| bf16::NAN, |v| v + bf16::from_f32(4.0), |_| bf16::INFINITY];
            for wrong in wrong_values {
                let mut y = outputs(&operands, rank, plain(&operands));
                let at = row * window.cols as usize + col;
                y[at] = wrong(y[at]);
                let verdict = verify::<bf16, bf16>(&operands, rank, &y, plain(&operands));
                assert_eq!(verdict.violations, 1, "{operands:?}");
                assert_eq!(verdict.first, Some(Violation { rank: 2, weight: 0, row: 2, col: 5 }));
            }
        }
    }

    /// As on the device (`gpu_harness`): at the largest element, whose bound is the widest.
    #[test]
    fn an_element_that_is_off_by_eight_roundings_is_wrong() {
        for (operands, rank) in cases().filter(|(operands, _)| operands.fill == Fill::Uniform) {
            let mut y = outputs(&operands, rank, plain(&operands));
            let at = (0..y.len())
                .max_by(|&a, &b| y[a].to_f32().abs().total_cmp(&y[b].to_f32().abs()))
                .unwrap();
            let off = 8.0 * operands.problem.numerics().output.unit_roundoff() * f64::from(y[at]);
            y[at] = bf16::from_f64(f64::from(y[at]) + off);
            assert_eq!(
                verify::<bf16, bf16>(&operands, rank, &y, plain(&operands)).violations,
                1,
                "{operands:?}"
            );
        }
    }

    #[test]
    fn integer_data_admit_no_rounding_error() {
        let (operands, rank) = cases().find(|(o, _)| o.fill == Fill::SmallInts).unwrap();
        let mut y = outputs(&operands, rank, plain(&operands));
        let at = y.iter().position(|v| v.to_f32().abs() > 1.0).unwrap();
        y[at] = bf16::from_bits(y[at].to_bits() + 1);
        assert_eq!(verify::<bf16, bf16>(&operands, rank, &y, plain(&operands)).violations, 1);
    }

    /// A bias or a residual that is missing or too many, and the result of any other activation.
    #[test]
    fn the_output_of_another_finish_fails() {
        for (operands, rank) in cases() {
            let own = operands.epilogue;
            let toggled = |operand| {
                let operands = own.operands.with(operand, !own.operands.has(operand));
                EpilogueSpec { operands, ..own }
            };
            let activations = Activation::ALL.map(|activation| EpilogueSpec { activation, ..own });
            let others = [Operand::Bias, Operand::Residual].map(toggled);
            let others = others.into_iter().chain(activations);
            let gates = own.gates;
            let other_gates =
                gates.map(|layout| GateLayout::ALL.into_iter().find(|other| *other != layout));
            let other_gates = other_gates.map(|gates| EpilogueSpec { gates, ..own });
            for other in others.chain(other_gates).filter(|&epilogue| epilogue != own) {
                let verdict = verify::<bf16, bf16>(
                    &operands,
                    rank,
                    &outputs(&operands.with_epilogue(other), rank, plain(&operands)),
                    plain(&operands),
                );
                assert!(!verdict.ok(), "{operands:?} passes as {other:?}");
            }
        }
    }

    /// As kernels in turn do: the product is rounded before its bias and activation.
    #[test]
    fn two_roundings_are_within_the_bound_of_an_unfused_layer_alone() {
        let world = WorldSize::new(4).unwrap();
        let problem =
            Problem::new(OpKind::AllGatherGemm, 12, 72, 1064, DType::Bf16, world).unwrap();
        let rank = Rank::new(2);
        let biased = OperandSet::EMPTY.with(Operand::Bias, true);
        let activation = Activation::Silu;
        let epilogue = EpilogueSpec { operands: biased, activation, ..EpilogueSpec::default() };
        let product = Operands::new(problem, 3, 1, Fill::Uniform);
        let operands = product.with_epilogue(epilogue);
        let bias = operand::<bf16>(&operands, operands.seed_bias, bias_window(&problem, rank));
        let rounded = outputs(&product, rank, plain(&product));
        let activated = |(at, y): (usize, &bf16)| {
            bf16::from_f32(Activation::Silu.apply(y.to_f32() + bias[at % bias.len()]))
        };
        let mut y: Vec<bf16> = rounded.iter().enumerate().map(activated).collect();
        let fused = plain(&operands);
        let unfused = MadeBy { unfused: true, ..fused };
        assert!(!verify::<bf16, bf16>(&operands, rank, &y, fused).ok());
        assert!(verify::<bf16, bf16>(&operands, rank, &y, unfused).ok());
        y[20] += bf16::from_f32(1.0);
        assert_eq!(verify::<bf16, bf16>(&operands, rank, &y, unfused).violations, 1);
    }

    #[test]
    fn rows_that_are_not_normalised_are_wrong() {
        let y: Vec<bf16> = (0..64).map(|i| bf16::from_f32((i % 7) as f32 - 2.5)).collect();
        let gain =
            [0.5, -1.0, 2.0, 0.25, 1.0, -2.0, 4.0, 0.0, 0.5, -1.0, 2.0, 0.25, 1.0, -2.0, 4.0, 1.0]
                .map(bf16::from_f32);
        let norm_of = |row: &[bf16]| {
            let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
            let scale = (squares / 16.0 + 1e-5).sqrt().recip();
            row.iter()
                .zip(&gain)
                .map(move |(v, gain)| bf16::from_f64(f64::from(*v) * scale * f64::from(*gain)))
                .collect::<Vec<_>>()
        };
        let right: Vec<bf16> = y.chunks_exact(16).flat_map(norm_of).collect();
        assert!(verify_norm(Rank::new(1), &y, &right, &gain, 1e-5).ok());
        for wrong in [bf16::NAN, right[35] * bf16::from_f32(1.02), bf16::ZERO] {
            let mut off = right.clone();
            off[35] = wrong;
            let verdict = verify_norm(Rank::new(1), &y, &off, &gain, 1e-5);
            assert_eq!(
                (verdict.violations, verdict.first),
                (1, Some(Violation { rank: 1, weight: 0, row: 2, col: 3 })),
                "{wrong}"
            );
        }
        assert!(!verify_norm(Rank::new(1), &y, &y, &gain, 1e-5).ok());
    }

    #[test]
    fn the_output_of_another_call_fails() {
        for (operands, rank) in cases() {
            let other = Operands::new(operands.problem, 3, 2, operands.fill)
                .with_epilogue(operands.epilogue);
            let verdict = verify::<bf16, bf16>(
                &operands,
                rank,
                &outputs(&other, rank, plain(&other)),
                plain(&operands),
            );
            assert!(verdict.violations > elements(operands.y_window(rank)) as u64 / 2, "{verdict}");
        }
    }
}
