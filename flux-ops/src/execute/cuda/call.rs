//! A call on the stream: its traffic, its kernel, and what follows.
//!
//! Invariant: a call only enqueues: it allocates no device memory and waits for nothing, so it may
//! be captured in a graph once its program is on the device.

use super::{CudaExecutor, NormKernel};
use crate::error::CallError;
use crate::execute::device_programs::{CopyOn, PlacedProgram};
use crate::execute::plan::Traffic;
use crate::execute::sequential::Sequential;
use crate::execute::{self, Recipe, call_number, labelled};
use crate::operands::Operands;
use crate::tensor::{Location, View};
use flux_cuda::is_capturing;
use flux_kernels::cuda::{
    GatheredRowsArgs, Kernel, LaunchArgs, LaunchStart, Matrix, ResultRows, RmsNormArgs, launch,
};
use flux_kernels::{Operand, OperandList};
use flux_transport::{
    Call, CollectiveKind, Communicator, Job, StagedTransfer, Started, Stream, TransportError,
    WorkspaceView,
};
use std::sync::{Arc, PoisonError};

impl CudaExecutor {
    /// Enqueues one call on a stream.
    pub(crate) fn run(
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
            Err(error) => return execute::end(comm, call, Err(recipe.refused(error))),
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
        execute::end(comm, call, enqueued)
    }

    /// Puts the norm of `y` on the stream, where the op has one.
    ///
    /// # Safety
    /// As [`RmsNorm::launch`](flux_kernels::cuda::RmsNorm::launch) and `Quantize::launch`.
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
    /// As [`GatheredRows::launch`](flux_kernels::cuda::GatheredRows::launch).
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
            Traffic::PeerMemory => Job::Rows(execute::push_of(x, program)),
            Traffic::ScatteredToHost => Job::Scattered { op },
            Traffic::Staged(route) => {
                Job::Staged(StagedTransfer { x: x.address, row_stride: x.row_bytes(), route, op })
            }
            Traffic::Messages { rounds, peers } => {
                Job::Messages(execute::rounds_of(x, program, op, rounds, *peers))
            }
            Traffic::Collective(sequential) => {
                let gathers = sequential.kind == CollectiveKind::AllGather;
                let shard = matrix(if gathers { x } else { operands.expect(Operand::Y, 0) });
                Job::Collective(sequential.collective(shard, op))
            }
        }
    }
}

pub(crate) fn matrix(view: &View) -> Matrix {
    Matrix { address: view.address, row_bytes: view.row_bytes() }
}
