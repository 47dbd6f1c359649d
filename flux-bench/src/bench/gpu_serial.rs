//! The serial path on a GPU: NCCL's collective and cuBLASLt's GEMM in turn, and a kernel for the
//! epilogue behind them.
//!
//! Invariant: it has the op's element types. Of operands with scales it gathers rows of codes and
//! their scales in one operation, and multiplies with scales of the same form.

use super::serial::of_libraries;
use crate::harness::gpu::cublas::{Gemm, GemmOperands, GemmShape};
use crate::harness::gpu::{Gpu, LibraryOperands};
use crate::harness::scaled::bytes_behind_rows;
use crate::harness::{Buffer, OperandSet, Operands, elements, w_window, x_window, y_window};
use anyhow::bail;
use flux_core::{Numerics, Problem, Rank, Scales, SumsTo};
use flux_cuda::DeviceBlock;
use flux_kernels::Element;
use flux_kernels::cuda::{Matrix, RmsNormArgs};
use flux_kernels::harness::UnfusedEpilogue;
use flux_ops::{EpilogueSpec, Operand};
use flux_transport::CollectiveKind;
use flux_transport::internal::nccl::{Comm, ElementType};
use std::marker::PhantomData;

/// One rank's serial path over some operand sets.
pub(super) struct GpuSerial<'a, X, Y> {
    gpu: &'a Gpu,
    nccl: &'a Comm,
    rank: Rank,
    pub(super) gemm: Gemm,
    /// With equal shards.
    pub(super) problem: Problem,
    epilogue: EpilogueSpec,
    /// Of each operand set.
    between: Vec<Between>,
    elements: PhantomData<(X, Y)>,
}

/// What the path passes on of an operand set, and what of its operands is the library's own.
struct Between {
    /// From collective to GEMM, or back: the gathered `x`, or all partial sums.
    rows: DeviceBlock,
    /// The product of gathered rows; none without an epilogue, where it is `y`.
    product: Option<DeviceBlock>,
    /// Of operands with scales.
    library: Option<LibraryOperands>,
    /// The gathered scales of rows that have some.
    scales: Option<GatheredScales>,
}

/// Scales of all ranks' rows.
struct GatheredScales {
    /// Shard after shard.
    gathered: DeviceBlock,
    /// Those of all rows, block of columns after block of columns; none where that is the same.
    interleaved: Option<DeviceBlock>,
}

impl<'a, X: Element, Y: Element> GpuSerial<'a, X, Y> {
    /// Of an op with this problem, on filled operand sets.
    pub(super) fn new(
        gpu: &'a Gpu,
        nccl: &'a Comm,
        rank: Rank,
        problem: &Problem,
        sets: &[OperandSet<X, Y>],
        epilogue: EpilogueSpec,
    ) -> anyhow::Result<Self> {
        let problem = of_libraries(problem)?;
        let gemm = Gemm::new(gpu.device(), GemmShape::of(&problem, rank), problem.numerics())?;
        let between = sets.iter().map(|_| Between::new(gpu, &problem, epilogue, rank));
        let between = between.collect::<anyhow::Result<_>>()?;
        let elements = PhantomData;
        Ok(Self { gpu, nccl, rank, gemm, problem, epilogue, between, elements })
    }

    /// Has the rows of a call with this problem from now on.
    pub(super) fn take(&mut self, problem: &Problem) -> anyhow::Result<()> {
        self.problem = of_libraries(problem)?;
        Ok(self.gemm.reshape(GemmShape::of(&self.problem, self.rank))?)
    }

    /// Writes what of a set's operands is the library's own.
    pub(super) fn fill(&self, set: usize, held: Operands) -> anyhow::Result<()> {
        let parts = Operands { problem: self.problem, ..held }.own_parts(self.rank);
        self.between[set].library.as_ref().map_or(Ok(()), |library| library.fill(self.gpu, &parts))
    }

    /// Fills what a set's call passes on with NaN.
    pub(super) fn poison(&self, set: usize) -> anyhow::Result<()> {
        let Between { rows, product, scales, .. } = &self.between[set];
        let scales = scales.iter().flat_map(|of| [Some(&of.gathered), of.interleaved.as_ref()]);
        [Some(rows), product.as_ref()]
            .into_iter()
            .chain(scales)
            .flatten()
            .try_for_each(|block| self.gpu.poison(block.address(), block.bytes()))
    }

    /// Enqueues all of it.
    pub(super) fn launch(&self, set: usize, of: &OperandSet<X, Y>) -> anyhow::Result<()> {
        if self.problem.op().gathers() {
            self.comm(set, of)?;
            self.interleave(set)?;
            self.gemm(set, of)?;
        } else {
            self.gemm(set, of)?;
            self.comm(set, of)?;
        }
        self.epilogue(set, of)
    }

    /// Enqueues the GEMM.
    pub(super) fn gemm(&self, set: usize, of: &OperandSet<X, Y>) -> anyhow::Result<()> {
        let Between { rows, library, scales, .. } = &self.between[set];
        let (x, y) = if self.problem.op().gathers() {
            (rows.address(), self.product(set, of)?)
        } else {
            (block(&of.x)?.address(), rows.address())
        };
        let w = block(&of.weights[0].w)?.address();
        let scales = library.as_ref().map(|library| {
            let [x, w] = &library.scales;
            let gathered = scales.as_ref().map(GatheredScales::of_all_rows);
            [gathered.unwrap_or(x), w].map(DeviceBlock::address)
        });
        self.gpu.device().bind()?;
        // SAFETY: the operands have the shapes of the GEMM, and everything is on this one stream.
        unsafe { self.gemm.launch(GemmOperands { x, w, y, scales }, self.gpu.raw_stream())? };
        Ok(())
    }

    /// Enqueues the collective.
    pub(super) fn comm(&self, set: usize, of: &OperandSet<X, Y>) -> anyhow::Result<()> {
        let (problem, rank, stream) = (&self.problem, self.rank, self.gpu.raw_stream());
        let Between { rows, library, scales, .. } = &self.between[set];
        let (x, y) = (block(&of.x)?, block(&of.weights[0].y)?.address());
        let kind = match problem.op().sums_to() {
            SumsTo::Nothing => {
                let codes = library.as_ref().and_then(|of| of.codes.as_ref());
                let ends = |from: &DeviceBlock, to: &DeviceBlock| (from.address(), to.address());
                let bytes = elements(x_window(problem, rank)) * size_of::<X>();
                let mut tensors = vec![(ends(codes.unwrap_or(x), rows), bytes)];
                if let (Some(library), Some(scales)) = (library, scales) {
                    let [lines, cols] = scale_extents(problem);
                    let bytes = lines as usize * cols as usize * size_of::<f32>();
                    tensors.push((ends(&library.scales[0], &scales.gathered), bytes));
                }
                // SAFETY: each has room for all ranks' parts, and what is sent is this rank's; all
                // on this one stream.
                unsafe { self.nccl.gather(&tensors, stream) }?;
                return Ok(());
            }
            SumsTo::Rows => CollectiveKind::ReduceScatter,
            SumsTo::All => CollectiveKind::AllReduce,
        };
        let dtype = ElementType::from(problem.collective_dtype());
        let (ends, count) = ((rows.address(), y), elements(y_window(problem, rank)));
        // SAFETY: `rows` holds all rows, `y` this rank's window; all on this one stream.
        unsafe { self.nccl.collective(kind, ends, count, dtype, stream) }?;
        Ok(())
    }

    /// Enqueues what brings gathered scales into the order in which the library reads them.
    pub(super) fn interleave(&self, set: usize) -> anyhow::Result<()> {
        let scales = self.between[set].scales.as_ref();
        let Some((from, to)) = scales.and_then(|of| Some((&of.gathered, of.interleaved.as_ref()?)))
        else {
            return Ok(());
        };
        let [lines, cols] = scale_extents(&self.problem);
        self.gpu.interleave_shards(from, to, [self.problem.world().get(), lines, cols])
    }

    /// Where the sums of a set are that an epilogue finishes, or `y` itself.
    fn product(&self, set: usize, of: &OperandSet<X, Y>) -> anyhow::Result<u64> {
        let product = match &self.between[set].product {
            Some(product) => product,
            None => block(&of.weights[0].y)?,
        };
        Ok(product.address())
    }

    /// Enqueues what follows GEMM and collective, by one kernel.
    fn epilogue(&self, set: usize, of: &OperandSet<X, Y>) -> anyhow::Result<()> {
        if self.epilogue == EpilogueSpec::default() {
            return Ok(());
        }
        let (sums, held) = (self.product(set, of)?, of.held()?);
        let OperandSet { weights, residual, norm, .. } = of;
        let window = Operands { problem: self.problem, ..held }.y_window(self.rank);
        let dtype = self.problem.numerics().output;
        let row_bytes = |cols: u32| u64::from(cols) * dtype.bytes() as u64;
        let matrix = |address, cols| Matrix { address, row_bytes: row_bytes(cols) };
        let address = |buffer: &Option<Buffer<Y>>| {
            buffer.as_ref().map(|buffer| block(buffer).map(DeviceBlock::address)).transpose()
        };
        let (gain, y_norm) = match norm {
            Some(norm) => (block(&norm.gain)?.address(), block(&norm.y_norm)?.address()),
            None => (0, 0),
        };
        let norm = RmsNormArgs {
            y: matrix(block(&weights[0].y)?.address(), window.cols),
            gain,
            out: matrix(y_norm, window.cols),
            rows: window.rows,
            cols: window.cols,
            eps: self.epilogue.rms_norm.map_or(0.0, |norm| norm.eps.get()),
            programmatic: false,
            stream: self.gpu.raw_stream(),
        };
        let args = UnfusedEpilogue {
            norm,
            sums: matrix(sums, y_window(&self.problem, self.rank).cols),
            bias: address(&weights[0].bias)?,
            residual: address(residual)?,
            activation: self.epilogue.activation,
            gates: self.epilogue.gates,
        };
        // SAFETY: the set and the product were allocated for these rows, `y` of gathered rows is
        // apart from its product, and all is used on this one stream.
        unsafe { self.gpu.unfused_epilogue(&args, dtype) }
    }
}

impl Between {
    fn new(
        gpu: &Gpu,
        problem: &Problem,
        epilogue: EpilogueSpec,
        rank: Rank,
    ) -> anyhow::Result<Self> {
        let numerics = problem.numerics();
        // Of any operands: they are filled later.
        let parts = Operands::new(*problem, 0, 0, crate::harness::Fill::Uniform).own_parts(rank);
        let library = || LibraryOperands::new(gpu, &parts, bytes_behind_rows(problem));
        let scales = || {
            let [lines, cols] = scale_extents(problem);
            let ranks = problem.world().index();
            let bytes = ranks * lines as usize * cols as usize * size_of::<f32>();
            let interleaved = parts[0].layout_of_cublas().transposed;
            anyhow::Ok(GatheredScales {
                gathered: gpu.alloc(bytes)?,
                interleaved: interleaved.then(|| gpu.alloc(bytes)).transpose()?,
            })
        };
        let product = product_bytes(problem, epilogue, rank);
        Ok(Self {
            rows: gpu.alloc(between_bytes(problem) as usize)?,
            product: (product > 0).then(|| gpu.alloc(product as usize)).transpose()?,
            library: (numerics.scales != Scales::None).then(library).transpose()?,
            scales: (bytes_behind_rows(problem) > 0).then(scales).transpose()?,
        })
    }
}

impl GatheredScales {
    /// As the library reads them.
    fn of_all_rows(&self) -> &DeviceBlock {
        self.interleaved.as_ref().unwrap_or(&self.gathered)
    }
}

/// Blocks of columns of a shard's rows, and its rows: as the library has its scales.
const fn scale_extents(problem: &Problem) -> [u32; 2] {
    [problem.numerics().scales.of_row(problem.k()), problem.m() / problem.world().get()]
}

/// Bytes of device memory that a row takes on one rank in so many operand sets, the workspace and
/// scales left out.
pub(super) fn device_bytes(problem: &Problem, epilogue: EpilogueSpec, sets: usize) -> u64 {
    let first = Rank::new(0);
    let Numerics { operand, output, .. } = problem.numerics();
    let [x, w, y] = [x_window, w_window, y_window].map(|w| elements(w(problem, first)) as u64);
    let outputs = 1
        + u64::from(epilogue.operands.has(Operand::Residual))
        + u64::from(epilogue.rms_norm.is_some());
    let vectors = 2 * u64::from(problem.n());
    // A library reads rows of `x` without their scales.
    let x = if problem.rows_carry_scales() { 2 * x } else { x };
    let set = (x + w) * operand.bytes() as u64 + (outputs * y + vectors) * output.bytes() as u64;
    (set + product_bytes(problem, epilogue, first) + between_bytes(problem)) * sets as u64
}

/// Of all rows: the gathered `x`, or one rank's partial sums.
fn between_bytes(problem: &Problem) -> u64 {
    let Numerics { operand, output, .. } = problem.numerics();
    let row = if problem.op().gathers() {
        u64::from(problem.k()) * operand.bytes() as u64
    } else {
        u64::from(problem.n()) * output.bytes() as u64
    };
    u64::from(problem.m()) * row
}

/// Of a product of gathered rows, where an epilogue follows.
fn product_bytes(problem: &Problem, epilogue: EpilogueSpec, rank: Rank) -> u64 {
    let apart = problem.op().gathers() && epilogue != EpilogueSpec::default();
    let elements = if apart { elements(y_window(problem, rank)) } else { 0 };
    (elements * problem.numerics().output.bytes()) as u64
}

fn block<T>(buffer: &Buffer<T>) -> anyhow::Result<&DeviceBlock> {
    match buffer {
        Buffer::Cuda { block, .. } => Ok(block),
        Buffer::Host(_) => bail!("host memory on a rank that works on a device"),
    }
}
