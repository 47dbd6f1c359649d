//! The fused kernel, on the communicator's CUDA device.
//!
//! Invariant: a call only enqueues: it allocates no device memory and waits for nothing, so it may
//! be captured in a graph once its program is on the device.

use super::device_programs::{CopyOn, DevicePrograms, PlacedProgram};
use super::kernels;
use super::plan::{Execution, Traffic};
use super::ranges::NoRoom;
use super::sequential::Sequential;
use super::{Planned, Recipe, Resolved, label, no_room};
use crate::epilogue::{EpilogueSpec, Epsilon};
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::tensor::{Location, View};
use crate::timeline::{TimedItem, Timeline, TimelineError};
use flux_cuda::{CudaDevice, is_capturing};
use flux_kernels::cuda::{
    DeviceProgram, EpilogueStaging, GatheredRows, GatheredRowsArgs, Kernel, LaunchArgs, Matrix,
    Residual, RmsNorm, RmsNormArgs, TraceBuffer, WeightArgs, launch,
};
use flux_kernels::{Activation, Element, GateLayout, KernelTarget, Variant, WeightLayout};
use flux_transport::{
    Call, CollectiveKind, Communicator, Source, StagedTransfer, Stream, TransportError,
    WorkspaceView,
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
    norm: Option<(Arc<RmsNorm>, Epsilon)>,
    /// Of an AllGather-GEMM.
    gathered: Option<Arc<GatheredRows>>,
    programs: Arc<DevicePrograms>,
    // Freed only where the device can be waited for.
    trace: ManuallyDrop<Option<Trace>>,
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
        (epilogue, weights): (EpilogueSpec, WeightLayout),
    ) -> Result<Self, BuildError> {
        let device = CudaDevice::open(ordinal)?;
        let target = KernelTarget::of(device.info().compute)?;
        let _current = device.enter()?;
        let programs = DevicePrograms::of(comm);
        let mut wanted: Vec<(Variant, Variant)> = Vec::new();
        for (recipe, Resolved { program, .. }) in largest {
            let (bytes, limit) = (DeviceProgram::bytes_of(program) as u64, programs.limit());
            if bytes > limit {
                return Err(no_room(recipe, NoRoom { bytes, limit, pinned: 0 }));
            }
            let of_program = Variant::of(program, target)?;
            if wanted.iter().all(|&(known, _)| known != of_program) {
                let variant = of_program.with_gates(epilogue.gates.is_some()).with_weights(weights);
                wanted.push((of_program, variant));
            }
        }
        let (of_programs, variants): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let loaded = kernels::variants(&variants, target.arch, comm)?;
        let kernels: Vec<_> = of_programs.into_iter().zip(loaded).collect();
        let norm = epilogue
            .rms_norm
            .map(|eps| Ok::<_, BuildError>((kernels::rms_norm(target.arch)?, eps)))
            .transpose()?;
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
            norm,
            gathered,
            programs,
            trace,
        })
    }

    pub(super) fn prepare(&self, comm: &Communicator, planned: &Planned) -> Result<(), CallError> {
        let _current = self.device.enter().map_err(TransportError::from)?;
        let prepared = comm.in_turn(|| {
            if self.programs.take(&planned.recipe, true).is_some() {
                return Ok(());
            }
            let resolved = planned.recipe.resolve(comm)?;
            self.programs.place(comm, &planned.recipe, resolved, (CopyOn::Aside, true)).map(drop)
        })?;
        prepared.map_err(|error| planned.refused(error))
    }

    pub(super) fn run<T: Element>(
        &self,
        comm: &Communicator,
        planned: &Planned,
        operands: &Operands,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let wrong_stream =
            || TransportError::WrongStream { stream: stream.raw(), device: comm.device() };
        let raw_stream = stream.raw().ok_or_else(wrong_stream)?;
        let _current = self.device.enter().map_err(TransportError::from)?;
        for (operand, view) in operands.named() {
            self.check_claim(operand, view)?;
        }
        let recipe = &planned.recipe;
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
            Some(recipe.resolve(comm).map_err(|error| planned.refused(error))?)
        };
        let mut call = comm.begin_as(stream, Some(label(&recipe.problem)))?;
        let placed = match self.programs.take(recipe, call.capturing()) {
            Some(placed) => placed,
            // Another thread's call has evicted it meanwhile.
            None if call.capturing() => return Err(not_prepared()),
            None => {
                let resolved = resolved.map_or_else(|| recipe.resolve(comm), Ok);
                let placed = resolved.and_then(|made| {
                    self.programs.place(comm, recipe, made, (CopyOn::Call(raw_stream), false))
                });
                placed.map_err(|error| planned.refused(error))?
            }
        };
        let kernel = match self.kernel_of(placed.variant) {
            Ok(kernel) => kernel,
            // The program's copy is on the stream already, so the call ends as one that began.
            Err(error) => return super::end(comm, call, Err(planned.refused(error))),
        };
        let number = planned.call_number(&call);
        let none = WeightArgs { w: matrix::<T>(&operands.w), y: matrix::<T>(&operands.y), bias: 0 };
        let more = operands.more.map(|more| {
            more.map_or(none, |more| WeightArgs {
                w: matrix::<T>(&more.w),
                y: matrix::<T>(&more.y),
                bias: more.bias.map_or(0, |bias| bias.address),
            })
        });
        let more = &more[..recipe.problem.weight_count() - 1];
        let on = Launching { placed: &placed, kernel, number, operands, more, stream: raw_stream };
        let enqueued = match &placed.execution.traffic {
            Traffic::Collective(sequential) => {
                self.enqueue_sequential::<T>(&mut call, sequential, on)
            }
            _ => self.enqueue::<T>(&mut call, on),
        };
        // SAFETY: the operands fit the problem and are held until the stream is past the call. The
        // kernel or the collective that writes `y` is ahead on the stream.
        let enqueued = enqueued.and_then(|()| unsafe { self.normalise::<T>(operands, raw_stream) });
        // SAFETY: as above. Peers write this half of the gather buffer again after this rank's next
        // call, which comes behind the copy.
        let enqueued = enqueued.and_then(|()| unsafe { self.hand_out::<T>(call.memory(), on) });
        super::end(comm, call, enqueued)
    }

    /// Puts the norm of `y` on the stream, where the op has one.
    ///
    /// # Safety
    /// As [`RmsNorm::launch`].
    unsafe fn normalise<T: Element>(
        &self,
        operands: &Operands,
        stream: usize,
    ) -> Result<(), CallError> {
        let (Some((kernel, eps)), Some(norm)) = (&self.norm, &operands.norm) else { return Ok(()) };
        let (rows, cols) = (operands.y.layout.rows as u32, operands.y.layout.cols as u32);
        let (y, out) = (matrix::<T>(&operands.y), matrix::<T>(&norm.y_norm));
        let args =
            RmsNormArgs { y, gain: norm.gain.address, out, rows, cols, eps: eps.get(), stream };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch::<T>(&args) }.map_err(CallError::Launch)
    }

    /// Puts the copy of the gathered rows on the stream, where the caller wants them.
    ///
    /// # Safety
    /// As [`GatheredRows::launch`].
    unsafe fn hand_out<T: Element>(
        &self,
        memory: &WorkspaceView,
        on: Launching<'_>,
    ) -> Result<(), CallError> {
        let (Some(kernel), Some(out)) = (&self.gathered, &on.operands.x_full) else {
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
            x: matrix::<T>(&on.operands.x),
            buffer: memory.data[rank.index()] + offset,
            half_stride: memory.size.half_stride(),
            flattened,
            control: memory.control,
            out: matrix::<T>(out),
            stream: on.stream,
        };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&args) }.map_err(CallError::Launch)
    }

    /// Puts the kernel of a call that has begun on its stream, and beside it what moves its data.
    fn enqueue<T: Element>(&self, call: &mut Call<'_>, on: Launching<'_>) -> Result<(), CallError> {
        let (plan, program, x) =
            (&on.placed.execution, on.placed.program.program(), &on.operands.x);
        let mut kernel_pushes = plan.kernel_pushes;
        let exchange = match &plan.traffic {
            Traffic::Messages { rounds, peers } => {
                Some(super::rounds_of::<T>(x, (program, on.number), rounds, *peers))
            }
            _ => None,
        };
        match &plan.traffic {
            Traffic::PeerMemory if !kernel_pushes && call.copy_engine_usable() => {
                // SAFETY: the view borrows `x`, which is memory of this device. That it stays
                // untouched until the stream is past the call is the promise of the view's maker,
                // or cudarc's order with the view's end.
                unsafe { call.push(&super::push_of::<T>(x, program)) }?;
            }
            Traffic::PeerMemory => kernel_pushes = true,
            Traffic::ScatteredToHost => call.scatter(on.number)?,
            Traffic::Staged(_) | Traffic::Messages { .. } | Traffic::Collective(_) => {}
        }
        if let Some(exchange) = &exchange {
            // SAFETY: as above; the program was agreed on when the op was built, and what the
            // kernel stores it announces by its signals.
            unsafe { call.send_rounds(exchange) }?;
        }
        let (await_pushed, hash) = (call.pushes(), call.sequence_hash());
        call.hand_over();
        let memory = call.memory();
        let staged = match &plan.traffic {
            Traffic::Staged(route) => Some((route, route.data(&memory.data))),
            _ => None,
        };
        let args = LaunchArgs {
            data: staged.as_ref().map_or(&memory.data, |(_, data)| &data[..memory.data.len()]),
            scatter_buffer: memory.scattered.unwrap_or(memory.data[program.rank.index()]),
            op_hash: hash.unwrap_or(if plan.compares_on_pads { on.number } else { 0 }),
            await_pushed,
            push: kernel_pushes,
            ..self.args::<T>(call, on)
        };
        // SAFETY: see `args`.
        unsafe { self.launch(on, &args) }?;
        if let Some(exchange) = exchange.filter(|exchange| {
            matches!(exchange.source, Source::Stored { .. }) && !exchange.rounds.is_empty()
        }) {
            // SAFETY: as above, of the same exchange.
            return Ok(unsafe { call.send_stored_rounds(&exchange) }?);
        }
        if let Some((route, _)) = staged {
            let carry = StagedTransfer {
                x: x.address,
                row_stride: x.row_bytes::<T>(),
                route,
                op: on.number,
            };
            // After the launch: enqueuing takes its time, and the kernel has the own shard to begin
            // with.
            // SAFETY: as for the push above.
            return Ok(unsafe { call.stage(&carry) }?);
        }
        Ok(())
    }

    /// Puts the collective of a call that has begun on its stream before the kernel, or behind it.
    fn enqueue_sequential<T: Element>(
        &self,
        call: &mut Call<'_>,
        sequential: &Sequential,
        on: Launching<'_>,
    ) -> Result<(), CallError> {
        let (rank, operands) = (self.comm.rank(), on.operands);
        let no_number = TransportError::MoverUnusable {
            why: "the host does not know which half of the workspace the call uses",
        };
        let all_rows = sequential.all_rows(call.memory(), rank, call.epoch().ok_or(no_number)?);
        let gathers = sequential.kind == CollectiveKind::AllGather;
        let shard = matrix::<T>(if gathers { &operands.x } else { &operands.y });
        let collective = sequential.collective(shard, on.number);
        if gathers {
            // SAFETY: the views borrow the shard, as in `enqueue`; the plan was agreed on when the
            // op was built.
            unsafe { call.collective(&collective) }?;
        }
        call.hand_over();
        let memory = call.memory();
        let (data, pads) = ([memory.data[rank.index()]], [memory.pads[rank.index()]]);
        let own = self.args::<T>(call, on);
        let args = LaunchArgs {
            x: if gathers { all_rows } else { own.x },
            y: if gathers { own.y } else { all_rows },
            bias: if sequential.adds_bias(rank) { own.bias } else { 0 },
            residual: own.residual.and_then(|residual| {
                sequential.residual(residual, self.comm.rank(), &on.placed.execution.problem)
            }),
            data: &data,
            pads: &pads,
            scatter_buffer: data[0],
            after_collective: true,
            ..own
        };
        // SAFETY: see `args`; the program is that of a world of one rank, whose memory these are,
        // and the workspace holds the rows of all ranks.
        unsafe { self.launch(on, &args) }?;
        if !gathers {
            // SAFETY: as above.
            unsafe { call.collective(&collective) }?;
        }
        Ok(())
    }

    /// The arguments of a launch in which ranks do not meet: no pushes, nothing to compare.
    ///
    /// A launch with these is sound. The operands fit the problem and are held until the stream is
    /// past the call. The communicator's workspace covers the program, and stays until the device
    /// is drained. All ranks have agreed on the op.
    fn args<'a, T: Element>(&'a self, call: &'a Call<'_>, on: Launching<'a>) -> LaunchArgs<'a> {
        let Launching { placed, operands, more, stream, .. } = on;
        let memory = call.memory();
        LaunchArgs {
            x: matrix::<T>(&operands.x),
            w: matrix::<T>(&operands.w),
            y: matrix::<T>(&operands.y),
            more,
            gates: self.gates,
            activation: self.activation,
            bias: operands.bias.map_or(0, |bias| bias.address),
            residual: operands.residual.map(|view| Residual {
                matrix: matrix::<T>(&view),
                first: 0,
                rows: view.layout.rows as u32,
            }),
            data: &memory.data,
            pads: &memory.pads,
            scatter_buffer: 0,
            control: memory.control,
            fault: memory.fault,
            half_stride: memory.size.half_stride(),
            op_hash: 0,
            after_collective: false,
            deadline_ns: memory.deadline_ns,
            await_pushed: false,
            workers: placed.execution.workers,
            push: false,
            pace: placed.execution.pace,
            trace: self.trace.as_ref().map(|trace| &trace.buffer),
            stream,
        }
    }

    /// Launches the call's kernel.
    ///
    /// # Safety
    /// As [`launch`].
    unsafe fn launch(&self, on: Launching<'_>, args: &LaunchArgs<'_>) -> Result<(), CallError> {
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
            trace.buffer.read(stream, (last.program.item_count(), last.execution.workers))?;
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
struct Launching<'a> {
    placed: &'a Arc<PlacedProgram>,
    kernel: &'a Kernel,
    /// What ranks compare.
    number: u32,
    operands: &'a Operands,
    /// The further weights.
    more: &'a [WeightArgs],
    stream: usize,
}

fn matrix<T: Element>(view: &View) -> Matrix {
    Matrix { address: view.address, row_bytes: view.row_bytes::<T>() }
}
