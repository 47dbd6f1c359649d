//! The fp64 reference on the host, over a rank's whole output.
//!
//! Invariant: operands are generated anew from their seeds, and the tolerance of an element is
//! derived from its own terms.
//!
//! An op rounds to the element type once, and a GEMM-ReduceScatter each partial sum that it sends
//! or scatters. With `u` the unit roundoff, `p_s` the partial sum of source `s` and `A` the sum of
//! the terms' absolute values:
//!
//! ```text
//! E = sum over sent partials of u |p_s|  +  (sqrt(k) + W) eps_f32 A
//! |y - sum of p_s|  <=  E + u (|sum of p_s| + E) + t
//! ```
//!
//! `t` is half the distance between the smallest numbers, which a rounding to one of them costs.
//!
//! Ranks of another node send one sum `q`, rounded again: with `e` for the roundings in it, its
//! part of `E` is `e + u (|q| + e)`. Partial sums in fp32 are sent as they are, so their terms are
//! missing from `E`: the result has one rounding, and the accumulation's in fp32.
//!
//! A bias `b` adds `eps_f32 (|sum of p_s + b| + E)` to `E`, and so does a residual. An activation
//! of slope `L` with an error of `c |v|` makes `L E + c (|v| + E)` of `E`
//! ([`Activation::slope`](flux_ops::Activation::slope),
//! [`Activation::ERROR`](flux_ops::Activation::ERROR)). Let a gate `a` and an up `b` be off by `da`
//! and `db`: their product is off by `da (|b| + db) + |a| db`, and by its rounding.
//!
//! `sqrt(k) eps_f32` is the probabilistic bound of an inner product (Higham and Mary, "A new
//! approach to probabilistic rounding error analysis", 2019), with their factor at 2. Small
//! integers are exact: the output equals the rounded sum of the rounded partials, and before GELU
//! and SiLU `E` is 0.

use super::verdict::{Expected, Verdict, Violation};
use crate::harness::Fill;
use crate::harness::data::{self, Window};
use crate::harness::epilogue::EPS;
use crate::harness::{Operands, bias_window, elements, y_window};
use flux_core::{Nodes, Partials, Rank};
use flux_kernels::Element;
use flux_ops::Activation;

/// Checks `rank`'s dense output `y` against the reference. Where tiles are `flattened`, a rank
/// rounds its own partial sums too; other `nodes` send sums.
///
/// # Panics
/// When `y` does not hold exactly the rank's elements.
pub fn verify<T: Element>(
    operands: &Operands,
    rank: Rank,
    y: &[T],
    (flattened, nodes): (bool, Nodes),
) -> Verdict {
    let problem = &operands.problem;
    let (window, product) = (operands.y_window(rank), y_window(problem, rank));
    assert_eq!(y.len(), elements(window), "{window:?}");
    let k = problem.k();
    let x = operand::<T>(
        operands,
        operands.seed_x,
        Window { row0: window.row0, col0: 0, rows: window.rows, cols: k },
    );
    let w = operand::<T>(
        operands,
        operands.seed_w,
        Window { row0: product.col0, col0: 0, rows: product.cols, cols: k },
    );
    let bias = if operands.epilogue.bias {
        operand::<T>(operands, operands.seed_bias, bias_window(problem, rank))
    } else {
        vec![0.0; product.cols as usize]
    };
    let residual =
        operands.epilogue.residual.then(|| operand::<T>(operands, operands.seed_residual, window));
    let mut verdict = Verdict::default();
    let rounded = |keeps| Rounded { keeps, nodes, collective: false };
    for (row, (x, y)) in
        x.chunks_exact(k as usize).zip(y.chunks_exact(window.cols as usize)).enumerate()
    {
        // All partial sums for its row but its own are rounded.
        let (owner, _) = problem.owner_of(window.row0 + row as u32);
        for (col, &y) in y.iter().enumerate() {
            let added =
                residual.as_ref().map_or(0.0, |rows| rows[row * window.cols as usize + col]);
            let sum_of = |column: u32| {
                let (column, k) = (column as usize, k as usize);
                let rounded = rounded((!flattened).then_some(owner));
                sum::<T>(operands, rounded, x, &w[column * k..][..k], [bias[column], added])
            };
            let (column, up) = columns_of(operands, rank, col as u32);
            let expected = expect::<T>(operands, sum_of(column), up.map(sum_of));
            verdict.judge(
                &expected,
                y.to_f32(),
                Violation { rank: rank.get(), weight: 0, row: row as u32, col: col as u32 },
            );
        }
    }
    verdict
}

/// Checks elements of `rank`'s output as [`verify`] does, each with its row and column. A
/// `collective` rounds all partial sums, and each sum of them.
pub(crate) fn verify_elements<T: Element>(
    operands: &Operands,
    rank: Rank,
    found: &[(u32, u32, T)],
    (flattened, collective, nodes): (bool, bool, Nodes),
) -> Verdict {
    let problem = &operands.problem;
    let window = y_window(problem, rank);
    let mut verdict = Verdict::default();
    for &(row, col, y) in found {
        let row0 = window.row0 + row;
        let line = |seed, row0| {
            operand::<T>(operands, seed, Window { row0, col0: 0, rows: 1, cols: problem.k() })
        };
        let keeps = (!flattened && !collective).then(|| problem.owner_of(row0).0);
        let rounded = Rounded { keeps, nodes, collective };
        let sum_of = |column: u32| {
            let col0 = window.col0 + column;
            let one = |seed, row0| {
                operand::<T>(operands, seed, Window { row0, col0, rows: 1, cols: 1 })[0]
            };
            let bias = if operands.epilogue.bias { one(operands.seed_bias, 0) } else { 0.0 };
            let residual =
                if operands.epilogue.residual { one(operands.seed_residual, row0) } else { 0.0 };
            sum::<T>(
                operands,
                rounded,
                &line(operands.seed_x, row0),
                &line(operands.seed_w, col0),
                [bias, residual],
            )
        };
        let (column, up) = columns_of(operands, rank, col);
        let expected = expect::<T>(operands, sum_of(column), up.map(sum_of));
        verdict.judge(&expected, y.to_f32(), Violation { rank: rank.get(), weight: 0, row, col });
    }
    verdict
}

/// Checks `rank`'s normalised rows against the norm of its rows `y`, in fp64.
///
/// A sum of `n` squares is off by at most `n` roundings. The root leaves half of them, and six
/// operations follow.
pub(crate) fn verify_norm<T: Element>(
    rank: Rank,
    (y, y_norm): (&[T], &[T]),
    gain: &[T],
) -> Verdict {
    let cols = gain.len();
    let wide = |v: &T| f64::from(v.to_f32());
    let unit = T::DTYPE.unit_roundoff();
    // Of fp32, and the rounding of a tiny number.
    let error = (cols as f64 / 2.0 + 6.0) * f64::from(f32::EPSILON) / 2.0;
    let tiny = T::DTYPE.least_roundoff();
    let mut verdict = Verdict::default();
    for (row, (y, y_norm)) in y.chunks_exact(cols).zip(y_norm.chunks_exact(cols)).enumerate() {
        let squares: f64 = y.iter().map(|v| wide(v).powi(2)).sum();
        let scale = (squares / cols as f64 + f64::from(EPS)).sqrt().recip();
        for (col, ((y, gain), found)) in y.iter().zip(gain).zip(y_norm).enumerate() {
            let exact = wide(y) * scale * wide(gain);
            let off = (wide(found) - exact).abs();
            if off.is_nan() || off > exact.abs() * (unit + error * (1.0 + unit)) + tiny {
                verdict.violations += 1;
                verdict.first.get_or_insert(Violation {
                    rank: rank.get(),
                    weight: 0,
                    row: row as u32,
                    col: col as u32,
                });
            }
        }
    }
    verdict
}

/// Half the distance between the smallest numbers of the type: what rounding a tiny number costs.
/// A window of a global operand, as the elements' exact values.
fn operand<T: Element>(operands: &Operands, seed: u64, window: Window) -> Vec<f32> {
    let mut narrow = vec![T::from_f32(0.0); elements(window)];
    data::fill(&mut narrow, window, seed, operands.fill);
    let mut wide = vec![0.0; narrow.len()];
    T::widen(&narrow, &mut wide);
    wide
}

/// Which sums are rounded before the last.
#[derive(Clone, Copy, Debug)]
struct Rounded {
    /// The rank whose own partial sums are not.
    keeps: Option<Rank>,
    nodes: Nodes,
    /// Every sum of partial sums is, in an order that is not known.
    collective: bool,
}

/// The column of a rank's product that its `y` has in column `col`; with gates that of the gate,
/// and that of its up.
fn columns_of(operands: &Operands, rank: Rank, col: u32) -> (u32, Option<u32>) {
    operands.epilogue.gates.map_or((col, None), |layout| {
        let (gate, up) = layout.rows_of(col, operands.problem.n_local(rank));
        (gate, Some(up))
    })
}

/// A sum, and how far one may be off before the activation.
#[derive(Clone, Copy, Debug)]
struct Sum {
    value: f64,
    off: f64,
}

/// The sum of a row of `x` and a row of `w`, a bias and a residual.
fn sum<T: Element>(
    operands: &Operands,
    rounding: Rounded,
    x: &[f32],
    w: &[f32],
    added: [f32; 2],
) -> Sum {
    let Rounded { keeps, nodes, collective } = rounding;
    let problem = &operands.problem;
    let round = |v: f64| f64::from(T::from_f32(v as f32).to_f32());
    // A library's collective sums the op's type.
    let sent_exactly = problem.numerics().partials == Partials::F32 && !collective;
    let sources = if problem.op().gathers() { 1 } else { problem.world().get() };
    let unit = problem.numerics().output.unit_roundoff();
    let (mut exact, mut rounded, mut absolute, mut sent, mut partials) = (0.0, 0.0, 0.0, 0.0, 0.0);
    // Of the node so far: its sum, exact and as it is sent, and the roundings in it.
    let mut node = (0.0, 0.0, 0.0);
    for source in (0..sources).map(Rank::new) {
        let inner = problem.inner(source);
        let inner = inner.start as usize..inner.end as usize;
        let (sum, abs) = dot(&x[inner.clone()], &w[inner]);
        exact += sum;
        partials += f64::abs(sum);
        absolute += abs;
        let kept = sources == 1
            || sent_exactly
            || keeps.is_some_and(|rank| nodes.on_one_rail(source, rank));
        let (value, off) = if kept { (sum, 0.0) } else { (round(sum), unit * sum.abs()) };
        node = (node.0 + sum, node.1 + value, node.2 + off);
        if sources > 1 && nodes.local_of(source) + 1 < nodes.per_node() {
            continue;
        }
        let (sum, value, off) = std::mem::take(&mut node);
        let stays =
            sources == 1 || sent_exactly || keeps.is_none_or(|rank| nodes.together(source, rank));
        rounded += if stays { value } else { round(value) };
        sent += if stays { off } else { off + unit * (f64::abs(sum) + off) };
    }
    let (epilogue, epsilon) = (operands.epilogue, f64::from(f32::EPSILON));
    let added = added.into_iter().map(f64::from).sum::<f64>();
    let (sum, mut before) = match operands.fill {
        Fill::SmallInts => (rounded + added, 0.0),
        Fill::Uniform => {
            let terms = f64::from(problem.k()).sqrt() + f64::from(problem.world().get());
            (exact + added, sent + terms * epsilon * absolute)
        }
    };
    let additions = u32::from(epilogue.bias) + u32::from(epilogue.residual);
    for _ in (0..additions).filter(|_| operands.fill == Fill::Uniform) {
        before += epsilon * (sum.abs() + before);
    }
    if collective {
        before += unit * f64::from(problem.world().get()) * (partials + added.abs() + before);
    }
    Sum { value: sum, off: before }
}

/// The expected element: the activated sum, and with an up its product.
fn expect<T: Element>(operands: &Operands, sum: Sum, up: Option<Sum>) -> Expected {
    let activation = operands.epilogue.activation;
    let mut value = activation.definition(sum.value);
    if operands.fill == Fill::SmallInts && operands.epilogue.is_exact() {
        value *= up.map_or(1.0, |up| up.value);
        return Expected { value: f64::from(T::from_f32(value as f32).to_f32()), bound: 0.0 };
    }
    let mut off = sum.off;
    if activation != Activation::None {
        off = activation.slope() * off + Activation::ERROR * (sum.value.abs() + off);
    }
    if let Some(up) = up {
        off = off * (up.value.abs() + up.off) + value.abs() * up.off;
        value *= up.value;
        off += f64::from(f32::EPSILON) * (value.abs() + off);
    }
    Expected {
        value,
        bound: off
            + operands.problem.numerics().output.unit_roundoff() * (value.abs() + off)
            + T::DTYPE.least_roundoff(),
    }
}

/// Sums of products and of their absolute values. Products of 11-bit significands are exact in
/// fp32, so fp64 sums are exact to `k 2^-53`.
fn dot(x: &[f32], w: &[f32]) -> (f64, f64) {
    const LANES: usize = 8;
    let (mut sum, mut abs) = ([0.0_f64; LANES], [0.0_f64; LANES]);
    let mut add = |x: &[f32], w: &[f32]| {
        for (((x, w), sum), abs) in x.iter().zip(w).zip(&mut sum).zip(&mut abs) {
            let product = f64::from(x * w);
            *sum += product;
            *abs += product.abs();
        }
    };
    let (xs, ws) = (x.chunks_exact(LANES), w.chunks_exact(LANES));
    let (x_rest, w_rest) = (xs.remainder(), ws.remainder());
    xs.zip(ws).for_each(|(x, w)| add(x, w));
    add(x_rest, w_rest);
    (sum.iter().sum(), abs.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::EpilogueSpec;
    use flux_core::OpKind;
    use flux_core::{DType, Problem, WorldSize};
    use flux_ops::GateLayout;
    use half::bf16;

    /// The output by definition, in another order of summation than the reference's.
    fn outputs(operands: &Operands, rank: Rank, (flattened, nodes): (bool, Nodes)) -> Vec<bf16> {
        let p = &operands.problem;
        let at = |seed, row, col| {
            f64::from(bf16::from_f32(data::value(operands.fill, seed, row, col)).to_f32())
        };
        let (window, product) = (operands.y_window(rank), y_window(p, rank));
        let mut y = Vec::new();
        for row in window.row0..window.row0 + window.rows {
            let (owner, _) = p.owner_of(row);
            let EpilogueSpec { bias, residual, activation, gates, norm: _ } = operands.epilogue;
            let sum_of = |col: u32| {
                let sources = if p.op() == OpKind::AllGatherGemm { 1 } else { p.world().get() };
                let sent = |sum: f64| f64::from(bf16::from_f64(sum).to_f32());
                let mut sums = vec![0.0; sources as usize];
                for source in (0..sources).rev() {
                    let part: f64 = p
                        .inner(Rank::new(source))
                        .rev()
                        .map(|k| at(operands.seed_x, row, k) * at(operands.seed_w, col, k))
                        .sum();
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
    fn plain(operands: &Operands) -> (bool, Nodes) {
        (false, Nodes::apart(operands.problem.world()))
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
            let epilogues = std::iter::once(EpilogueSpec::default())
                .chain(EpilogueSpec::with_bias(operands.problem.op()));
            epilogues.map(move |epilogue| (operands.with_epilogue(epilogue), rank))
        })
    }

    #[test]
    fn the_right_output_passes() {
        for (operands, rank) in cases() {
            let world = operands.problem.world();
            let (apart, two) = (Nodes::apart(world), Nodes::new(world, 2).unwrap());
            for sent in [(false, apart), (true, apart), (false, two)] {
                let verdict = verify(&operands, rank, &outputs(&operands, rank, sent), sent);
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
                let verdict = verify(&operands, rank, &y, plain(&operands));
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
            assert_eq!(verify(&operands, rank, &y, plain(&operands)).violations, 1, "{operands:?}");
        }
    }

    #[test]
    fn integer_data_admit_no_rounding_error() {
        let (operands, rank) = cases().find(|(o, _)| o.fill == Fill::SmallInts).unwrap();
        let mut y = outputs(&operands, rank, plain(&operands));
        let at = y.iter().position(|v| v.to_f32().abs() > 1.0).unwrap();
        y[at] = bf16::from_bits(y[at].to_bits() + 1);
        assert_eq!(verify(&operands, rank, &y, plain(&operands)).violations, 1);
    }

    /// A bias that is missing or in twice, and the result of any other activation.
    #[test]
    fn the_output_of_another_finish_fails() {
        for (operands, rank) in cases() {
            let added = [(false, false), (true, false), (false, true), (true, true)];
            let EpilogueSpec { gates, norm, .. } = operands.epilogue;
            let with = |(bias, residual)| {
                Activation::ALL.map(|activation| EpilogueSpec {
                    bias,
                    residual,
                    activation,
                    gates,
                    norm,
                })
            };
            let epilogues = added.into_iter().flat_map(with);
            let other_gates =
                gates.map(|layout| GateLayout::ALL.into_iter().find(|other| *other != layout));
            let other_gates = other_gates.map(|gates| EpilogueSpec { gates, ..operands.epilogue });
            for other in
                epilogues.chain(other_gates).filter(|&epilogue| epilogue != operands.epilogue)
            {
                let verdict = verify(
                    &operands,
                    rank,
                    &outputs(&operands.with_epilogue(other), rank, plain(&operands)),
                    plain(&operands),
                );
                assert!(!verdict.ok(), "{operands:?} passes as {other:?}");
            }
        }
    }

    #[test]
    fn rows_that_are_not_normalised_are_wrong() {
        let y: Vec<bf16> = (0..64).map(|i| bf16::from_f32((i % 7) as f32 - 2.5)).collect();
        let gain =
            [0.5, -1.0, 2.0, 0.25, 1.0, -2.0, 4.0, 0.0, 0.5, -1.0, 2.0, 0.25, 1.0, -2.0, 4.0, 1.0]
                .map(bf16::from_f32);
        let norm_of = |row: &[bf16]| {
            let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
            let scale = (squares / 16.0 + f64::from(EPS)).sqrt().recip();
            row.iter()
                .zip(&gain)
                .map(move |(v, gain)| bf16::from_f64(f64::from(*v) * scale * f64::from(*gain)))
                .collect::<Vec<_>>()
        };
        let right: Vec<bf16> = y.chunks_exact(16).flat_map(norm_of).collect();
        assert!(verify_norm(Rank::new(1), (&y, &right), &gain).ok());
        for wrong in [bf16::NAN, right[35] * bf16::from_f32(1.02), bf16::ZERO] {
            let mut off = right.clone();
            off[35] = wrong;
            let verdict = verify_norm(Rank::new(1), (&y, &off), &gain);
            assert_eq!(
                (verdict.violations, verdict.first),
                (1, Some(Violation { rank: 1, weight: 0, row: 2, col: 3 })),
                "{wrong}"
            );
        }
        assert!(!verify_norm(Rank::new(1), (&y, &y), &gain).ok());
    }

    #[test]
    fn the_output_of_another_call_fails() {
        for (operands, rank) in cases() {
            let other = Operands::new(operands.problem, 3, 2, operands.fill)
                .with_epilogue(operands.epilogue);
            let verdict =
                verify(&operands, rank, &outputs(&other, rank, plain(&other)), plain(&operands));
            assert!(verdict.violations > elements(operands.y_window(rank)) as u64 / 2, "{verdict}");
        }
    }
}
