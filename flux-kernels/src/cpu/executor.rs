//! One rank's executor. A call runs on this thread and on as many others as start.

use super::buffers::{Buffers, Scratch};
use super::call::{Call, Output};
use super::epilogue::Epilogue;
use super::error::ExecuteError;
use super::memory::HostMemory;
use super::operands::{Rows, RowsMut, fits};
use super::scaling::Scaling;
use super::stamps::Recorded;
use crate::abi::Stamps;
use crate::element::Element;
use crate::operand::{Operand, Shapes};
use crate::weights::{GateLayout, WeightLayout};
use flux_core::problem::WeightList;
use flux_core::program::TileProgram;
use flux_core::program::check::verify_rank;
use flux_core::signal::{Left, Poisoned, Protocol, read_fault};
use flux_core::{Numerics, Scales};
use std::num::NonZeroUsize;
use std::sync::OnceLock;

/// A weight of a call, with its result.
#[derive(Debug)]
pub struct CpuWeight<'a, X, Y = X> {
    /// `w`, `[n_r, k]` or `[n, k_r]`, or its transpose.
    pub w: Rows<'a, X>,
    /// Its scales, where operands have any.
    pub scale: Option<Rows<'a, f32>>,
    /// `y`, `[m, n_r]`, `[m_r, n]` or `[m, n]`; with gates `[m, n_r/2]`.
    pub y: RowsMut<'a, Y>,
}

/// The operands and memory of one call. Shapes are those of the problem.
#[derive(Debug)]
pub struct CpuArgs<'a, X, Y = X> {
    /// `x`, `[m_r, k]` (AllGather-GEMM) or `[m, k_r]` (the others).
    pub x: Rows<'a, X>,
    /// Its scales, where operands have any. The scales of gathered rows lie behind the rows.
    pub scale: Option<Rows<'a, f32>>,
    /// The weights of the problem.
    pub weights: WeightList<CpuWeight<'a, X, Y>>,
    /// How they lie.
    pub layout: WeightLayout,
    /// Where all rows of `x` go, `[m, k]` (AllGather-GEMM).
    pub gathered: Option<RowsMut<'a, X>>,
    /// Applied to a sum before it is stored to `y`.
    pub epilogue: Epilogue<'a, Y>,
    /// The communicator's workspace.
    pub memory: HostMemory<'a>,
    /// Whether a mover reads `x`, so that the call ends after it.
    pub await_pushed: bool,
    /// This rank's op-sequence hash; 0 where ranks compare none.
    pub op_hash: u32,
    /// Where the time stamps of a call go that succeeds; a call without reads no clock.
    pub stamps: Option<&'a mut Stamps>,
}

/// One rank's checked program. A call allocates nothing but its threads, and stamps where it is
/// traced, once its buffers are [large enough](Buffers::reserve).
#[derive(Debug)]
pub struct Executor {
    program: TileProgram,
    workers: NonZeroUsize,
}

impl Executor {
    /// Checks the program. Workers without a thread leave their work to the others.
    ///
    /// # Errors
    /// [`ExecuteError::Program`].
    pub fn new(program: TileProgram, workers: NonZeroUsize) -> Result<Self, ExecuteError> {
        verify_rank(&program)?;
        Ok(Self { program, workers })
    }

    /// Makes room for calls in `buffers`.
    ///
    /// # Errors
    /// [`ExecuteError::OutOfMemory`].
    pub fn reserve(&self, buffers: &mut Buffers) -> Result<(), ExecuteError> {
        buffers.reserve(&self.program, self.workers.get())
    }

    /// The program.
    pub const fn program(&self) -> &TileProgram {
        &self.program
    }

    /// Executes the program once, in the epoch of the control block, and closes the call. On return
    /// `y` is written and the epoch advanced.
    ///
    /// # Errors
    /// [`ExecuteError::DType`], [`ExecuteError::Scales`], [`ExecuteError::Operand`],
    /// [`ExecuteError::Activation`], [`ExecuteError::Gates`], [`ExecuteError::Weights`],
    /// [`ExecuteError::NoSuchOperand`], [`ExecuteError::Workspace`] and
    /// [`ExecuteError::OutOfMemory`] before anything is touched. [`ExecuteError::Timeout`],
    /// [`ExecuteError::Aborted`] and [`ExecuteError::Disagreed`] when a wait failed: the fault
    /// record and the poison word are written, and `y` is undefined.
    pub fn run<X: Element, Y: Element>(
        &self,
        buffers: &mut Buffers,
        args: CpuArgs<'_, X, Y>,
    ) -> Result<(), ExecuteError> {
        self.fits(&args)?;
        let CpuArgs {
            x,
            scale,
            weights: of_weights,
            layout,
            gathered,
            epilogue,
            memory,
            await_pushed,
            op_hash,
            stamps,
        } = args;
        self.reserve(buffers)?;
        let (problem, rank) = (&self.program.problem, self.program.rank);
        let failed = || ExecuteError::from_record(read_fault(memory.words()), self.program.rank);
        let protocol =
            Protocol::open(memory.words(), self.program.rank).of(op_hash, problem.world());
        if protocol.poisoned() {
            return Err(failed());
        }
        protocol.announce();

        let k = problem.k_local(rank) as usize;
        let Buffers { weights, workers } = buffers;
        let mut rest = &mut weights[..];
        for (number, weight) in of_weights.iter().enumerate() {
            let (to, behind) = rest.split_at_mut(problem.weight_columns(number, rank).len() * k);
            widen(weight.w, layout, epilogue.gates, k, to);
            rest = behind;
        }
        let mut scales = Scaling { x: scale, w: WeightList::new(), gates: epilogue.gates };
        for scale in of_weights.iter().filter_map(|weight| weight.scale) {
            // There is room for as many.
            let _ = scales.w.push(scale);
        }
        let call = Call {
            program: &self.program,
            x,
            scales,
            weights,
            outputs: of_weights.map(|weight| Output::new(weight.y)),
            epilogue,
            memory: &memory,
            protocol,
            await_pushed,
            trace: stamps.as_ref().map(|_| Recorded::default()),
        };
        // A scope allocates, even one without threads.
        let (first, others) = workers[..self.workers.get()].split_at_mut(1);
        let done = if others.is_empty() {
            call.work(0, 1, &mut first[0])
        } else {
            together(&call, &mut first[0], others)
        };
        match done {
            Ok(_) => {
                if let Some(rows) = gathered {
                    call.hand_out(rows);
                }
                if let Some((to, recorded)) = stamps.zip(call.trace) {
                    *to = recorded.stamps();
                }
                Ok(())
            }
            Err(Poisoned) => Err(failed()),
        }
    }

    /// Whether the operands and the workspace are the problem's.
    fn fits<X: Element, Y: Element>(&self, args: &CpuArgs<'_, X, Y>) -> Result<(), ExecuteError> {
        let CpuArgs { x, scale, weights, layout, gathered, epilogue, memory, .. } = args;
        let (problem, rank) = (&self.program.problem, self.program.rank);
        let Numerics { operand, output, .. } = problem.numerics();
        if [operand, output] != [X::DTYPE, Y::DTYPE] {
            let (program, operands, outputs) = (problem.numerics(), X::DTYPE, Y::DTYPE);
            return Err(ExecuteError::DType { program, operands, outputs });
        }
        let takes = problem.weight_count();
        let alike = epilogue.operands.is_of_all_or_none(takes);
        if weights.len() != takes || !alike || *layout != WeightLayout::Nk && takes > 1 {
            return Err(ExecuteError::Weights { takes, layout: *layout });
        }
        let gates = epilogue.gates;
        let shapes = Shapes { layout: *layout, gates, ..Shapes::new(problem, rank) };
        let holds = |operand: Operand, weight, have, stride| {
            fits(operand.name(weight), shapes.of_operand(operand, weight), have, stride)
        };
        holds(Operand::X, 0, x.elements.len(), x.stride)?;
        let holds_scales = |operand: Operand, weight, scale: &Option<Rows<'_, f32>>| match (
            problem.numerics().scales,
            scale,
        ) {
            (Scales::None, None) => Ok(()),
            (Scales::None, Some(_)) | (_, None) => Err(ExecuteError::Scales {
                numerics: problem.numerics(),
                operand: operand.name(weight),
            }),
            (_, Some(scale)) => holds(operand, weight, scale.elements.len(), scale.stride),
        };
        holds_scales(Operand::ScaleX, 0, scale)?;
        for (number, CpuWeight { w, scale, y }) in weights.iter().enumerate() {
            holds_scales(Operand::ScaleW, number, scale)?;
            holds(Operand::W, number, w.elements.len(), w.stride)?;
            holds(Operand::Y, number, y.elements.len(), y.stride)?;
        }
        if let Some(rows) = gathered {
            holds(Operand::XFull, 0, rows.elements.len(), rows.stride)?;
        }
        epilogue.fits(&self.program, *layout)?;
        self.holds(memory)
    }

    fn holds(&self, memory: &HostMemory<'_>) -> Result<(), ExecuteError> {
        let (need, have) = (self.program.workspace(), memory.size());
        let world = self.program.problem.world();
        if need.max(have) != have || memory.ranks() < world.index() {
            return Err(ExecuteError::Workspace {
                need,
                world: world.get(),
                have,
                ranks: memory.ranks(),
            });
        }
        Ok(())
    }
}

/// Widens a weight to fp32, `[n, k]`, with gates and ups in the order of tiles.
fn widen<T: Element>(
    w: Rows<'_, T>,
    layout: WeightLayout,
    gates: Option<GateLayout>,
    k: usize,
    to: &mut [f32],
) {
    let n = to.len() / k;
    match layout {
        WeightLayout::Nk => {
            for (row, to) in to.chunks_exact_mut(k).enumerate() {
                let from =
                    gates.map_or(row, |gates| gates.row_in_tiles(row as u32, n as u32) as usize);
                T::widen(w.row(from, k), to);
            }
        }
        WeightLayout::Kn => {
            for row in 0..k {
                for (to, from) in to[row..].iter_mut().step_by(k).zip(w.row(row, n)) {
                    *to = from.to_f32();
                }
            }
        }
    }
}

/// Runs the call on as many workers as there are threads for, this one included. None begins before
/// their number is known, so no call that has begun lacks one.
fn together<X: Element, Y: Element>(
    call: &Call<'_, X, Y>,
    first: &mut Scratch,
    others: &mut [Scratch],
) -> Result<Left, Poisoned> {
    let count = OnceLock::new();
    std::thread::scope(|scope| {
        let count = &count;
        let start = |(i, scratch)| {
            let started = std::thread::Builder::new()
                .spawn_scoped(scope, move || call.work(i, *count.wait(), scratch));
            started
                .inspect_err(|error| {
                    tracing::warn!(%error, "there is no thread for worker {i}, so there are {i} \
                                            workers");
                })
                .ok()
        };
        let others: Vec<_> = (1..).zip(others).map_while(start).collect();
        let first = call.work(0, *count.get_or_init(|| 1 + others.len()), first);
        others.into_iter().fold(first, |all, other| match other.join() {
            Ok(one) => all.and(one),
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
