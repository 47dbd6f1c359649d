//! Global operands, their shards, and what the ranks must compute from them.
//!
//! Invariant: the tolerance is derived from the roundings that the executor makes, none of it is
//! chosen.

use flux_core::problem::Shape;
use flux_core::program::TileProgram;
use flux_core::{OpKind, Problem, Rank};
use flux_kernels::cpu::Epilogue;
use flux_kernels::{Activation, Element, GateLayout};

/// Global `x` [m, k] and `w` [n, k], row-major, and what becomes of their product.
pub struct Global<T> {
    pub problem: Problem,
    pub x: Vec<T>,
    pub w: Vec<T>,
    /// For each of the n columns.
    pub bias: Option<Vec<T>>,
    pub activation: Activation,
    pub gates: Option<GateLayout>,
}

/// A small generator of reproducible numbers (splitmix64).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `-1 .. 1`.
    pub fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// -1, 0 or 1: sums of up to 256 products are exact in every element type.
    pub fn unit(&mut self) -> f32 {
        (self.next() % 3) as f32 - 1.0
    }
}

impl<T: Element> Global<T> {
    pub fn new(problem: Problem, seed: u64, number: impl Fn(&mut Numbers) -> f32) -> Self {
        let mut numbers = Numbers(seed);
        let mut matrix = |rows: u32, cols: u32| -> Vec<T> {
            (0..rows * cols).map(|_| T::from_f32(number(&mut numbers))).collect()
        };
        let (x, w) = (matrix(problem.m(), problem.k()), matrix(problem.n(), problem.k()));
        Self { problem, x, w, bias: None, activation: Activation::None, gates: None }
    }

    /// The same operands with a bias of such numbers and an activation.
    pub fn with_epilogue(
        self,
        seed: u64,
        number: impl Fn(&mut Numbers) -> f32,
        activation: Activation,
    ) -> Self {
        let mut numbers = Numbers(seed ^ 0xb1a5);
        let bias = (0..self.problem.n()).map(|_| T::from_f32(number(&mut numbers))).collect();
        Self { bias: Some(bias), activation, ..self }
    }

    /// The epilogue of every rank.
    pub fn epilogue(&self) -> Epilogue<'_, T> {
        Epilogue { activation: self.activation, gates: self.gates, ..Epilogue::default() }
    }

    /// The bias of `rank`.
    pub fn bias(&self, rank: u32) -> Option<&[T]> {
        let columns = self.problem.columns(Rank::new(rank));
        self.bias.as_ref().map(|bias| &bias[columns.start as usize..columns.end as usize])
    }

    fn part(
        from: &[T],
        k: usize,
        rows: std::ops::Range<usize>,
        cols: std::ops::Range<usize>,
    ) -> Vec<T> {
        rows.flat_map(|row| from[row * k..][cols.clone()].to_vec()).collect()
    }

    /// The operands of `rank`.
    pub fn shard(&self, rank: u32) -> (Vec<T>, Vec<T>) {
        let (p, rank, k) = (&self.problem, Rank::new(rank), self.problem.k() as usize);
        let of = |range: std::ops::Range<u32>| range.start as usize..range.end as usize;
        let rows = if p.op() == OpKind::AllGatherGemm { p.shard_rows(rank) } else { 0..p.m() };
        (
            Self::part(&self.x, k, of(rows), of(p.inner(rank))),
            Self::part(&self.w, k, of(p.columns(rank)), of(p.inner(rank))),
        )
    }

    /// The same operands with gates.
    pub fn gated(self, layout: GateLayout) -> Self {
        Self { gates: Some(layout), ..self }
    }

    /// The shape of `rank`'s `y`.
    pub fn y_shape(&self, rank: Rank) -> Shape {
        GateLayout::result_shape(self.gates, self.problem.y_shape(rank))
    }

    /// The global row of an element of `rank`'s `y`, its column, and with gates that of its up.
    fn global(&self, rank: u32, row: usize, col: usize) -> (usize, usize, Option<usize>) {
        let (p, rank) = (&self.problem, Rank::new(rank));
        let first_col = p.columns(rank).start as usize;
        let (gate, up) = self.gates.map_or((col as u32, None), |layout| {
            let (gate, up) = layout.rows_of(col as u32, p.n_local(rank));
            (gate, Some(first_col + up as usize))
        });
        (p.y_rows(rank).start as usize + row, first_col + gate as usize, up)
    }

    /// Compares `y` of a program's rank with the product in fp64; the error of each element must
    /// stay below its bound. Only with flattened rows the partial sum of the row's owner is rounded
    /// too.
    ///
    /// With `u` the roundoff of the element type, `e` that of fp32 and `g(k) = k e / (1 - k e)`: an
    /// inner product of `k` terms in fp32, in any order, is off by at most `g(k) s`, `s` the sum of
    /// its terms' magnitudes (products of two elements are exact). Rounding to the element type
    /// adds `u` of the value, and half the spacing of its subnormal numbers. A sum of `w` partials
    /// in fp32 adds `g(w)` of their magnitudes, the bias `e` of the sum with it. An activation
    /// multiplies the error by its slope and adds its own. Let a gate `a` and an up `b` be off by
    /// `da` and `db`: their product is off by at most `da (|b| + db) + |a| db`, and `e` of itself.
    pub fn verify(&self, program: &TileProgram, y: &[T]) {
        let (p, rank) = (&self.problem, program.rank.get());
        let (u, e) = (T::DTYPE.unit_roundoff(), f64::from(f32::EPSILON) / 2.0);
        let shape = self.y_shape(Rank::new(rank));
        for row in 0..shape.rows as usize {
            for col in 0..shape.cols as usize {
                let (i, j, up) = self.global(rank, row, col);
                let (mut exact, mut error) = self.sum(i, j, program.rows.is_flattened());
                if self.activation != Activation::None {
                    error =
                        self.activation.slope() * error + Activation::ERROR * (exact.abs() + error);
                    exact = self.activation.definition(exact);
                }
                if let Some((up, off)) = up.map(|up| self.sum(i, up, false)) {
                    error = error * (up.abs() + off) + exact.abs() * off;
                    exact *= up;
                    error += e * (exact.abs() + error);
                }
                let subnormal = 2f64.powi(-25);
                error += u * (exact.abs() + error) + subnormal;
                let got = f64::from(y[row * shape.cols as usize + col].to_f32());
                assert!(
                    (got - exact).abs() <= error,
                    "{p}, rank {rank}, y[{row}, {col}] = {got}: {exact} is expected, within \
                     {error:e}"
                );
            }
        }
    }

    /// The sum of global row `i` and column `j` with its bias, and how far it may be off.
    fn sum(&self, i: usize, j: usize, flattened: bool) -> (f64, f64) {
        let p = &self.problem;
        let w = p.world().get();
        let (u, e) = (T::DTYPE.unit_roundoff(), f64::from(f32::EPSILON) / 2.0);
        let g = |n: usize| n as f64 * e / (1.0 - n as f64 * e);
        let subnormal = 2f64.powi(-25);
        let (owner, parts) = (p.owner_of(i as u32).0.get(), if p.op().reduces() { w } else { 1 });
        let (mut exact, mut error, mut magnitude) = (0.0, 0.0, 0.0);
        for part in 0..parts {
            let (mut sum, mut terms) = (0.0, 0.0);
            let inner = p.inner(Rank::new(part));
            for q in inner.start as usize..inner.end as usize {
                let at = i * p.k() as usize + q;
                let product = f64::from(self.x[at].to_f32())
                    * f64::from(self.w[j * p.k() as usize + q].to_f32());
                sum += product;
                terms += product.abs();
            }
            let mut off = g(inner.len()) * terms;
            if parts > 1 && (part != owner || flattened) {
                off += u * (sum.abs() + off) + subnormal;
            }
            exact += sum;
            error += off;
            magnitude += sum.abs() + off;
        }
        error += g(parts as usize) * magnitude;
        if let Some(bias) = &self.bias {
            exact += f64::from(bias[j].to_f32());
            error += e * (exact.abs() + error);
        }
        (exact, error)
    }

    /// Compares `y` of `rank` with the product of integers, and an integer bias, ReLU and gates if
    /// any: equal.
    pub fn verify_exact(&self, rank: u32, y: &[T]) {
        let (p, shape) = (&self.problem, self.y_shape(Rank::new(rank)));
        let k = p.k() as usize;
        for row in 0..shape.rows as usize {
            for col in 0..shape.cols as usize {
                let (i, j, up) = self.global(rank, row, col);
                let sum = |j: usize| {
                    let sum: f32 = self.x[i * k..][..k]
                        .iter()
                        .zip(&self.w[j * k..][..k])
                        .map(|(a, b)| a.to_f32() * b.to_f32())
                        .sum();
                    sum + self.bias.as_ref().map_or(0.0, |bias| bias[j].to_f32())
                };
                let activated =
                    if self.activation == Activation::Relu { sum(j).max(0.0) } else { sum(j) };
                let expected = activated * up.map_or(1.0, sum);
                let got = y[row * shape.cols as usize + col];
                assert!(
                    got == T::from_f32(expected),
                    "{p}, rank {rank}, y[{row}, {col}] = {got:?}: {expected} is expected"
                );
            }
        }
    }
}
