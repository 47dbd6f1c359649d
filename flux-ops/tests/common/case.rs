//! Inputs, and what both ops must make of them.
//!
//! The exact result models every rounding that the ops make, so it holds to the last bit wherever
//! fp32 sums are exact. The bound is derived (design: one rounding of the output, one of each
//! partial that travels, fp32 accumulation, the activation's own error), not chosen.

use super::Machine;
use flux_core::program::Schedule;
use flux_core::{Nodes, OpKind, Problem, Rank, WorldSize};
use flux_ops::{Activation, Element};

/// What the inputs are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Integers of -3 to 3: products and sums are exact in fp32.
    Integers,
    /// Between -1 and 1.
    Reals,
}

/// Global operands of one call.
#[derive(Clone, Debug)]
pub struct Case<T> {
    pub problem: Problem,
    x: Vec<T>,
    w: Vec<T>,
    /// For each of the n columns.
    bias: Option<Vec<T>>,
    pub activation: Activation,
}

/// A well-mixed 32-bit number for each argument (the finalizer of MurmurHash3).
fn hash(seed: u64, index: u64) -> u32 {
    let mut h = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index;
    h = (h ^ (h >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ (h >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    (h >> 32) as u32
}

fn fill<T: Element>(len: usize, seed: u64, values: Values) -> Vec<T> {
    let value = |i| match (values, hash(seed, i)) {
        (Values::Integers, h) => (h % 7) as f32 - 3.0,
        (Values::Reals, h) => (f64::from(h) / f64::from(u32::MAX) * 2.0 - 1.0) as f32,
    };
    (0..len as u64).map(|i| T::from_f32(value(i))).collect()
}

/// The activation by its definition.
fn activated(activation: Activation, v: f64) -> f64 {
    match activation {
        Activation::None => v,
        Activation::Gelu => 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v * v * v)).tanh()),
        Activation::Silu => v / (1.0 + (-v).exp()),
        Activation::Relu => v.max(0.0),
    }
}

/// A global result, `[m, n]`.
#[derive(Clone, Debug)]
pub struct Expected<T> {
    /// With every rounding of the ops; exact where fp32 sums are, and the activation is.
    pub rounded: Vec<T>,
    /// Without any rounding.
    pub exact: Vec<f64>,
    /// How far a result may be from `exact`.
    pub bound: Vec<f64>,
}

impl<T: Element> Case<T> {
    pub fn new(op: OpKind, [m, n, k]: [usize; 3], world: u32, values: Values, seed: u64) -> Self {
        let world = WorldSize::new(world).unwrap();
        let problem = Problem::new(op, m, n, k, T::DTYPE, world).unwrap();
        Self { problem, x: fill(m * k, 2 * seed, values), w: fill(n * k, 2 * seed + 1, values), bias: None, activation: Activation::None }
    }

    /// The same operands with an activation and, where asked for, a bias: integers of -64 to 64,
    /// which no sum of so few products hides, or between -4 and 4.
    pub fn finished(self, bias: bool, values: Values, activation: Activation) -> Self {
        let value = |h: u32| match values {
            Values::Integers => (h % 129) as f32 - 64.0,
            Values::Reals => (f64::from(h) / f64::from(u32::MAX) * 8.0 - 4.0) as f32,
        };
        let bias = bias.then(|| (0..u64::from(self.problem.n())).map(|j| T::from_f32(value(hash(0xb1a5, j)))).collect());
        Self { bias, activation, ..self }
    }

    /// The bias of `rank`: its own columns.
    pub fn bias(&self, rank: Rank) -> Option<Vec<T>> {
        let cols = self.problem.y_shape().cols as usize;
        let first = if self.problem.op() == OpKind::AllGatherGemm { rank.index() * cols } else { 0 };
        self.bias.as_ref().map(|bias| bias[first..first + cols].to_vec())
    }

    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The operand `x` of `rank`, dense.
    pub fn x(&self, rank: Rank) -> Vec<T> {
        self.part(&self.x, self.problem.x_shape(), rank)
    }

    /// The operand `w` of `rank`, dense.
    pub fn w(&self, rank: Rank) -> Vec<T> {
        self.part(&self.w, self.problem.w_shape(), rank)
    }

    fn part(&self, global: &[T], shape: flux_core::problem::Shape, rank: Rank) -> Vec<T> {
        let (rows, cols, k) = (shape.rows as usize, shape.cols as usize, self.problem.k() as usize);
        let (row, col) = if cols == k { (rank.index() * rows, 0) } else { (0, rank.index() * cols) };
        let rows = global.chunks_exact(k).skip(row).take(rows);
        rows.flat_map(|row| &row[col..col + cols]).copied().collect()
    }

    /// What the ops must compute on this machine, under the schedule that they choose themselves.
    pub fn expected_on(&self, machine: Machine) -> Expected<T> {
        self.expected_across(&machine.own_schedule(&self.problem), machine.nodes(self.problem.world().get()))
    }

    /// What the ops must compute under this schedule: where tiles span shards a rank's own partial
    /// sum is rounded like those that travel.
    pub fn expected_of(&self, schedule: &Schedule) -> Expected<T> {
        self.expected_across(schedule, Nodes::apart(self.problem.world()))
    }

    /// What they must compute where ranks are grouped: of each other node it is the sum of its
    /// ranks' partial sums that travels, after those of all but the relay have, which is the one on
    /// the owner's rail.
    pub fn expected_across(&self, schedule: &Schedule, nodes: Nodes) -> Expected<T> {
        let p = &self.problem;
        let flattened = schedule.stack && p.world().peers() > 0;
        let (m, n, k, k_local) = (p.m() as usize, p.n() as usize, p.k() as usize, p.k_local() as usize);
        let widen = |v: &[T]| v.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<f64>>();
        let (x, w) = (widen(&self.x), widen(&self.w));
        // Half the distance between the smallest numbers of the type: what rounding a tiny number
        // can cost.
        let tiny = match p.dtype() {
            flux_core::DType::F16 => 2f64.powi(-25),
            flux_core::DType::Bf16 => 2f64.powi(-134),
        };
        let u = p.dtype().unit_roundoff();
        let round = |v: f64| f64::from(T::from_f32(v as f32).to_f32());
        let (mut rounded, mut exact, mut bound) = (Vec::new(), Vec::new(), Vec::new());
        for (i, a) in x.chunks_exact(k).enumerate() {
            let owner = Rank::new(i as u32 / p.m_shard());
            for (j, b) in w.chunks_exact(k).enumerate() {
                let magnitude: f64 = a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum();
                let accumulation = (k as f64).sqrt() * f64::from(f32::EPSILON) * magnitude;
                let (mut y, mut y_rounded, mut error) = (0.0, 0.0, accumulation);
                // By node: the sum of what its ranks have, as it travels, and how far it may be
                // off.
                let mut sums = vec![(0.0, 0.0); nodes.count() as usize];
                for (source, (a, b)) in (0..).map(Rank::new).zip(a.chunks_exact(k_local).zip(b.chunks_exact(k_local))) {
                    let partial: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    y += partial;
                    let stays = p.op() == OpKind::AllGatherGemm || (nodes.on_one_rail(source, owner) && !flattened);
                    let (sum, off) = &mut sums[nodes.node_of(source) as usize];
                    *sum += if stays { partial } else { round(partial) };
                    *off += if stays { 0.0 } else { u * (partial.abs() + accumulation) + tiny };
                }
                for (node, (sum, off)) in (0..).zip(sums) {
                    let stays = p.op() == OpKind::AllGatherGemm || node == nodes.node_of(owner) || flattened;
                    y_rounded += if stays { sum } else { round(sum) };
                    error += off + if stays { 0.0 } else { u * (f64::abs(sum) + accumulation) + tiny };
                }
                if let Some(bias) = &self.bias {
                    let bias = f64::from(bias[j].to_f32());
                    (y, y_rounded) = (y + bias, y_rounded + bias);
                    error += f64::from(f32::EPSILON) / 2.0 * (y.abs() + error);
                }
                if self.activation != Activation::None {
                    error = self.activation.slope() * error + Activation::ERROR * (y.abs() + error);
                    (y, y_rounded) = (activated(self.activation, y), activated(self.activation, y_rounded));
                }
                rounded.push(T::from_f32(y_rounded as f32));
                exact.push(y);
                bound.push(error + u * (y.abs() + error) + tiny);
            }
        }
        assert_eq!(exact.len(), m * n);
        Expected { rounded, exact, bound }
    }

    /// What sequential calls must compute. Of a sum over ranks NCCL adds partial sums that were
    /// rounded, one with the bias, in an order of its own, and rounds after each addition.
    pub fn expected_of_collective(&self) -> Expected<T> {
        let p = &self.problem;
        let flattened = Schedule { stack: true, ..Schedule::of(flux_core::TileShape::new(128, 128, 64)) };
        let mut expected = self.expected_of(&flattened);
        if p.op() == OpKind::AllGatherGemm {
            return expected;
        }
        let (n, k, k_local, u) = (p.n() as usize, p.k() as usize, p.k_local() as usize, p.dtype().unit_roundoff());
        let widen = |v: &[T]| v.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<f64>>();
        let (x, w) = (widen(&self.x), widen(&self.w));
        for (at, bound) in expected.bound.iter_mut().enumerate() {
            let (a, b) = (&x[at / n * k..][..k], &w[at % n * k..][..k]);
            let partials = a.chunks_exact(k_local).zip(b.chunks_exact(k_local));
            let magnitude: f64 = partials.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>().abs()).sum();
            let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[at % n].to_f32()).abs());
            // One rounding after each addition, and one of the partial sum with the bias. No sum is
            // larger than all magnitudes, or off by more than the bound.
            *bound += u * f64::from(p.world().get()) * (magnitude + bias + *bound);
        }
        expected
    }

    /// The parts of a global `[m, n]` that are `rank`'s output, as indices in the order of its `y`.
    pub fn output_of(&self, rank: Rank) -> impl Iterator<Item = usize> + use<T> {
        let (p, shape) = (self.problem, self.problem.y_shape());
        let (rows, cols, n) = (shape.rows as usize, shape.cols as usize, p.n() as usize);
        let (row, col) = match p.op() {
            OpKind::AllGatherGemm => (0, rank.index() * cols),
            OpKind::GemmReduceScatter => (rank.index() * rows, 0),
        };
        (row..row + rows).flat_map(move |i| (col..col + cols).map(move |j| i * n + j))
    }

    /// Compares a rank's output with the modelled one, bit for bit.
    pub fn assert_equal(&self, expected: &Expected<T>, rank: Rank, y: &[T], context: &str) {
        assert_eq!(y.len(), self.output_of(rank).count());
        for (at, (found, i)) in y.iter().zip(self.output_of(rank)).enumerate() {
            let wanted = expected.rounded[i];
            // +0 and -0 are the same number.
            assert!(*found == wanted, "{} rank {rank}, {context}: element {at} is {found:?}, must be {wanted:?}", self.problem);
        }
    }

    /// Compares a rank's output with the exact result, within the derived bound.
    pub fn assert_close(&self, expected: &Expected<T>, rank: Rank, y: &[T], context: &str) {
        assert_eq!(y.len(), self.output_of(rank).count());
        for (at, (found, i)) in y.iter().zip(self.output_of(rank)).enumerate() {
            let (exact, bound) = (expected.exact[i], expected.bound[i]);
            let error = (f64::from(found.to_f32()) - exact).abs();
            // Negated, so that a NaN fails.
            assert!(
                !(error > bound || error.is_nan()),
                "{} rank {rank}, {context}: element {at} is {found:?}, {exact} +- {bound}",
                self.problem
            );
        }
    }
}
