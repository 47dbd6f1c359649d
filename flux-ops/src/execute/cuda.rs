//! The fused kernel, on the communicator's CUDA device.
//!
//! Invariant: a call only enqueues: it allocates no device memory and waits for nothing, so it may
//! be captured in a graph once its program is on the device.

use super::device_programs::{CopyOn, DevicePrograms, PlacedProgram};
use super::kernels;
use super::plan::{Execution, Traffic};
use super::ranges::NoRoom;
use super::sequential::Sequential;
use super::{Recipe, Resolved, call_number, labelled, no_room};
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::spec::{NormSpec, OpSpec};
use crate::tensor::{Location, View};
use crate::timeline::{TimedItem, Timeline, TimelineError};
use flux_core::Scales;
use flux_cuda::{CudaDevice, DeviceInfo, is_capturing};
use flux_kernels::cuda::{
    DeviceProgram, EpilogueStaging, GatheredRows, GatheredRowsArgs, Kernel, LaunchArgs,
    LaunchStart, Matrix, Quantize, ResultRows, RmsNorm, RmsNormArgs, TraceBuffer, launch,
};
use flux_kernels::nvrtc::Arch;
use flux_kernels::{Activation, GateLayout, KernelTarget, Operand, OperandList, Variant};
use flux_transport::{
    Call, CollectiveKind, Communicator, Job, Label, StagedTransfer, Started, Stream,
    TransportError, WorkspaceView,
};
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, PoisonError};

/// An op's kernels, and what the communicator's ops share.
#[derive(Debug)]
pub(crate) struct CudaExecutor {
    comm: Communicator,
    device: CudaDevice,
    target: KernelTarget,
    /// One for each variant that programs need.
    kernels: Vec<(Variant, Arc<Kernel>)>,
    gates: Option<GateLayout>,
    activation: Activation,
    label: Label,
    norm: Option<(NormKernel, NormSpec)>,
    /// Of an AllGather-GEMM.
    gathered: Option<Arc<GatheredRows>>,
    programs: Arc<DevicePrograms>,
    // Freed only where the device can be waited for.
    trace: ManuallyDrop<Option<Trace>>,
}

/// What normalises the rows of `y`.
#[derive(Debug)]
enum NormKernel {
    Rounding(Arc<RmsNorm>),
    Quantizing(Arc<Quantize>),
}

impl NormKernel {
    fn load(norm: NormSpec, info: &DeviceInfo, arch: Arch) -> Result<Self, BuildError> {
        Ok(match norm.scales {
            Scales::None => Self::Rounding(kernels::rms_norm(arch)?),
            _ => Self::Quantizing(kernels::quantize(info)?),
        })
    }
}

/// Where a traced op's calls leave their time line.
#[derive(Debug)]
struct Trace {
    buffer: TraceBuffer,
    /// The last call's program.
    last: Mutex<Option<Arc<PlacedProgram>>>,
}

impl Drop for CudaExecutor {
    fn drop(&mut self) {
        if self.trace.is_none() {
            return;
        }
        // Freeing waits for the device: at most a deadline for calls that work, and perhaps for
        // ever for calls that have failed. A device that has failed itself runs nothing.
        let failed = !self.device.is_given_up() && self.comm.is_broken();
        if failed && !matches!(self.comm.drain(), Ok(()) | Err(TransportError::Cuda(_))) {
            self.device.give_up("an op's calls that had failed did not end");
        }
        if self.device.is_given_up() {
            return;
        }
        // SAFETY: dropped once, here, and not used after.
        unsafe { ManuallyDrop::drop(&mut self.trace) };
    }
}

impl CudaExecutor {
    pub(super) fn new(
        comm: &Communicator,
        ordinal: u32,
        largest: &[(Recipe, Resolved)],
        spec: &OpSpec,
    ) -> Result<Self, BuildError> {
        let device = CudaDevice::open(ordinal)?;
        let target = KernelTarget::of(device.info().compute)?;
        let _current = device.enter()?;
        let epilogue = spec.epilogue;
        let programs = DevicePrograms::of(comm);
        let mut wanted: Vec<(Variant, Variant)> = Vec::new();
        for (recipe, Resolved { program, .. }) in largest {
            let (bytes, limit) = (DeviceProgram::bytes_of(program) as u64, programs.limit());
            if bytes > limit {
                return Err(no_room(recipe, NoRoom { bytes, limit, pinned: 0 }));
            }
            let of_program = Variant::of(program, target)?;
            if wanted.iter().all(|&(known, _)| known != of_program) {
                let variant =
                    of_program.with_gates(epilogue.gates.is_some()).with_weights(spec.weights);
                wanted.push((of_program, variant));
            }
        }
        let (of_programs, variants): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        // First: what the device does not have is known without a compilation.
        let norm = epilogue
            .rms_norm
            .map(|norm| {
                let kernel = NormKernel::load(norm, device.info(), target.arch)?;
                Ok::<_, BuildError>((kernel, norm))
            })
            .transpose()?;
        let loaded = kernels::variants(&variants, target.arch, comm)?;
        let kernels: Vec<_> = of_programs.into_iter().zip(loaded).collect();
        let gathers = largest.iter().any(|(recipe, _)| recipe.problem.op().gathers());
        let gathered = gathers.then(|| kernels::gathered_rows(target.arch)).transpose()?;
        programs.open(
            comm,
            &device,
            kernels
                .iter()
                .map(|(_, kernel)| EpilogueStaging::bytes_like(kernel))
                .max()
                .unwrap_or(0),
        )?;
        let traced = largest.iter().any(|(recipe, _)| recipe.launch.trace);
        let items = largest.iter().map(|(_, resolved)| resolved.bound.items).max().unwrap_or(0);
        let buffer = traced.then(|| TraceBuffer::new(items, device.info().sms)).transpose()?;
        let trace =
            ManuallyDrop::new(buffer.map(|buffer| Trace { buffer, last: Mutex::new(None) }));
        Ok(Self {
            comm: comm.clone(),
            device,
            target,
            kernels,
            gates: epilogue.gates,
            activation: epilogue.activation,
            label: spec.label(),
            norm,
            gathered,
            programs,
            trace,
        })
    }

    pub(super) fn prepare(&self, comm: &Communicator, recipe: &Recipe) -> Result<(), CallError> {
        let _current = self.device.enter().map_err(TransportError::from)?;
        let prepared = comm.in_turn(|| {
            if self.programs.take(recipe, true).is_some() {
                return Ok(());
            }
            let resolved = recipe.resolve(comm)?;
            self.programs.place(comm, recipe, resolved, CopyOn::Aside, true).map(drop)
        })?;
        prepared.map_err(|error| recipe.refused(error))
    }

    pub(super) fn run(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        op: u32,
        operands: &Operands<View>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let wrong_stream =
            || TransportError::WrongStream { stream: stream.raw(), device: comm.device() };
        let raw_stream = stream.raw().ok_or_else(wrong_stream)?;
        let _current = self.device.enter().map_err(TransportError::from)?;
        for (operand, view) in operands.named() {
            self.check_claim(operand, view)?;
        }
        if !recipe.launch.captures && is_capturing(raw_stream).map_err(TransportError::from)? {
            return Err(CallError::Captured);
        }
        let not_prepared = || CallError::NotPrepared { m: recipe.problem.m() };
        // Before the call begins: a capture that was begun is never forgotten.
        let resolved = if self.programs.contains(recipe) {
            None
        } else if is_capturing(raw_stream).map_err(TransportError::from)? {
            return Err(not_prepared());
        } else {
            Some(recipe.resolve(comm).map_err(|error| recipe.refused(error))?)
        };
        let mut call = comm.begin_as(stream, Some(labelled(self.label, &recipe.problem)))?;
        let placed = match self.programs.take(recipe, call.capturing()) {
            Some(placed) => placed,
            // Another thread's call has evicted it meanwhile.
            None if call.capturing() => return Err(not_prepared()),
            None => {
                let resolved = resolved.map_or_else(|| recipe.resolve(comm), Ok);
                let placed = resolved.and_then(|made| {
                    self.programs.place(comm, recipe, made, CopyOn::Call(raw_stream), false)
                });
                placed.map_err(|error| recipe.refused(error))?
            }
        };
        let kernel = match self.kernel_of(placed.variant) {
            Ok(kernel) => kernel,
            // The program's copy is on the stream already, so the call ends as one that began.
            Err(error) => return super::end(comm, call, Err(recipe.refused(error))),
        };
        let number = call_number(op, recipe, &call);
        let on = Launch { placed: &placed, kernel, number, operands, stream: raw_stream };
        let enqueued = self.enqueue(&mut call, on);
        // SAFETY: the operands fit the problem and are held until the stream is past the call. The
        // kernel or the collective that writes `y` is ahead on the stream.
        let enqueued = enqueued.and_then(|()| unsafe { self.normalise(on) });
        // SAFETY: the operands are held, and the kernel is ahead on the stream. Peers write this
        // half of the gather buffer again after this rank's next call, which comes behind the copy.
        let enqueued = enqueued.and_then(|()| unsafe { self.hand_out(call.memory(), on) });
        super::end(comm, call, enqueued)
    }

    /// Puts the norm of `y` on the stream, where the op has one.
    ///
    /// # Safety
    /// As [`RmsNorm::launch`] and [`Quantize::launch`].
    unsafe fn normalise(&self, on: Launch<'_>) -> Result<(), CallError> {
        let Some((kernel, norm)) = &self.norm else { return Ok(()) };
        let execution = &on.placed.execution;
        let (dtype, programmatic) = (execution.problem.numerics().output, execution.programmatic);
        let kernel = match kernel {
            NormKernel::Rounding(kernel) => kernel,
            NormKernel::Quantizing(kernel) => {
                let args = on.operands.of_norm(*norm).args(programmatic, on.stream);
                // SAFETY: the caller's promise.
                return unsafe { kernel.launch(dtype, &args) }.map_err(CallError::Launch);
            }
        };
        let [y, gain, y_norm] = [Operand::Y, Operand::Gain, Operand::YNorm]
            .map(|operand| on.operands.expect(operand, 0));
        let (rows, cols) = (y.layout.rows as u32, y.layout.cols as u32);
        let (gain, out) = (gain.address, matrix(y_norm));
        let args = RmsNormArgs {
            y: matrix(y),
            gain,
            out,
            rows,
            cols,
            eps: norm.eps.get(),
            programmatic,
            stream: on.stream,
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(dtype, &args) }.map_err(CallError::Launch)
    }

    /// Puts the copy of the gathered rows on the stream, where the caller wants them.
    ///
    /// # Safety
    /// As [`GatheredRows::launch`].
    unsafe fn hand_out(&self, memory: &WorkspaceView, on: Launch<'_>) -> Result<(), CallError> {
        let (Some(kernel), Some(out)) = (&self.gathered, on.operands.get(Operand::XFull, 0)) else {
            return Ok(());
        };
        let (plan, rank) = (&on.placed.execution, self.comm.rank());
        let (offset, flattened) = match &plan.traffic {
            Traffic::Collective(sequential) => (sequential.offset(), true),
            _ => (0, on.placed.program.program().rows.is_flattened()),
        };
        let args = GatheredRowsArgs {
            problem: &plan.problem,
            rank,
            x: matrix(on.operands.expect(Operand::X, 0)),
            buffer: memory.data[rank.index()] + offset,
            half_stride: memory.size.half_stride(),
            flattened,
            control: memory.control,
            out: matrix(out),
            programmatic: plan.programmatic,
            stream: on.stream,
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&args) }.map_err(CallError::Launch)
    }

    /// Puts the kernel of a call that has begun on its stream, and the call's traffic around it.
    fn enqueue(&self, call: &mut Call<'_>, on: Launch<'_>) -> Result<(), CallError> {
        let traffic = &on.placed.execution.traffic;
        let job = on.job();
        // SAFETY: the views borrow the rows, which are memory of this device. That they stay
        // untouched until the stream is past the call is the promise of the views' maker, or
        // cudarc's order with the views' end. The program was agreed on when the op was built.
        let started = unsafe { call.start(&job) }?;
        let args = self.args(&started, on);
        match traffic {
            Traffic::Collective(sequential) => {
                self.launch_sequential(call, sequential, &started.view, on, &args)
            }
            Traffic::Staged(route) => {
                let data = route.data(&started.view.data);
                let data = &data[..started.view.data.len()];
                // SAFETY: see `args`; the route's places are in the same workspace.
                unsafe { self.launch(on, &LaunchArgs { data, ..args }) }
            }
            _ => {
                // SAFETY: see `args`.
                unsafe { self.launch(on, &args) }
            }
        }?;
        // SAFETY: the rows stay as above, and it is the job that was started. What the kernel
        // stores it announces by its signals.
        Ok(unsafe { call.launched(&job) }?)
    }

    /// Launches the GEMM of a sequential call: the program of a world of one rank.
    fn launch_sequential(
        &self,
        call: &Call<'_>,
        sequential: &Sequential,
        memory: &WorkspaceView,
        on: Launch<'_>,
        own: &LaunchArgs<'_>,
    ) -> Result<(), CallError> {
        let (rank, problem) = (self.comm.rank(), &on.placed.execution.problem);
        let no_number = TransportError::MoverUnusable {
            why: "the host does not know which half of the workspace the call uses",
        };
        let all_rows = sequential.all_rows(memory, rank, call.epoch().ok_or(no_number)?);
        let gathers = sequential.kind == CollectiveKind::AllGather;
        let (data, pads) = ([memory.data[rank.index()]], [memory.pads[rank.index()]]);
        let mut operands = OperandList::new();
        let reads = |operand| sequential.reads(operand, rank);
        for (operand, weight, &rows) in own.operands.iter().filter(|&(of, ..)| reads(of)) {
            operands.set(operand, weight, rows);
        }
        operands.set(if gathers { Operand::X } else { Operand::Y }, 0, all_rows);
        if gathers && problem.rows_carry_scales() {
            let scales = Matrix { address: all_rows.address + u64::from(problem.k()), ..all_rows };
            operands.set(Operand::ScaleX, 0, scales);
        }
        let first = sequential.first_row(problem, rank);
        let args = LaunchArgs {
            operands,
            result_rows: ResultRows { first, ..own.result_rows },
            data: &data,
            pads: &pads,
            sequential: true,
            push: false,
            ..*own
        };
        // SAFETY: see `args`; the memory is that of this rank, and holds the rows of all ranks.
        unsafe { self.launch(on, &args) }
    }

    /// The arguments of a launch whose traffic was started.
    ///
    /// A launch with these is sound. The operands fit the problem and are held until the stream is
    /// past the call. The communicator's workspace covers the program, and stays until the device
    /// is drained. All ranks have agreed on the op.
    fn args<'a>(&'a self, started: &'a Started, on: Launch<'a>) -> LaunchArgs<'a> {
        let Launch { placed, operands, stream, .. } = on;
        let (plan, memory) = (&placed.execution, &started.view);
        LaunchArgs {
            operands: operands.list().map(|_, _, view| matrix(view)),
            result_rows: ResultRows {
                first: 0,
                count: operands.expect(Operand::Y, 0).layout.rows as u32,
            },
            gates: self.gates,
            activation: self.activation,
            data: &memory.data,
            pads: &memory.pads,
            scatter_buffer: memory.scattered.unwrap_or(memory.data[self.comm.rank().index()]),
            control: memory.control,
            fault: memory.fault,
            half_stride: memory.size.half_stride(),
            op_hash: if plan.compares_on_pads { on.number } else { 0 },
            sequential: false,
            deadline_ns: memory.deadline_ns,
            await_pushed: started.pushes,
            workers: plan.workers,
            push: plan.kernel_pushes
                || (matches!(plan.traffic, Traffic::PeerMemory) && !started.pushes),
            pace: plan.pace,
            trace: self.trace.as_ref().map(|trace| &trace.buffer),
            start: match (plan.programmatic, operands.constant_weights) {
                (false, _) => LaunchStart::Behind,
                (true, false) => LaunchStart::Early,
                (true, true) => LaunchStart::WithWeights,
            },
            stream,
        }
    }

    /// Launches the call's kernel.
    ///
    /// # Safety
    /// As [`launch`].
    unsafe fn launch(&self, on: Launch<'_>, args: &LaunchArgs<'_>) -> Result<(), CallError> {
        if let Some(trace) = &*self.trace {
            let mut last = trace.last.lock().unwrap_or_else(PoisonError::into_inner);
            if !last.as_ref().is_some_and(|last| Arc::ptr_eq(last, on.placed)) {
                trace.buffer.clear(args.stream).map_err(CallError::Launch)?;
                *last = Some(Arc::clone(on.placed));
            }
        }
        // SAFETY: the caller's promise.
        unsafe { launch(on.kernel, &on.placed.program, args) }.map_err(CallError::Launch)
    }

    pub(super) fn timeline(&self, stream: Stream<'_>) -> Result<Timeline, TimelineError> {
        let trace = self.trace.as_ref().ok_or(TimelineError::NotTraced)?;
        let stream = stream.raw().ok_or(TimelineError::WrongStream)?;
        let _current = self.device.enter()?;
        let last = trace
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or(TimelineError::NoCall)?;
        let stamps =
            trace.buffer.read(stream, last.program.item_count(), last.execution.workers)?;
        if stamps.workers.iter().any(|worker| worker.entered == 0) {
            return Err(TimelineError::NoCall);
        }
        let items = last
            .items
            .iter()
            .zip(stamps.items)
            .map(|(&item, times)| TimedItem { item, times })
            .collect();
        Ok(Timeline { rank: self.comm.rank(), items, workers: stamps.workers })
    }

    /// Asks the driver about memory whose location is only claimed.
    fn check_claim(&self, operand: &'static str, view: &View) -> Result<(), CallError> {
        if !view.claimed || view.layout.rows == 0 {
            return Ok(());
        }
        match flux_cuda::current::device_of(view.address) {
            Ok(Some(ordinal)) => {
                match (Location::Cuda(ordinal), Location::Cuda(self.device.ordinal())) {
                    (found, expected) if found == expected => Ok(()),
                    (found, expected) => Err(CallError::Location { operand, expected, found }),
                }
            }
            other => {
                let code = other.err().and_then(|error| error.code()).unwrap_or_default();
                Err(CallError::NotDeviceMemory { operand, address: view.address, code })
            }
        }
    }

    /// The kernel of programs of this variant, which was loaded when the op was built.
    fn kernel_of(&self, variant: Variant) -> Result<&Kernel, BuildError> {
        let found = self.kernels.iter().find(|(known, _)| *known == variant);
        found
            .map(|(_, kernel)| &**kernel)
            .ok_or(BuildError::NotLoaded { kernel: variant.to_string() })
    }

    pub(super) fn execution(&self, Resolved { execution, program, .. }: &Resolved) -> Execution {
        let kernel =
            Variant::of(program, self.target).ok().and_then(|variant| self.kernel_of(variant).ok());
        let name =
            kernel.map_or_else(|| "no kernel".to_owned(), |kernel| kernel.variant().to_string());
        execution.execution(format!("{name} on {}", self.device.info().name))
    }
}

/// What a call brings to its launch.
#[derive(Clone, Copy)]
struct Launch<'a> {
    placed: &'a Arc<PlacedProgram>,
    kernel: &'a Kernel,
    /// What ranks compare.
    number: u32,
    operands: &'a Operands<View>,
    stream: usize,
}

impl<'a> Launch<'a> {
    /// The call's traffic.
    fn job(&self) -> Job<'a> {
        let (plan, operands, op) = (&self.placed.execution, self.operands, self.number);
        let x = operands.expect(Operand::X, 0);
        let program = self.placed.program.program();
        match &plan.traffic {
            Traffic::PeerMemory if plan.kernel_pushes => Job::Nothing,
            Traffic::PeerMemory => Job::Rows(super::push_of(x, program)),
            Traffic::ScatteredToHost => Job::Scattered { op },
            Traffic::Staged(route) => {
                Job::Staged(StagedTransfer { x: x.address, row_stride: x.row_bytes(), route, op })
            }
            Traffic::Messages { rounds, peers } => {
                Job::Messages(super::rounds_of(x, program, op, rounds, *peers))
            }
            Traffic::Collective(sequential) => {
                let gathers = sequential.kind == CollectiveKind::AllGather;
                let shard = matrix(if gathers { x } else { operands.expect(Operand::Y, 0) });
                Job::Collective(sequential.collective(shard, op))
            }
        }
    }
}

pub(super) fn matrix(view: &View) -> Matrix {
    Matrix { address: view.address, row_bytes: view.row_bytes() }
}
