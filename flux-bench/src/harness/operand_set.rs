//! One call's operands in memory: allocated, filled, called on, verified.
//!
//! Invariant: operands are dense, but rows of an AllGather-GEMM's `x` have scales of their own
//! behind them. A set may have room for more rows than it holds.

use crate::harness::data::Window;
use crate::harness::scaled::{Part, bytes_behind_rows};
use crate::harness::{
    Buffer, MadeBy, Operands, RankContext, Verdict, bias_window, elements, reference, w_window,
    x_window, y_window,
};
use anyhow::{Context, ensure};
use flux_core::plan::Plan;
use flux_core::problem::Shape;
use flux_core::{ElementType, Problem, Rank, Scales};
use flux_kernels::{Element, Shapes, TensorElement};
use flux_ops::{EpilogueSpec, FusedLinear, GateLayout, Layout, Location, Operand, RawTensor};

/// A weight of a call, with its bias and its result.
#[derive(Clone, Copy, Debug)]
pub struct Weight<W, V = W> {
    /// This rank's part of the weight.
    pub w: W,
    /// One row, added to every row of the result.
    pub bias: Option<V>,
    /// The result.
    pub y: V,
}

/// The operands of a norm.
#[derive(Clone, Copy, Debug)]
pub struct Norm<V> {
    /// One row.
    pub gain: V,
    /// The normalised rows.
    pub y_norm: V,
}

/// One call's operands in memory, dense.
#[derive(Debug)]
pub struct OperandSet<X, Y = X> {
    /// The rank's `x`.
    pub x: Buffer<X>,
    /// Its scales, where operands have some that its rows do not carry.
    pub scale_x: Option<Buffer<f32>>,
    /// One, or those of an op with several.
    pub weights: Vec<Weight<Buffer<X>, Buffer<Y>>>,
    /// The scales of each weight, where operands have some.
    pub scales_w: Vec<Buffer<f32>>,
    /// The rank's rows of the residual, for an op that adds one.
    pub residual: Option<Buffer<Y>>,
    /// Of an op that normalises its rows.
    pub norm: Option<Norm<Buffer<Y>>>,
    /// How gates and ups lie in the weights, where there are any.
    pub gates: Option<GateLayout>,
    /// What the inputs hold.
    pub holds: Option<Operands>,
}

/// Writes parts of operands, but those that are there already.
struct Filling<'a> {
    ctx: &'a RankContext,
    held: Option<Operands>,
    operands: Operands,
}

impl Filling<'_> {
    fn part<T: Element>(
        &self,
        number: usize,
        part: &mut Buffer<T>,
        seed: fn(&Operands) -> u64,
        window: fn(&Problem, Rank) -> Window,
    ) -> anyhow::Result<()> {
        let of = |operands: Operands| {
            let of_weight = operands.of_weight(number);
            (window(&of_weight.problem, self.ctx.rank()), seed(&of_weight), operands.fill)
        };
        let (window, seed, fill) = of(self.operands);
        // A part does not change with rows that it does not have.
        if self.held.is_some_and(|held| of(held) == (window, seed, fill)) {
            return Ok(());
        }
        self.ctx.fill_part(part, window, seed, fill)
    }

    /// Codes with so many bytes behind each row, and their scales where these are apart.
    fn scaled<X: Element>(
        &self,
        number: usize,
        codes: &mut Buffer<X>,
        behind: usize,
        scales: Option<&mut Buffer<f32>>,
        part: fn([Part; 2]) -> Part,
    ) -> anyhow::Result<()> {
        let of = |operands: Operands| part(operands.of_weight(number).own_parts(self.ctx.rank()));
        let part = of(self.operands);
        if self.held.is_some_and(|held| of(held) == part) {
            return Ok(());
        }
        self.ctx.fill_codes(codes, &part, behind)?;
        scales.map_or(Ok(()), |scales| self.ctx.fill_scales(scales, &part))
    }
}

impl<X, Y> OperandSet<X, Y> {
    /// What the inputs hold.
    ///
    /// # Errors
    /// They were not generated.
    pub(crate) fn held(&self) -> anyhow::Result<Operands> {
        self.holds.context("the operands were not generated")
    }
}

impl RankContext {
    /// Memory of one call's operands, without an epilogue.
    pub fn operand_set<X: Element, Y: Element>(
        &self,
        problem: &Problem,
    ) -> anyhow::Result<OperandSet<X, Y>> {
        self.operand_set_with(problem, EpilogueSpec::default())
    }

    /// Memory of one call's operands, for an op with this epilogue.
    pub fn operand_set_with<X: Element, Y: Element>(
        &self,
        problem: &Problem,
        epilogue: EpilogueSpec,
    ) -> anyhow::Result<OperandSet<X, Y>> {
        let of = |problem: &Problem, window: fn(&Problem, Rank) -> Window| {
            self.alloc::<Y>(elements(window(problem, self.rank())))
        };
        let behind = bytes_behind_rows(problem);
        let x_shape = problem.x_shape(self.rank());
        let has_scales = problem.numerics().scales != Scales::None;
        let scales = |problem: &Problem, operand| {
            self.alloc(Shapes::new(problem, self.rank()).of_operand(operand, 0).elements())
        };
        let weight = |number| {
            let alone = problem.weight_alone(number);
            let bias = epilogue
                .operands
                .has(Operand::Bias)
                .then(|| of(&alone, bias_window))
                .transpose()?;
            let w = self.alloc(elements(w_window(&alone, self.rank())))?;
            anyhow::Ok(Weight { w, bias, y: of(&alone, y_window)? })
        };
        let norm =
            || anyhow::Ok(Norm { gain: of(problem, bias_window)?, y_norm: of(problem, y_window)? });
        Ok(OperandSet {
            x: self.alloc(x_shape.elements() + x_shape.rows as usize * behind)?,
            scale_x: (has_scales && behind == 0)
                .then(|| scales(problem, Operand::ScaleX))
                .transpose()?,
            weights: (0..problem.weight_count()).map(weight).collect::<anyhow::Result<_>>()?,
            scales_w: (0..if has_scales { problem.weight_count() } else { 0 })
                .map(|number| scales(&problem.weight_alone(number), Operand::ScaleW))
                .collect::<anyhow::Result<_>>()?,
            residual: epilogue
                .operands
                .has(Operand::Residual)
                .then(|| of(problem, y_window))
                .transpose()?,
            norm: epilogue.rms_norm.map(|_| norm()).transpose()?,
            gates: epilogue.gates,
            holds: None,
        })
    }

    /// Writes the rank's parts of `operands`, in order on the stream, unless the set holds them
    /// already.
    pub fn fill<X: Element, Y: Element>(
        &self,
        set: &mut OperandSet<X, Y>,
        operands: Operands,
    ) -> anyhow::Result<()> {
        let (held, epilogue) = (set.holds.replace(operands), operands.epilogue);
        let has_bias = set.weights.iter().all(|weight| weight.bias.is_some());
        let has = flux_ops::OperandSet::EMPTY.with(Operand::Bias, has_bias);
        let has = has.with(Operand::Residual, set.residual.is_some());
        ensure!(
            (has, set.norm.is_some()) == (epilogue.operands, epilogue.rms_norm.is_some()),
            "the set has other operands than an op with {epilogue}"
        );
        let fill = Filling { ctx: self, held, operands };
        let has_scales = operands.problem.numerics().scales != Scales::None;
        if has_scales {
            let behind = bytes_behind_rows(&operands.problem);
            fill.scaled(0, &mut set.x, behind, set.scale_x.as_mut(), |[x, _]| x)?;
        } else {
            fill.part(0, &mut set.x, |o| o.seed_x, x_window)?;
        }
        let mut scales_w = set.scales_w.iter_mut();
        for (number, weight) in set.weights.iter_mut().enumerate() {
            if has_scales {
                fill.scaled(number, &mut weight.w, 0, scales_w.next(), |[_, w]| w)?;
            } else {
                fill.part(number, &mut weight.w, |o| o.seed_w, w_window)?;
            }
            if let Some(bias) = &mut weight.bias {
                fill.part(number, bias, |o| o.seed_bias, bias_window)?;
            }
        }
        if let Some(residual) = &mut set.residual {
            fill.part(0, residual, |o| o.seed_residual, y_window)?;
        }
        match &mut set.norm {
            Some(norm) => fill.part(0, &mut norm.gain, |o| o.seed_gain, bias_window),
            None => Ok(()),
        }
    }

    /// Fills all of a set's outputs with NaN, in order on the stream.
    pub fn poison_results<X, Y: Element>(&self, set: &mut OperandSet<X, Y>) -> anyhow::Result<()> {
        let y_norm = set.norm.as_mut().map(|norm| &mut norm.y_norm);
        set.weights
            .iter_mut()
            .map(|weight| &mut weight.y)
            .chain(y_norm)
            .try_for_each(|output| self.poison(output))
    }

    /// Calls the op on a set's operands, in order on the stream: with as many rows as the set
    /// holds.
    pub(crate) fn forward<X: Element, Y: Element>(
        &self,
        op: &FusedLinear,
        set: &mut OperandSet<X, Y>,
    ) -> anyhow::Result<()> {
        let rank = self.rank();
        let problem = set.holds.map_or(*op.largest(), |held| held.problem);
        let gates = set.gates;
        let result = |of: &Problem| GateLayout::result_shape(gates, of.y_shape(rank));
        let mut operands = self.call_of(&problem, rank, &mut set.x, set.scale_x.as_mut());
        for (number, Weight { w, bias, y }) in set.weights.iter_mut().enumerate() {
            let alone = problem.weight_alone(number);
            operands.add_weight(self.raw(w, alone.w_shape(rank)), self.raw(y, result(&alone)));
            if let Some(bias) = bias {
                operands.set(Operand::Bias, number, self.row(bias));
            }
            if let Some(scale) = set.scales_w.get_mut(number) {
                operands.set(Operand::ScaleW, number, self.scale_of_w(&alone, rank, scale));
            }
        }
        if let Some(residual) = &mut set.residual {
            operands.set(Operand::Residual, 0, self.raw(residual, result(&problem)));
        }
        if let Some(Norm { gain, y_norm }) = &mut set.norm {
            operands.set(Operand::Gain, 0, self.row(gain));
            operands.set(Operand::YNorm, 0, self.raw(y_norm, result(&problem)));
        }
        // SAFETY: the memory is the set's, which is exclusively borrowed. Host memory is used until
        // the call returns; a device's is freed only after the device has finished, and is used on
        // this one stream.
        unsafe { op.run(&operands, self.stream()) }?;
        Ok(())
    }

    /// A call that has its `x` so far, of `rank` of a problem, with the scales that its rows carry
    /// or that are apart.
    pub(crate) fn call_of<X: Element>(
        &self,
        problem: &Problem,
        rank: Rank,
        x: &mut Buffer<X>,
        scale_x: Option<&mut Buffer<f32>>,
    ) -> flux_ops::Operands<RawTensor> {
        let (x_shape, behind) = (problem.x_shape(rank), bytes_behind_rows(problem));
        let [rows, k] = [x_shape.rows, x_shape.cols].map(|extent| extent as usize);
        let x = self.described(x, Layout::strided(rows, k, k + behind));
        let mut operands = flux_ops::Operands::new(x);
        let scales = || Shapes::new(problem, rank).of_operand(Operand::ScaleX, 0);
        if let Some(scale_x) = scale_x {
            operands.set(Operand::ScaleX, 0, self.raw(scale_x, scales()));
        } else if behind > 0 {
            let layout =
                Layout::strided(rows, scales().cols as usize, (k + behind) / size_of::<f32>());
            let available = (x.available - k.min(x.available)) / size_of::<f32>();
            let (address, dtype) = (x.address + k as u64, ElementType::F32);
            let scale_x = RawTensor { address, dtype, layout, available, ..x };
            operands.set(Operand::ScaleX, 0, scale_x);
        }
        operands
    }

    /// What a call is told of the scales of a problem's only weight.
    pub(crate) fn scale_of_w(
        &self,
        problem: &Problem,
        rank: Rank,
        scales: &mut Buffer<f32>,
    ) -> RawTensor {
        self.raw(scales, Shapes::new(problem, rank).of_operand(Operand::ScaleW, 0))
    }

    /// What a call is told of a dense matrix at the start of a buffer.
    pub(crate) fn raw<T: TensorElement>(&self, buffer: &mut Buffer<T>, shape: Shape) -> RawTensor {
        self.described(buffer, shape.into())
    }

    /// The same of a buffer that is one row.
    pub(crate) fn row<T: TensorElement>(&self, buffer: &mut Buffer<T>) -> RawTensor {
        let cols = buffer.len();
        self.described(buffer, Layout::from((cols,)))
    }

    fn described<T: TensorElement>(&self, buffer: &mut Buffer<T>, layout: Layout) -> RawTensor {
        let location = self.comm().device().ordinal().map_or(Location::Host, Location::Cuda);
        let available = buffer.len();
        RawTensor { address: buffer.address(), dtype: T::TYPE, location, layout, available }
    }

    /// Waits for the stream and checks all of a set's results, which an op with this plan has made,
    /// against the reference, and its normalised rows against `y`.
    pub fn verify<X: Element, Y: Element>(
        &self,
        set: &OperandSet<X, Y>,
        plan: &Plan,
    ) -> anyhow::Result<Verdict> {
        let op = set.held()?.problem.op();
        self.verify_made_by(set, MadeBy::plan(plan, op, self.comm().nodes()))
    }

    /// The same of results that anything has made.
    pub(crate) fn verify_made_by<X: Element, Y: Element>(
        &self,
        set: &OperandSet<X, Y>,
        made_by: MadeBy,
    ) -> anyhow::Result<Verdict> {
        let (operands, rank) = (set.held()?, self.rank());
        let mut verdict = Verdict::default();
        for (number, weight) in set.weights.iter().enumerate() {
            let of_weight = operands.of_weight(number);
            let found = match &weight.y {
                Buffer::Host(y) => {
                    let y = &y.elements()[..elements(of_weight.y_window(rank))];
                    reference::verify::<X, Y>(&of_weight, rank, y, made_by)
                }
                Buffer::Cuda { block, .. } => {
                    self.expect_gpu()?.verify(&of_weight, rank, block.address(), made_by)?
                }
            };
            verdict = verdict.merge(found.of_weight(number as u32));
        }
        let (Some(norm), Some(spec)) = (&set.norm, operands.epilogue.rms_norm) else {
            return Ok(verdict);
        };
        let held = ..elements(operands.y_window(rank));
        let (y, y_norm) = (self.download(&set.weights[0].y)?, self.download(&norm.y_norm)?);
        let gain = self.download(&norm.gain)?;
        let of_norm = reference::verify_norm(rank, &y[held], &y_norm[held], &gain, spec.eps.get());
        Ok(verdict.merge(of_norm.of_wrong_elements()))
    }

    /// Waits for the stream and checks elements of a set's `y` at these rows and columns.
    pub(crate) fn verify_at<X: Element, Y: Element>(
        &self,
        set: &OperandSet<X, Y>,
        plan: &Plan,
        at: &[(u32, u32)],
    ) -> anyhow::Result<Verdict> {
        let operands = set.held()?;
        let cols = operands.y_window(self.rank()).cols;
        let found = at.iter().map(|&(row, col)| {
            let number = row as usize * cols as usize + col as usize;
            let mut value = [Y::from_f32(f32::NAN)];
            match &set.weights[0].y {
                Buffer::Host(y) => value[0] = y.elements()[number],
                Buffer::Cuda { block, .. } => {
                    let bytes = bytemuck::cast_slice_mut(&mut value);
                    self.expect_gpu()?.download(block, number * size_of::<Y>(), bytes)?;
                }
            }
            Ok((row, col, value[0]))
        });
        let found = found.collect::<anyhow::Result<Vec<_>>>()?;
        let made_by = MadeBy::plan(plan, operands.problem.op(), self.comm().nodes());
        Ok(reference::verify_elements::<X, Y>(&operands, self.rank(), &found, made_by))
    }
}
