//! Inputs of one call, and what the ops must make of them.
//!
//! The modelled result has every rounding of the ops: it holds to the last bit wherever fp32 sums
//! are exact.

use crate::reference::{Finished, Reduction, Terms};
use flux_core::problem::Shape;
use flux_core::{Nodes, OpKind, Partials, Problem, Rank, WorldSize};
use flux_kernels::harness::data::{Window, raw, w_window, x_window, y_window};
use flux_kernels::{Activation, Element, GateLayout};

/// What the inputs are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Integers of -3 to 3: products and sums are exact in fp32.
    Integers,
    /// Between -1 and 1.
    Reals,
}

/// How ranks' partial sums come together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Where a tile has rows of one shard, its owner's partial sums are not rounded.
    PerShard,
    /// Where rows are flattened, they are rounded like those that travel.
    Flattened,
    /// By the transport's library.
    Collective,
}

/// Global operands of one call.
#[derive(Clone, Debug)]
pub struct Case<T> {
    /// The problem.
    pub problem: Problem,
    x: Vec<T>,
    w: Vec<T>,
    /// For each of the n columns.
    bias: Option<Vec<T>>,
    /// Added to the result, `[m, n]`.
    residual: Option<Vec<T>>,
    /// Applied to sums, or to gates.
    pub activation: Activation,
    /// How gates and ups lie in the weights.
    pub gates: Option<GateLayout>,
}

/// A global result, `[m, n]` or with gates `[m, n/2]`: its elements by [`Sums`].
#[derive(Clone, Debug)]
pub struct Expected(Vec<[Finished; 3]>);

/// Rows of elements, each with its number.
fn fill<T: Element>(
    rows: impl Iterator<Item = u32>,
    cols: u32,
    seed: u64,
    value: impl Fn(u32) -> f32,
) -> Vec<T> {
    let row = |row| (0..cols).map(move |col| raw(seed, row, col));
    rows.flat_map(row).map(|raw| T::from_f32(value(raw))).collect()
}

/// 24 random bits as a number between -1 and 1.
fn real(raw: u32) -> f32 {
    raw as f32 / (1 << 23) as f32 - 1.0
}

impl Values {
    fn operand(self, raw: u32) -> f32 {
        match self {
            Self::Integers => (raw % 7) as f32 - 3.0,
            Self::Reals => real(raw),
        }
    }

    /// What is added to sums: integers of -64 to 64, which no sum of so few products hides, or
    /// numbers between -4 and 4.
    fn added(self, raw: u32) -> f32 {
        match self {
            Self::Integers => (raw % 129) as f32 - 64.0,
            Self::Reals => 4.0 * real(raw),
        }
    }
}

impl<T: Element> Case<T> {
    /// Of `m`, `n` and `k` on so many ranks.
    ///
    /// # Panics
    /// Where there is no such problem.
    pub fn new(op: OpKind, [m, n, k]: [usize; 3], world: u32, values: Values, seed: u64) -> Self {
        let world = WorldSize::new(world).expect("a world size");
        let problem = Problem::new(op, m, n, k, T::DTYPE, world).expect("a problem");
        Self::of(problem, values, seed)
    }

    /// Of a problem.
    pub fn of(problem: Problem, values: Values, seed: u64) -> Self {
        let matrix = |rows, seed| fill(0..rows, problem.k(), seed, |raw| values.operand(raw));
        Self {
            problem,
            x: matrix(problem.m(), 2 * seed),
            w: matrix(problem.n(), 2 * seed + 1),
            bias: None,
            residual: None,
            activation: Activation::None,
            gates: None,
        }
    }

    /// The same with each element of `x` and `w` replaced.
    #[must_use]
    pub fn with_operands(self, replaced: impl Fn(T) -> T) -> Self {
        let all = |of: Vec<T>| of.into_iter().map(&replaced).collect();
        Self { x: all(self.x), w: all(self.w), ..self }
    }

    /// The same operands with an activation and, where asked for, a bias.
    #[must_use]
    pub fn finished(self, bias: bool, values: Values, activation: Activation) -> Self {
        let columns = || fill(0..1, self.problem.n(), 0xb1a5, |raw| values.added(raw));
        let bias = bias.then(columns);
        Self { bias, activation, ..self }
    }

    /// The same operands with gates, of an AllGather-GEMM.
    ///
    /// # Panics
    /// Where its columns cannot have them.
    #[must_use]
    pub fn gated(self, layout: GateLayout) -> Self {
        let problem = self.problem.with_gates().expect("columns of gates");
        Self { problem, gates: Some(layout), ..self }
    }

    /// The same weight for the `x` of another case.
    ///
    /// # Panics
    /// If that has other extents.
    #[must_use]
    pub fn with_x_of(self, other: &Self) -> Self {
        assert_eq!((self.problem.m(), self.problem.k()), (other.problem.m(), other.problem.k()));
        Self { x: other.x.clone(), ..self }
    }

    /// The same operands with a residual of such numbers, except for an AllGather-GEMM.
    #[must_use]
    pub fn with_residual(self, values: Values) -> Self {
        let rows = || fill(0..self.problem.m(), self.problem.n(), 0x4e51, |raw| values.added(raw));
        let residual = self.problem.op().reduces().then(rows);
        Self { residual, ..self }
    }

    /// The same, but row `i` of `x` and of the residual is of kind `kind(i)`. Rows of one kind are
    /// equal, in cases of any `m`.
    #[must_use]
    pub fn with_rows_of(self, values: Values, kind: impl Fn(usize) -> u64) -> Self {
        let rows = || (0..self.problem.m() as usize).map(|row| kind(row) as u32);
        let x = fill(rows(), self.problem.k(), 0x0b17, |raw| values.operand(raw));
        let residual = || fill(rows(), self.problem.n(), 0x4e51, |raw| values.added(raw));
        Self { x, residual: self.residual.is_some().then(residual), ..self }
    }

    /// The same with partial sums in this type.
    #[must_use]
    pub fn with_partials(self, partials: Partials) -> Self {
        Self { problem: self.problem.with_partials(partials), ..self }
    }

    /// The same, but partial sums of neighbouring ranks cancel, and each is beyond fp16: `x` is 256
    /// on even ranks and -256 on odd ones, 1 on a last rank without a neighbour, and `w` is 64.
    #[must_use]
    pub fn with_large_partials(self) -> Self {
        let (world, k) = (self.problem.world(), self.problem.k() as usize);
        let of_rank = |rank: usize| match rank % 2 {
            0 if rank + 1 == world.index() => 1.0,
            0 => 256.0,
            _ => -256.0,
        };
        let row = world.ranks().flat_map(|rank| {
            self.problem.inner(rank).map(move |_| T::from_f32(of_rank(rank.index())))
        });
        let row: Vec<_> = row.collect();
        let x = row.iter().copied().cycle().take(self.problem.m() as usize * k).collect();
        let w = vec![T::from_f32(64.0); self.w.len()];
        Self { x, w, ..self }
    }

    /// The shape of `rank`'s `y`.
    pub fn y_shape(&self, rank: Rank) -> Shape {
        GateLayout::result_shape(self.gates, self.problem.y_shape(rank))
    }

    /// Columns of all ranks' results.
    fn columns(&self) -> usize {
        GateLayout::result_cols(self.gates, self.problem.n()) as usize
    }

    /// The row of `w` of a column of all ranks' results; with gates the gate's and its up's.
    fn weights_of(&self, col: usize) -> (usize, Option<usize>) {
        let Some(layout) = self.gates else { return (col, None) };
        let mut parts = self.problem.world().ranks().map(|rank| self.problem.columns(rank));
        let part = parts.find(|part| 2 * (col as u32) < part.end).expect("a column of the result");
        let (gate, up) = layout.rows_of(col as u32 - part.start / 2, part.len() as u32);
        ((part.start + gate) as usize, Some((part.start + up) as usize))
    }

    /// The residual of `rank`: the rows of its output.
    pub fn residual(&self, rank: Rank) -> Option<Vec<T>> {
        let residual = self.residual.as_ref()?;
        Some(self.output_of(rank).map(|i| residual[i]).collect())
    }

    /// Whether there is one.
    pub fn has_residual(&self) -> bool {
        self.residual.is_some()
    }

    /// The bias of `rank`: its own columns.
    pub fn bias(&self, rank: Rank) -> Option<Vec<T>> {
        let columns = self.problem.columns(rank);
        self.bias.as_ref().map(|bias| bias[columns.start as usize..columns.end as usize].to_vec())
    }

    /// Whether there is one.
    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The `x` of all ranks, dense.
    pub fn all_x(&self) -> Vec<T> {
        self.x.clone()
    }

    /// The operand `x` of `rank`, dense.
    pub fn x(&self, rank: Rank) -> Vec<T> {
        self.part(&self.x, x_window(&self.problem, rank))
    }

    /// The operand `w` of `rank`, dense.
    pub fn w(&self, rank: Rank) -> Vec<T> {
        self.part(&self.w, w_window(&self.problem, rank))
    }

    fn part(&self, global: &[T], part: Window) -> Vec<T> {
        let rows = global.chunks_exact(self.problem.k() as usize).skip(part.row0 as usize);
        let (col, cols) = (part.col0 as usize, part.cols as usize);
        rows.take(part.rows as usize).flat_map(|row| &row[col..col + cols]).copied().collect()
    }

    /// What the ops must compute where each rank sends to each.
    pub fn expected(&self) -> Expected {
        self.expected_across(Nodes::apart(self.problem.world()))
    }

    /// What they must compute where ranks are grouped: each other node sends the sum of its ranks'
    /// partial sums, which the intra-node peers of the relay have rounded.
    pub fn expected_across(&self, nodes: Nodes) -> Expected {
        let problem = &self.problem;
        let (n, k) = (problem.n() as usize, problem.k() as usize);
        let widen = |v: &[T]| v.iter().map(|v| v.to_f32()).collect::<Vec<f32>>();
        let (x, w) = (widen(&self.x), widen(&self.w));
        let mut elements = Vec::with_capacity(problem.m() as usize * self.columns());
        for (i, row) in x.chunks_exact(k).enumerate() {
            let (owner, _) = problem.owner_of(i as u32);
            let way = |keeps, collective| Reduction { keeps, nodes, collective };
            let ways = [way(Some(owner), false), way(None, false), way(None, true)];
            let terms = |j: usize| {
                let bias = self.bias.as_ref().map(|bias| bias[j]);
                let residual = self.residual.as_ref().map(|residual| residual[i * n + j]);
                let added: Vec<_> = bias.into_iter().chain(residual).map(T::to_f32).collect();
                let terms = Terms::new(problem, row, &w[j * k..][..k]);
                ways.map(|way| terms.sum(&added, way))
            };
            for (gate, up) in (0..self.columns()).map(|col| self.weights_of(col)) {
                let (sums, ups) = (terms(gate), up.map(terms));
                elements.push([0, 1, 2].map(|at| {
                    let up = ups.map(|ups| ups[at]);
                    sums[at].finished(up, self.activation, problem.numerics())
                }));
            }
        }
        Expected(elements)
    }

    /// The parts of a global result that are `rank`'s output, as indices in the order of its `y`.
    pub fn output_of(&self, rank: Rank) -> impl Iterator<Item = usize> + use<T> {
        let (part, n) = (y_window(&self.problem, rank), self.columns());
        let of_product = |cols| GateLayout::result_cols(self.gates, cols) as usize;
        let (col, cols) = (of_product(part.col0), of_product(part.cols));
        let rows = part.row0 as usize..(part.row0 + part.rows) as usize;
        rows.flat_map(move |i| (col..col + cols).map(move |j| i * n + j))
    }

    /// Compares a rank's output with the modelled one, bit for bit.
    ///
    /// # Errors
    /// The first element that differs.
    pub fn equals(
        &self,
        expected: &Expected,
        sums: Sums,
        rank: Rank,
        y: &[T],
    ) -> Result<(), String> {
        // +0 and -0 are the same number; one beyond the type's range is an infinity.
        let is_right = |wanted: &Finished, found| found == T::from_f32(wanted.rounded as f32);
        self.compare(expected, sums, rank, y, is_right)
    }

    /// Compares a rank's output with the exact result, within the derived bound.
    ///
    /// # Errors
    /// The first element beyond its bound.
    pub fn is_close(
        &self,
        expected: &Expected,
        sums: Sums,
        rank: Rank,
        y: &[T],
    ) -> Result<(), String> {
        self.compare(expected, sums, rank, y, |wanted, found: T| wanted.is_near(found.to_f32()))
    }

    fn compare(
        &self,
        expected: &Expected,
        sums: Sums,
        rank: Rank,
        y: &[T],
        is_right: impl Fn(&Finished, T) -> bool,
    ) -> Result<(), String> {
        assert_eq!(y.len(), self.y_shape(rank).elements(), "{}", self.problem);
        for (at, (found, i)) in y.iter().zip(self.output_of(rank)).enumerate() {
            let wanted = &expected.0[i][sums as usize];
            if !is_right(wanted, *found) {
                let cols = self.y_shape(rank).cols as usize;
                let (row, col) = (at / cols, at % cols);
                return Err(format!(
                    "{}, rank {rank}: y[{row}, {col}] is {found:?}: {wanted:?}",
                    self.problem
                ));
            }
        }
        Ok(())
    }
}
