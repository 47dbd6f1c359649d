//! A rank's communicator, memory and device.
//!
//! Invariant: data, checks and the order of events on the stream are the same on a device as on the
//! host.

use crate::harness::Fill;
use crate::harness::data::{self, Window};
use crate::harness::gpu::Gpu;
use crate::harness::{
    Buffer, EpilogueSpec, HostBuffer, Operands, bias_window, elements, room, w_window, x_window,
    y_window,
};
use crate::harness::{Verdict, reference};
use anyhow::Context;
use flux_core::plan::{CommMode, Plan};
use flux_core::{Problem, Rank};
use flux_cuda::CudaDevice;
use flux_kernels::Element;
use flux_ops::{FusedLinear, GateLayout, Layout, Location, RawTensor, TensorMut, TensorRef};
use flux_transport::{Communicator, Stream};
use std::ptr::with_exposed_provenance_mut;
use std::time::{Duration, Instant};

/// Elements of a copy from a device: enough for its full speed.
const BLOCK: usize = 1 << 21;

/// A rank's communicator and device.
#[derive(Debug)]
pub struct RankContext {
    comm: Communicator,
    gpu: Option<Gpu>,
}

/// One call's operands in memory, dense.
#[derive(Debug)]
pub struct OperandSet<T> {
    /// The rank's `x`.
    pub x: Buffer<T>,
    /// The rank's `w`.
    pub w: Buffer<T>,
    /// The rank's bias, for an op that adds one.
    pub bias: Option<Buffer<T>>,
    /// The rank's rows of the residual, for an op that adds one.
    pub residual: Option<Buffer<T>>,
    /// The norm's gain, and the rank's normalised rows.
    pub norm: Option<(Buffer<T>, Buffer<T>)>,
    /// The rank's `y`.
    pub y: Buffer<T>,
    /// Further weights, which share `x`.
    pub more: Vec<WeightSet<T>>,
    /// What the inputs hold.
    pub holds: Option<Operands>,
}

/// A further weight in memory, with its result.
#[derive(Debug)]
pub struct WeightSet<T> {
    w: Buffer<T>,
    bias: Option<Buffer<T>>,
    y: Buffer<T>,
}

impl<T> OperandSet<T> {
    /// The rank's `y` of every weight.
    pub(crate) fn results(&self) -> impl Iterator<Item = &Buffer<T>> {
        std::iter::once(&self.y).chain(self.more.iter().map(|more| &more.y))
    }

    /// The same, to be written.
    pub(crate) fn results_mut(&mut self) -> impl Iterator<Item = &mut Buffer<T>> {
        std::iter::once(&mut self.y).chain(self.more.iter_mut().map(|more| &mut more.y))
    }
}

impl RankContext {
    /// The context of `comm`'s rank.
    ///
    /// # Errors
    /// A device that cannot be opened, harness kernels that cannot be had.
    pub fn new(comm: Communicator) -> anyhow::Result<Self> {
        let gpu = comm
            .device()
            .ordinal()
            .map(|ordinal| Gpu::open(&CudaDevice::open(ordinal)?))
            .transpose()?;
        Ok(Self { comm, gpu })
    }

    /// The communicator.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// The rank.
    pub fn rank(&self) -> Rank {
        self.comm.rank()
    }

    /// The device, where the rank works on one.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// The stream of the rank's calls.
    pub fn stream(&self) -> Stream<'_> {
        self.gpu.as_ref().map_or(Stream::Host, Gpu::stream)
    }

    /// Memory of `elements` elements; the contents are undefined.
    pub fn alloc<T: Element>(&self, elements: usize) -> anyhow::Result<Buffer<T>> {
        Ok(match &self.gpu {
            None => Buffer::Host(HostBuffer::new(elements)?),
            Some(gpu) => Buffer::Cuda { block: gpu.alloc(elements * size_of::<T>())?, elements },
        })
    }

    /// Memory of one call's operands, without a bias or a residual.
    pub fn operand_set<T: Element>(&self, problem: &Problem) -> anyhow::Result<OperandSet<T>> {
        self.operand_set_with(problem, EpilogueSpec::default())
    }

    /// Memory of one call's operands, for an op with this epilogue.
    pub fn operand_set_with<T: Element>(
        &self,
        problem: &Problem,
        epilogue: EpilogueSpec,
    ) -> anyhow::Result<OperandSet<T>> {
        let of = |problem: &Problem, window: fn(&Problem, Rank) -> Window| {
            self.alloc(elements(window(problem, self.rank())))
        };
        let bias_of =
            |problem: &Problem| epilogue.bias.then(|| of(problem, bias_window)).transpose();
        let weight = |weight| {
            let alone = problem.weight_alone(weight);
            Ok::<_, anyhow::Error>(WeightSet {
                w: of(&alone, w_window)?,
                bias: bias_of(&alone)?,
                y: of(&alone, y_window)?,
            })
        };
        let more = (1..problem.weight_count()).map(weight).collect::<Result<_, _>>()?;
        let first = problem.weight_alone(0);
        let part = |window: fn(&Problem, Rank) -> Window| of(&first, window);
        let bias = bias_of(&first)?;
        let residual = epilogue.residual.then(|| part(y_window)).transpose()?;
        let norm = if epilogue.norm { Some((part(bias_window)?, part(y_window)?)) } else { None };
        Ok(OperandSet {
            x: part(x_window)?,
            w: part(w_window)?,
            bias,
            residual,
            norm,
            y: part(y_window)?,
            more,
            holds: None,
        })
    }

    /// Writes the rank's parts of `operands`, in order on the stream, unless the set holds them
    /// already.
    pub fn fill<T: Element>(
        &self,
        set: &mut OperandSet<T>,
        operands: Operands,
    ) -> anyhow::Result<()> {
        let held = set.holds.replace(operands);
        let rank = self.rank();
        // A part does not change with rows that it does not have.
        let same = |weight: usize,
                    seed: fn(&Operands) -> u64,
                    window: fn(&Problem, Rank) -> Window| {
            let of = |o: Operands| (seed(&o), o.fill, window(&o.problem, rank));
            held.is_some_and(|held| of(held.of_weight(weight)) == of(operands.of_weight(weight)))
        };
        let first = operands.of_weight(0);
        let problem = &first.problem;
        if !same(0, |o| o.seed_x, x_window) {
            self.fill_part(
                &mut set.x,
                x_window(problem, self.rank()),
                operands.seed_x,
                operands.fill,
            )?;
        }
        anyhow::ensure!(
            set.bias.is_some() == operands.epilogue.bias,
            "the set's bias is not that of {:?}",
            operands.epilogue
        );
        let more = set.more.iter_mut().map(|more| (&mut more.w, more.bias.as_mut()));
        for (number, (w, bias)) in
            std::iter::once((&mut set.w, set.bias.as_mut())).chain(more).enumerate()
        {
            let of_weight = operands.of_weight(number);
            if !same(number, |o| o.seed_w, w_window) {
                self.fill_part(
                    w,
                    w_window(&of_weight.problem, rank),
                    of_weight.seed_w,
                    operands.fill,
                )?;
            }
            if let Some(bias) = bias.filter(|_| !same(number, |o| o.seed_bias, bias_window)) {
                self.fill_part(
                    bias,
                    bias_window(&of_weight.problem, rank),
                    of_weight.seed_bias,
                    operands.fill,
                )?;
            }
        }
        anyhow::ensure!(
            set.residual.is_some() == operands.epilogue.residual,
            "the set's residual is not that of {:?}",
            operands.epilogue
        );
        if let Some(residual) =
            set.residual.as_mut().filter(|_| !same(0, |o| o.seed_residual, y_window))
        {
            self.fill_part(
                residual,
                y_window(problem, self.rank()),
                operands.seed_residual,
                operands.fill,
            )?;
        }
        anyhow::ensure!(
            set.norm.is_some() == operands.epilogue.norm,
            "the set's norm is not that of {:?}",
            operands.epilogue
        );
        if let Some((gain, _)) =
            set.norm.as_mut().filter(|_| !same(0, |o| o.seed_gain, bias_window))
        {
            self.fill_part(
                gain,
                bias_window(problem, self.rank()),
                operands.seed_gain,
                operands.fill,
            )?;
        }
        Ok(())
    }

    fn fill_part<T: Element>(
        &self,
        to: &mut Buffer<T>,
        window: Window,
        seed: u64,
        fill: Fill,
    ) -> anyhow::Result<()> {
        match to {
            Buffer::Host(buffer) => {
                let part = buffer.elements_mut().get_mut(..elements(window));
                data::fill(
                    part.with_context(|| format!("{window:?} is larger than its memory"))?,
                    window,
                    seed,
                    fill,
                );
            }
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.fill(block, window, seed, fill, T::DTYPE)?;
            }
        }
        Ok(())
    }

    /// Fills memory with NaN, in order on the stream.
    pub fn poison<T: Element>(&self, buffer: &mut Buffer<T>) -> anyhow::Result<()> {
        match buffer {
            Buffer::Host(buffer) => buffer.elements_mut().fill(T::from_f32(f32::NAN)),
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.poison(block.address(), block.bytes())?;
            }
        }
        Ok(())
    }

    /// Fills this rank's part of the communicator's data region, both buffers, with NaN, in order
    /// on the stream.
    ///
    /// # Safety
    /// No rank has a call under way, nor begins one before all ranks' streams are past this.
    pub unsafe fn poison_workspace(&self) -> anyhow::Result<()> {
        let workspace = self.comm.workspace();
        let (data, bytes) =
            (workspace.data[self.rank().index()], workspace.size.data_bytes() as usize);
        match &self.gpu {
            // SAFETY: the region has this length and belongs to this process; the caller keeps
            // others away.
            None if bytes > 0 => unsafe {
                with_exposed_provenance_mut::<u8>(data as usize).write_bytes(0xFF, bytes);
            },
            None => {}
            Some(gpu) => gpu.poison(data, bytes)?,
        }
        Ok(())
    }

    /// Copies from host memory to the start of `buffer`.
    pub fn upload<T: Element>(&self, buffer: &mut Buffer<T>, from: &[T]) -> anyhow::Result<()> {
        match buffer {
            Buffer::Host(buffer) => buffer.elements_mut()[..from.len()].copy_from_slice(from),
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.upload(block, bytemuck::cast_slice(from))?;
            }
        }
        Ok(())
    }

    /// Waits for the stream, then copies to host memory.
    pub fn download<T: Element>(&self, buffer: &Buffer<T>) -> anyhow::Result<Vec<T>> {
        let mut all = room(buffer.len())?;
        self.download_blocks(buffer, BLOCK, |_, block| {
            all.extend_from_slice(block);
            Ok(())
        })?;
        Ok(all)
    }

    /// Waits for the stream, then shows the elements, at most `size` at a time, each time with the
    /// number of the first. Those of a device pass through one block of host memory.
    pub(crate) fn download_blocks<T: Element>(
        &self,
        buffer: &Buffer<T>,
        size: usize,
        mut show: impl FnMut(usize, &[T]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let size = size.min(buffer.len()).max(1);
        let firsts = (0..buffer.len()).step_by(size);
        match buffer {
            Buffer::Host(buffer) => firsts
                .zip(buffer.elements().chunks(size))
                .try_for_each(|(first, block)| show(first, block)),
            Buffer::Cuda { block, elements } => {
                let mut to = room(size)?;
                to.resize(size, T::from_f32(0.0));
                for first in firsts {
                    let part = &mut to[..size.min(elements - first)];
                    self.expect_gpu()?.download(
                        block,
                        first * size_of::<T>(),
                        bytemuck::cast_slice_mut(part),
                    )?;
                    show(first, part)?;
                }
                Ok(())
            }
        }
    }

    /// Calls the op on a set's operands, in order on the stream: with as many rows as the set
    /// holds.
    pub(crate) fn forward<T: Element>(
        &self,
        op: &FusedLinear,
        set: &mut OperandSet<T>,
    ) -> anyhow::Result<()> {
        let (comm, rank) = (&self.comm, self.rank());
        let problem = set.holds.map_or(*op.largest(), |held| held.problem);
        let gates = set.holds.and_then(|held| held.epilogue.gates);
        let y_layout = |problem: &Problem| {
            Layout::from(GateLayout::result_shape(gates, problem.y_shape(rank)))
        };
        let vector = |problem: &Problem| Layout::from((problem.n_local(rank) as usize,));
        let further = set.more.iter_mut().map(|more| (&more.w, &more.bias, &mut more.y));
        let mut weights = Vec::with_capacity(problem.weight_count());
        for (weight, (w, bias, y)) in
            std::iter::once((&set.w, &set.bias, &mut set.y)).chain(further).enumerate()
        {
            let alone = problem.weight_alone(weight);
            let bias = bias.as_ref().map(|bias| view(bias, vector(&alone), comm)).transpose()?;
            weights.push((
                view(w, alone.w_shape(rank).into(), comm)?,
                bias,
                view_mut(y, y_layout(&alone), comm)?,
            ));
        }
        let x = view(&set.x, problem.x_shape(rank).into(), comm)?;
        let residual = set.residual.as_ref();
        let residual =
            residual.map(|residual| view(residual, y_layout(&problem), comm)).transpose()?;
        let mut norm = match &mut set.norm {
            Some((gain, y_norm)) => Some((
                view(gain, vector(&problem), comm)?,
                view_mut(y_norm, y_layout(&problem), comm)?,
            )),
            None => None,
        };
        let mut call = op.call(&x);
        for (w, bias, y) in &mut weights {
            call = call.weight(w, y);
            if let Some(bias) = bias {
                call = call.bias(bias);
            }
        }
        if let Some(residual) = &residual {
            call = call.residual(residual);
        }
        if let Some((gain, y_norm)) = &mut norm {
            call = call.norm(gain, y_norm);
        }
        Ok(call.on(self.stream())?)
    }

    /// Waits for the stream and checks all of a set's results against the reference, and its
    /// normalised rows against `y`.
    pub fn verify<T: Element>(&self, set: &OperandSet<T>, plan: &Plan) -> anyhow::Result<Verdict> {
        let Some(operands) = &set.holds else {
            anyhow::bail!("there is nothing to verify: the operands were not generated");
        };
        let mut verdict = Verdict::default();
        for (weight, y) in set.results().enumerate() {
            verdict = verdict.merge(
                self.verify_result(&operands.of_weight(weight), y, plan)?.of_weight(weight as u32),
            );
        }
        let Some((gain, y_norm)) = &set.norm else { return Ok(verdict) };
        // The set may hold room for more rows.
        let elements = elements(operands.y_window(self.rank()));
        let (y, y_norm) = (self.download(&set.y)?, self.download(y_norm)?);
        let of_norm = reference::verify_norm(
            self.rank(),
            (&y[..elements], &y_norm[..elements]),
            &self.download(gain)?,
        );
        Ok(verdict.merge(of_norm.of_wrong_elements()))
    }

    fn verify_result<T: Element>(
        &self,
        operands: &Operands,
        y: &Buffer<T>,
        plan: &Plan,
    ) -> anyhow::Result<Verdict> {
        let (flattened, nodes) = (plan.is_flattened(), self.comm.nodes());
        match y {
            Buffer::Host(buffer) => {
                let held = elements(operands.y_window(self.rank()));
                Ok(reference::verify(
                    operands,
                    self.rank(),
                    &buffer.elements()[..held],
                    (flattened, nodes),
                ))
            }
            Buffer::Cuda { block, .. } => {
                let made_by = (
                    flattened,
                    plan.comm == CommMode::Sequential && operands.problem.op().reduces(),
                    nodes,
                );
                self.expect_gpu()?.verify(operands, self.rank(), block.address(), made_by)
            }
        }
    }

    /// Waits for the stream and checks elements of a set's `y` at these rows and columns.
    pub(crate) fn verify_at<T: Element>(
        &self,
        set: &OperandSet<T>,
        plan: &Plan,
        at: &[(u32, u32)],
    ) -> anyhow::Result<Verdict> {
        let Some(operands) = &set.holds else {
            anyhow::bail!("there is nothing to verify: the operands were not generated");
        };
        let cols = operands.y_window(self.rank()).cols;
        let found = at.iter().map(|&(row, col)| {
            let number = row as usize * cols as usize + col as usize;
            let mut value = [T::from_f32(f32::NAN)];
            match &set.y {
                Buffer::Host(y) => value[0] = y.elements()[number],
                Buffer::Cuda { block, .. } => {
                    self.expect_gpu()?.download(
                        block,
                        number * size_of::<T>(),
                        bytemuck::cast_slice_mut(&mut value),
                    )?;
                }
            }
            Ok((row, col, value[0]))
        });
        let found = found.collect::<anyhow::Result<Vec<_>>>()?;
        let made_by = (
            plan.is_flattened(),
            plan.comm == CommMode::Sequential && operands.problem.op().reduces(),
            self.comm.nodes(),
        );
        Ok(reference::verify_elements(operands, self.rank(), &found, made_by))
    }

    /// Occupies the rank: the thread on the host, the stream on a device.
    pub fn delay(&self, time: Duration) -> anyhow::Result<()> {
        match &self.gpu {
            None => std::thread::sleep(time),
            Some(gpu) => gpu.spin(time)?,
        }
        Ok(())
    }

    /// Waits for everything on the stream, then reads the op's status.
    pub(crate) fn sync(&self, op: &FusedLinear) -> anyhow::Result<()> {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize()?;
        }
        op.status()?;
        Ok(())
    }

    /// As [`sync`](Self::sync) for at most `limit`; the error tells the call's progress.
    pub(crate) fn sync_within(&self, op: &FusedLinear, limit: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + limit;
        if let Some(gpu) = &self.gpu {
            while !gpu.is_idle()? {
                if Instant::now() >= end {
                    let progress = self.comm.progress().unwrap_or_default();
                    anyhow::bail!(
                        "rank {}: the stream has not come past a call in {limit:?}; {progress}",
                        self.rank()
                    );
                }
                std::thread::yield_now();
            }
        }
        op.status()?;
        Ok(())
    }

    fn expect_gpu(&self) -> anyhow::Result<&Gpu> {
        self.gpu
            .as_ref()
            .ok_or_else(|| anyhow::anyhow!("device memory on a rank that works on the host"))
    }
}

fn view<'a, T: Element>(
    buffer: &'a Buffer<T>,
    layout: Layout,
    comm: &Communicator,
) -> anyhow::Result<TensorRef<'a, T>> {
    Ok(match buffer {
        Buffer::Host(buffer) => TensorRef::host(buffer.elements(), layout)?,
        // SAFETY: the block is borrowed for as long as the view, is freed only after its device has
        // finished, and is written on this one stream.
        Buffer::Cuda { block, elements } => unsafe {
            TensorRef::from_raw(raw::<T>(block.address(), *elements, layout, comm))?
        },
    })
}

fn view_mut<'a, T: Element>(
    buffer: &'a mut Buffer<T>,
    layout: Layout,
    comm: &Communicator,
) -> anyhow::Result<TensorMut<'a, T>> {
    Ok(match buffer {
        Buffer::Host(buffer) => TensorMut::host(buffer.elements_mut(), layout)?,
        // SAFETY: the block is exclusively borrowed, is freed only after its device has finished,
        // and is used on this one stream.
        Buffer::Cuda { block, elements } => unsafe {
            TensorMut::from_raw(raw::<T>(block.address(), *elements, layout, comm))?
        },
    })
}

fn raw<T: Element>(
    address: u64,
    available: usize,
    layout: Layout,
    comm: &Communicator,
) -> RawTensor {
    let location = comm.device().ordinal().map_or(Location::Host, Location::Cuda);
    RawTensor { address, dtype: T::DTYPE, location, layout, available }
}
