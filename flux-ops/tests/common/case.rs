//! Inputs, and what the ops must make of them.
//!
//! The modelled result has every rounding of the ops: it holds to the last bit wherever fp32 sums
//! are exact. The bound is derived: one rounding of the output, one of each partial sum that
//! travels, fp32 accumulation, the activation's own error.

use super::Machine;
use flux_core::plan::{CommMode, Plan};
use flux_core::problem::Shape;
use flux_core::{Nodes, OpKind, Partials, Problem, Rank, WorldSize};
use flux_ops::{Activation, Element, FusedLinear, GateLayout};

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
    /// Added to the result, `[m, n]`.
    residual: Option<Vec<T>>,
    pub activation: Activation,
    pub gates: Option<GateLayout>,
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

/// What is added to sums: integers of -64 to 64, or numbers between -4 and 4.
fn large<T: Element>(len: usize, seed: u64, values: Values) -> Vec<T> {
    let value = |h: u32| match values {
        Values::Integers => (h % 129) as f32 - 64.0,
        Values::Reals => (f64::from(h) / f64::from(u32::MAX) * 8.0 - 4.0) as f32,
    };
    (0..len as u64).map(|i| T::from_f32(value(hash(seed, i)))).collect()
}

/// A global result, `[m, n]` or with gates `[m, n/2]`, for every plan.
#[derive(Clone, Debug)]
pub struct Expected<T> {
    /// Without any rounding.
    exact: Vec<f64>,
    /// Where a tile has rows of one shard.
    per_shard: Modelled<T>,
    /// Where rows are flattened: a rank's own partial sum is rounded like those that travel.
    flattened: Modelled<T>,
    /// How far a sum by the transport's library may be from `exact`.
    collective_bound: Vec<f64>,
}

/// A result with every rounding of the ops.
#[derive(Clone, Debug)]
struct Modelled<T> {
    /// Exact where fp32 sums are, and the activation is.
    rounded: Vec<T>,
    /// How far a result may be from the exact one.
    bound: Vec<f64>,
}

impl<T> Expected<T> {
    fn of(&self, plan: &Plan) -> &Modelled<T> {
        if plan.is_flattened() { &self.flattened } else { &self.per_shard }
    }
}

impl<T: Element> Case<T> {
    pub fn new(op: OpKind, [m, n, k]: [usize; 3], world: u32, values: Values, seed: u64) -> Self {
        let world = WorldSize::new(world).unwrap();
        let problem = Problem::new(op, m, n, k, T::DTYPE, world).unwrap();
        let (x, w) = (fill(m * k, 2 * seed, values), fill(n * k, 2 * seed + 1, values));
        Self {
            problem,
            x,
            w,
            bias: None,
            residual: None,
            activation: Activation::None,
            gates: None,
        }
    }

    /// The same operands with an activation and, where asked for, a bias: integers of -64 to 64,
    /// which no sum of so few products hides, or between -4 and 4.
    pub fn finished(self, bias: bool, values: Values, activation: Activation) -> Self {
        let bias = bias.then(|| large(self.problem.n() as usize, 0xb1a5, values));
        Self { bias, activation, ..self }
    }

    /// The same operands with gates, of an AllGather-GEMM.
    pub fn gated(self, layout: GateLayout) -> Self {
        Self { problem: self.problem.with_gates().unwrap(), gates: Some(layout), ..self }
    }

    /// The same weight for the `x` of another case.
    pub fn with_x_of(self, other: &Self) -> Self {
        assert_eq!((self.problem.m(), self.problem.k()), (other.problem.m(), other.problem.k()));
        Self { x: other.x.clone(), ..self }
    }

    /// The shape of `rank`'s `y`.
    pub fn y_shape(&self, rank: Rank) -> Shape {
        GateLayout::result_shape(self.gates, self.problem.y_shape(rank))
    }

    /// Columns of all ranks' results.
    fn columns(&self) -> usize {
        self.problem.n() as usize / if self.gates.is_some() { 2 } else { 1 }
    }

    /// The row of `w` of a column of all ranks' results; with gates the gate's and its up's.
    fn weights_of(&self, col: usize) -> (usize, Option<usize>) {
        let Some(layout) = self.gates else { return (col, None) };
        let mut parts = self.problem.world().ranks().map(|rank| self.problem.columns(rank));
        let part = parts.find(|part| 2 * (col as u32) < part.end).expect("a column of the result");
        let (gate, up) = layout.rows_of(col as u32 - part.start / 2, part.len() as u32);
        ((part.start + gate) as usize, Some((part.start + up) as usize))
    }

    /// The same operands with a residual of such numbers, except for an AllGather-GEMM.
    pub fn with_residual(self, values: Values) -> Self {
        let elements = self.problem.m() as usize * self.problem.n() as usize;
        let residual = self.problem.op().reduces().then(|| large(elements, 0x4e51, values));
        Self { residual, ..self }
    }

    /// The same, but row `i` of `x` and of the residual is of kind `kind(i)`. Rows of one kind are
    /// equal, in cases of any `m`.
    pub fn with_rows_of(self, values: Values, kind: impl Fn(usize) -> u64) -> Self {
        let rows = || (0..self.problem.m() as usize).map(&kind);
        let (n, k) = (self.problem.n() as usize, self.problem.k() as usize);
        let x = rows().flat_map(|kind| fill::<T>(k, 0x0b17 + kind, values)).collect();
        let residual = || rows().flat_map(|kind| large::<T>(n, 0x4e51 + kind, values)).collect();
        Self { x, residual: self.residual.is_some().then(residual), ..self }
    }

    /// The same with partial sums in this type.
    pub fn with_partials(self, partials: Partials) -> Self {
        Self { problem: self.problem.with_partials(partials), ..self }
    }

    /// The same, but partial sums of neighbouring ranks cancel, and each is beyond fp16: `x` is 256
    /// on even ranks and -256 on odd ones, 1 on a last rank without a neighbour, and `w` is 64.
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

    /// The residual of `rank`: the rows of its output.
    pub fn residual(&self, rank: Rank) -> Option<Vec<T>> {
        let residual = self.residual.as_ref()?;
        Some(self.output_of(rank).map(|i| residual[i]).collect())
    }

    pub fn has_residual(&self) -> bool {
        self.residual.is_some()
    }

    /// The bias of `rank`: its own columns.
    pub fn bias(&self, rank: Rank) -> Option<Vec<T>> {
        let columns = self.problem.columns(rank);
        self.bias.as_ref().map(|bias| bias[columns.start as usize..columns.end as usize].to_vec())
    }

    pub fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The `x` of all ranks, dense.
    pub fn all_x(&self) -> Vec<T> {
        self.x.clone()
    }

    /// The operand `x` of `rank`, dense.
    pub fn x(&self, rank: Rank) -> Vec<T> {
        let (p, shape) = (&self.problem, self.problem.x_shape(rank));
        let rows = p.shard_rows(rank).start as usize;
        let (row, col) = if p.op() == OpKind::AllGatherGemm {
            (rows, 0)
        } else {
            (0, p.inner(rank).start as usize)
        };
        self.part(&self.x, shape, row, col)
    }

    /// The operand `w` of `rank`, dense.
    pub fn w(&self, rank: Rank) -> Vec<T> {
        let (p, shape) = (&self.problem, self.problem.w_shape(rank));
        self.part(&self.w, shape, p.columns(rank).start as usize, p.inner(rank).start as usize)
    }

    fn part(&self, global: &[T], shape: Shape, row: usize, col: usize) -> Vec<T> {
        let (rows, cols, k) = (shape.rows as usize, shape.cols as usize, self.problem.k() as usize);
        let rows = global.chunks_exact(k).skip(row).take(rows);
        rows.flat_map(|row| &row[col..col + cols]).copied().collect()
    }

    /// What the ops must compute on this machine.
    pub fn expected_on(&self, machine: Machine) -> Expected<T> {
        self.expected_across(machine.nodes(self.problem.world().get()))
    }

    /// What they must compute where ranks are grouped: each other node sends the sum of its ranks'
    /// partial sums, which the intra-node peers of the relay have rounded.
    pub fn expected_across(&self, nodes: Nodes) -> Expected<T> {
        let p = &self.problem;
        let (n, k) = (p.n() as usize, p.k() as usize);
        let widen = |v: &[T]| v.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<f64>>();
        let (x, w) = (widen(&self.x), widen(&self.w));
        let empty = || Modelled { rounded: Vec::new(), bound: Vec::new() };
        let mut expected = Expected {
            exact: Vec::new(),
            per_shard: empty(),
            flattened: empty(),
            collective_bound: Vec::new(),
        };
        for (i, a) in x.chunks_exact(k).enumerate() {
            let (owner, _) = p.owner_of(i as u32);
            let of_weights = |j: usize| {
                let added = [
                    self.bias.as_ref().map(|bias| bias[j]),
                    self.residual.as_ref().map(|residual| residual[i * n + j]),
                ];
                let added = added.into_iter().flatten().map(|v| f64::from(v.to_f32())).collect();
                Sum::new(p, a, &w[j * k..][..k], added)
            };
            for (gate, up) in (0..self.columns()).map(|col| self.weights_of(col)) {
                let (sum, up) = (of_weights(gate), up.map(of_weights));
                let finish = Finish { activation: self.activation, up: up.as_ref() };
                expected.exact.push(finish.exact(&sum));
                for (modelled, flattened) in
                    [(&mut expected.per_shard, false), (&mut expected.flattened, true)]
                {
                    let (rounded, bound) = finish.modelled::<T>(&sum, owner, nodes, flattened);
                    modelled.rounded.push(rounded);
                    modelled.bound.push(bound);
                }
                let flattened = *expected.flattened.bound.last().unwrap();
                expected.collective_bound.push(flattened + sum.error_of_collective(flattened));
            }
        }
        assert_eq!(expected.exact.len(), p.m() as usize * self.columns());
        expected
    }

    /// The parts of a global result that are `rank`'s output, as indices in the order of its `y`.
    pub fn output_of(&self, rank: Rank) -> impl Iterator<Item = usize> + use<T> {
        let (p, shape) = (self.problem, self.y_shape(rank));
        let (rows, cols, n) = (shape.rows as usize, shape.cols as usize, self.columns());
        let (row, col) = match p.op() {
            OpKind::AllGatherGemm => {
                (0, p.columns(rank).start as usize / if self.gates.is_some() { 2 } else { 1 })
            }
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (p.y_rows(rank).start as usize, 0),
        };
        (row..row + rows).flat_map(move |i| (col..col + cols).map(move |j| i * n + j))
    }

    /// Compares a rank's output with the modelled one, bit for bit. A library's collective adds
    /// in an order of its own: its sums of more than two addends are compared within the bound.
    pub fn assert_equal(
        &self,
        expected: &Expected<T>,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    ) {
        if is_collective(op) && (self.problem.world().get() > 2 || self.has_bias()) {
            return self.assert_close(expected, op, rank, y, context);
        }
        assert_eq!(y.len(), self.output_of(rank).count());
        let rounded = &expected.of(&op.plan(self.problem.m() as usize).unwrap()).rounded;
        for (at, (found, i)) in y.iter().zip(self.output_of(rank)).enumerate() {
            let wanted = rounded[i];
            // +0 and -0 are the same number.
            assert!(
                *found == wanted,
                "rank {rank}, {context}: element {at} is {found:?}, must be {wanted:?}: {}",
                op.explain()
            );
        }
    }

    /// Compares a rank's output with the exact result, within the derived bound.
    pub fn assert_close(
        &self,
        expected: &Expected<T>,
        op: &FusedLinear,
        rank: Rank,
        y: &[T],
        context: &str,
    ) {
        assert_eq!(y.len(), self.output_of(rank).count());
        let bound = if is_collective(op) {
            &expected.collective_bound
        } else {
            &expected.of(&op.plan(self.problem.m() as usize).unwrap()).bound
        };
        for (at, (found, i)) in y.iter().zip(self.output_of(rank)).enumerate() {
            let (exact, bound) = (expected.exact[i], bound[i]);
            let error = (f64::from(found.to_f32()) - exact).abs();
            // Negated, so that a NaN fails.
            assert!(
                !(error > bound || error.is_nan()),
                "rank {rank}, {context}: element {at} is {found:?}, {exact} +- {bound}: {}",
                op.explain()
            );
        }
    }
}

/// Whether the transport's library adds the partial sums.
fn is_collective(op: &FusedLinear) -> bool {
    op.largest().op().reduces() && op.plan(op.max_m()).unwrap().comm == CommMode::Sequential
}

/// One element of the result, in fp64.
struct Sum<'a> {
    problem: &'a Problem,
    /// By rank; of an AllGather-GEMM one.
    partials: Vec<f64>,
    /// Bias and residual.
    added: Vec<f64>,
    /// What fp32 accumulation may cost.
    accumulation: f64,
    /// Half the distance between the smallest numbers of the type: the rounding of a tiny number.
    tiny: f64,
    unit_roundoff: f64,
}

impl<'a> Sum<'a> {
    fn new(problem: &'a Problem, a: &[f64], b: &[f64], added: Vec<f64>) -> Self {
        let sources = problem.world().ranks().take(if problem.op().reduces() {
            problem.world().index()
        } else {
            1
        });
        let parts =
            sources.map(|source| problem.inner(source)).map(|k| k.start as usize..k.end as usize);
        let magnitude: f64 = a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum();
        let dot = |(a, b): (&[f64], &[f64])| a.iter().zip(b).map(|(a, b)| a * b).sum();
        let output = problem.numerics().output;
        Self {
            problem,
            partials: parts.map(|part| dot((&a[part.clone()], &b[part]))).collect(),
            added,
            accumulation: (a.len() as f64).sqrt() * f64::from(f32::EPSILON) * magnitude,
            tiny: output.least_roundoff(),
            unit_roundoff: output.unit_roundoff(),
        }
    }

    fn exact(&self) -> f64 {
        self.partials.iter().sum::<f64>() + self.added.iter().sum::<f64>()
    }

    /// The exact sum, the sum with the roundings of what travels, and how far one may be from the
    /// exact sum.
    fn modelled<T: Element>(&self, owner: Rank, nodes: Nodes, flattened: bool) -> (f64, f64, f64) {
        let Self { problem, accumulation, tiny, unit_roundoff: u, .. } = *self;
        let gathers = problem.op() == OpKind::AllGatherGemm;
        let flattened = flattened && problem.world().peers() > 0;
        let sent_exactly = problem.numerics().partials == Partials::F32;
        let round =
            |v: f64| if sent_exactly { v } else { f64::from(T::from_f32(v as f32).to_f32()) };
        // By node: the sum of its ranks' partial sums as it travels, and how far it may be off.
        let mut sums = vec![(0.0, 0.0); nodes.count() as usize];
        for (source, &partial) in (0..).map(Rank::new).zip(&self.partials) {
            let stays = gathers || nodes.on_one_rail(source, owner) && !flattened;
            let (sum, off) = &mut sums[nodes.node_of(source) as usize];
            *sum += if stays { partial } else { round(partial) };
            *off +=
                if stays || sent_exactly { 0.0 } else { u * (partial.abs() + accumulation) + tiny };
        }
        let (mut rounded, mut error) = (0.0, accumulation);
        for (node, (sum, off)) in (0..).zip(sums) {
            let stays = gathers || node == nodes.node_of(owner) || flattened;
            rounded += if stays { sum } else { round(sum) };
            error += off
                + if stays || sent_exactly {
                    0.0
                } else {
                    u * (f64::abs(sum) + accumulation) + tiny
                };
        }
        let mut y = self.partials.iter().sum::<f64>();
        for added in &self.added {
            (y, rounded) = (y + added, rounded + added);
            error += f64::from(f32::EPSILON) / 2.0 * (y.abs() + error);
        }
        (y, rounded, error)
    }

    /// What a sum by the library may cost beyond the bound of flattened rows: a rounding
    /// after each addition, and one of a partial sum with what is added. No sum is larger than all
    /// magnitudes, or off by more than the bound.
    fn error_of_collective(&self, flattened: f64) -> f64 {
        let magnitude = self.partials.iter().map(|partial| partial.abs()).sum::<f64>()
            + self.added.iter().map(|added| added.abs()).sum::<f64>();
        f64::from(self.problem.world().get())
            * (self.unit_roundoff * (magnitude + flattened) + self.tiny)
    }
}

/// What becomes of a sum.
struct Finish<'a> {
    activation: Activation,
    /// Multiplies the activated sum, which is a gate's.
    up: Option<&'a Sum<'a>>,
}

impl Finish<'_> {
    fn exact(&self, sum: &Sum<'_>) -> f64 {
        self.activation.definition(sum.exact()) * self.up.map_or(1.0, Sum::exact)
    }

    /// The result with every rounding of the ops, and how far one may be from the exact result.
    /// With `a` and `b` off by `da` and `db` at most, `a b` is off by `da (|b| + db) + |a| db`, and
    /// by its rounding.
    fn modelled<T: Element>(
        &self,
        sum: &Sum<'_>,
        owner: Rank,
        nodes: Nodes,
        flattened: bool,
    ) -> (T, f64) {
        let (mut y, mut rounded, mut error) = sum.modelled::<T>(owner, nodes, flattened);
        if self.activation != Activation::None {
            error = self.activation.slope() * error + Activation::ERROR * (y.abs() + error);
            (y, rounded) = (self.activation.definition(y), self.activation.definition(rounded));
        }
        if let Some((up, rounded_up, off)) =
            self.up.map(|up| up.modelled::<T>(owner, nodes, flattened))
        {
            error = error * (up.abs() + off) + y.abs() * off;
            (y, rounded) = (y * up, rounded * rounded_up);
            error += f64::from(f32::EPSILON) / 2.0 * (y.abs() + error);
        }
        (T::from_f32(rounded as f32), error + sum.unit_roundoff * (y.abs() + error) + sum.tiny)
    }
}
