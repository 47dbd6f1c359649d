//! One element of a result in fp64, with every rounding of the ops, and how far one may be off.
//!
//! Invariant: the bound follows from the element's own terms.
//!
//! `t_c` is what tensor cores and scales cost of 8-bit operands ([`accumulation_error`]), else 0.
//!
//! An op rounds to the element type once, and a sum over ranks each partial sum on its way. With `u`
//! the unit roundoff, `t` half the distance between the smallest numbers, `p_s` the partial sum of
//! source `s`, and `A` the sum of the terms' absolute values:
//!
//! ```text
//! a = (sqrt(k) + W) eps_f32 A + t_c A                      accumulation in fp32
//! E = a + sum over sent partials of u (|p_s| + a) + t      their roundings
//! |y - sum of p_s|  <=  E + u (|sum of p_s| + E) + t       the result's
//! ```
//!
//! Ranks of another node send one sum `q`, rounded again: with `e` for the roundings in it, its
//! part of `E` is `e + u (|q| + a + e) + t`. Partial sums in fp32 are sent as they are, so their
//! terms are missing from `E`. A library's collective adds in an order that is not known and rounds
//! after each addition. Kernels in turn in place of an op round what each hands on. Either adds
//! `W (u (M + E) + t)` to `E`, with `M` the sum of all magnitudes.
//!
//! A bias `b` adds `eps_f32 / 2 (|sum of p_s + b| + E)` to `E`, and so does a residual. An
//! activation of slope `L` with an error of `c |v|` makes `L E + c (|v| + E)` of `E`
//! ([`Activation::slope`], [`Activation::ERROR`]). Let a gate `a` and an up `b` be off by `da` and
//! `db`: their product is off by `da (|b| + db) + |a| db`, and by its rounding.
//!
//! `sqrt(k) eps_f32` is the probabilistic bound of an inner product (Higham and Mary, "A new
//! approach to probabilistic rounding error analysis", 2019), with their factor at 2.

use flux_core::{DType, Nodes, Numerics, Partials, Problem, Rank};
use flux_kernels::Activation;
use flux_kernels::harness::accumulation_error;
use half::{bf16, f16};

/// Roundoff of an operation in fp32.
const UNIT_F32: f64 = f32::EPSILON as f64 / 2.0;

/// How the partial sums of a row come together.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    /// The rank whose own partial sums stay as they are, as do those that its intra-node peers add
    /// up for it; none where rows are flattened.
    pub keeps: Option<Rank>,
    /// Which ranks send one sum.
    pub nodes: Nodes,
    /// Whether a library's collective adds them, in the type of the result, or kernels in turn stand
    /// in for the op.
    pub collective: bool,
}

/// What is known of a number of an op before its last rounding.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// Without any rounding.
    pub exact: f64,
    /// With the roundings of what travels: what an op has where sums in fp32 are exact.
    pub rounded: f64,
    /// How far an op may be off the exact number.
    pub off: f64,
}

/// A finished element of a result.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// Without any rounding.
    pub exact: f64,
    /// With every rounding: what an op has where sums in fp32 are exact, and the activation is.
    pub rounded: f64,
    /// How far one may be off the exact one.
    pub bound: f64,
}

impl Finished {
    /// Whether a number is within the bound; NaN is not.
    pub fn is_near(&self, found: f32) -> bool {
        (f64::from(found) - self.exact).abs() <= self.bound
    }
}

/// The products of a row of `x` and a row of `w`, added up by each rank.
#[derive(Clone, Debug)]
pub struct Terms<'a> {
    problem: &'a Problem,
    /// By rank; where nothing is summed over ranks, one.
    partials: Vec<f64>,
    absolute: f64,
}

impl<'a> Terms<'a> {
    /// Of `k` elements of either row.
    pub fn new(problem: &'a Problem, x: &[f32], w: &[f32]) -> Self {
        let sources = if problem.op().reduces() { problem.world().index() } else { 1 };
        let mut absolute = 0.0;
        let partial = |source| {
            let inner = problem.inner(source);
            let inner = inner.start as usize..inner.end as usize;
            let (sum, magnitude) = dot(&x[inner.clone()], &w[inner]);
            absolute += magnitude;
            sum
        };
        let partials = problem.world().ranks().take(sources).map(partial).collect();
        Self { problem, partials, absolute }
    }

    /// Their sum over ranks, with what is `added` to it: a bias, a residual.
    pub fn sum(&self, added: &[f32], way: Reduction) -> Sum {
        let Self { problem, partials, absolute } = self;
        let (numerics, world) = (problem.numerics(), f64::from(problem.world().get()));
        let (unit, tiny) = (numerics.output.unit_roundoff(), numerics.output.least_roundoff());
        let in_fp32 = (f64::from(problem.k()).sqrt() + world) * f64::from(f32::EPSILON);
        let accumulation = (in_fp32 + accumulation_error(problem)) * absolute;
        let never = partials.len() == 1 || numerics.partials == Partials::F32 && !way.collective;
        let send = |sum: Sum| Sum {
            rounded: rounded(numerics.output, sum.rounded),
            off: sum.off + unit * (sum.exact.abs() + accumulation + sum.off) + tiny,
            ..sum
        };
        let nothing = Sum { exact: 0.0, rounded: 0.0, off: 0.0 };
        let (mut all, mut node) = (Sum { off: accumulation, ..nothing }, nothing);
        for (source, &partial) in (0..).map(Rank::new).zip(partials) {
            let own = Sum { exact: partial, rounded: partial, off: 0.0 };
            let stays = way.keeps.is_some_and(|rank| way.nodes.on_one_rail(source, rank));
            node = node.and(if never || stays { own } else { send(own) });
            if way.nodes.local_of(source) + 1 < way.nodes.per_node() && partials.len() > 1 {
                continue;
            }
            let sum = std::mem::replace(&mut node, nothing);
            let stays = way.keeps.is_none_or(|rank| way.nodes.together(source, rank));
            all = all.and(if never || stays { sum } else { send(sum) });
        }
        let added = added.iter().copied().map(f64::from);
        for number in added.clone() {
            all.exact += number;
            all.rounded += number;
            all.off += UNIT_F32 * (all.exact.abs() + all.off);
        }
        if way.collective {
            // No sum on the way is larger than all magnitudes.
            let magnitude = partials.iter().copied().chain(added).map(f64::abs).sum::<f64>();
            all.off += world * (unit * (magnitude + all.off) + tiny);
        }
        all
    }
}

impl Sum {
    fn and(self, other: Self) -> Self {
        Self {
            exact: self.exact + other.exact,
            rounded: self.rounded + other.rounded,
            off: self.off + other.off,
        }
    }

    /// The same of integers, whose sums in fp32 are exact.
    #[must_use]
    pub fn of_integers(self) -> Self {
        Self { exact: self.rounded, off: 0.0, ..self }
    }

    /// The finished element: the activated sum, multiplied by an up where it is a gate's.
    pub fn finished(
        self,
        up: Option<Self>,
        activation: Activation,
        numerics: Numerics,
    ) -> Finished {
        let Self { exact: sum, mut off, .. } = self;
        let [mut exact, mut value] = [sum, self.rounded].map(|v| activation.definition(v));
        if activation != Activation::None {
            off = activation.slope() * off + Activation::ERROR * (sum.abs() + off);
        }
        if let Some(up) = up {
            off = off * (up.exact.abs() + up.off) + exact.abs() * up.off;
            (exact, value) = (exact * up.exact, value * up.rounded);
            off += UNIT_F32 * (exact.abs() + off);
        }
        let output = numerics.output;
        Finished {
            exact,
            rounded: rounded(output, value),
            bound: off + output.unit_roundoff() * (exact.abs() + off) + output.least_roundoff(),
        }
    }
}

/// The normalised row of a row of results: `y / sqrt(mean(y^2) + eps) * gain`.
///
/// A sum of `n` squares is off by at most `n` roundings. The root leaves half of them, and six
/// operations follow.
pub fn normalised(y: &[f32], gain: &[f32], eps: f32, output: DType) -> Vec<Finished> {
    let squares: f64 = y.iter().map(|&v| f64::from(v).powi(2)).sum();
    let scale = (squares / y.len() as f64 + f64::from(eps)).sqrt().recip();
    let (unit, error) = (output.unit_roundoff(), (y.len() as f64 / 2.0 + 6.0) * UNIT_F32);
    let element = |(&y, &gain)| {
        let exact = f64::from(y) * scale * f64::from(gain);
        let bound = exact.abs() * (unit + error * (1.0 + unit)) + output.least_roundoff();
        Finished { exact, rounded: rounded(output, exact), bound }
    };
    y.iter().zip(gain).map(element).collect()
}

/// A number in fp32, as the type has it.
fn rounded(dtype: DType, number: f64) -> f64 {
    let number = number as f32;
    f64::from(match dtype {
        DType::Bf16 => bf16::from_f32(number).to_f32(),
        DType::F16 => f16::from_f32(number).to_f32(),
        DType::E4m3 => unreachable!("outputs have 16 bits"),
    })
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
