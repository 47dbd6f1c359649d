//! The CPU executor, on threads of this process.
//!
//! Invariant: a call returns when `y` is written, or with the fault that ended it.

use super::label;
use super::plan::{Execution, ExecutionPlan};
use crate::error::{BuildError, CallError};
use crate::op::Operands;
use crate::tensor::{Location, View};
use flux_core::program::TileProgram;
use flux_kernels::cpu::{CpuArgs, Epilogue, Executor, HostMemory, Rows, RowsMut};
use flux_kernels::{Activation, Element};
use flux_transport::{Communicator, Stream};
use std::num::NonZeroUsize;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A program with the buffers that walking it takes.
#[derive(Debug)]
pub(crate) struct HostExecutor<T> {
    plan: ExecutionPlan,
    activation: Activation,
    executor: Mutex<Executor<T>>,
}

impl<T: Element> HostExecutor<T> {
    pub(super) fn prepare((plan, program): (ExecutionPlan, TileProgram), activation: Activation) -> Result<Self, BuildError> {
        if plan.trace {
            return Err(BuildError::Trace { place: Location::Host });
        }
        let workers = NonZeroUsize::new(plan.workers as usize).unwrap_or(NonZeroUsize::MIN);
        let executor = Mutex::new(Executor::new(program, workers)?);
        Ok(Self { plan, activation, executor })
    }

    pub(super) fn run(&self, comm: &Communicator, operands: &Operands, stream: Stream) -> Result<(), CallError> {
        // A panic in an earlier call leaves buffers that the next one fills before it reads them.
        let mut executor = self.executor.lock().unwrap_or_else(PoisonError::into_inner);
        let mut call = comm.begin_as(stream, Some(label(&executor.program().problem)))?;
        let program = executor.program();
        // SAFETY: the view borrows `x` for longer than the call, and it is host memory.
        if let Err(error) = unsafe { call.push(&super::push_of::<T>(&operands.x, program)) } {
            return super::end(comm, call, Err(error.into()));
        }
        let await_pushed = call.pushes();
        let memory = call.hand_over();
        let deadline = Duration::from_nanos(memory.deadline_ns);
        // SAFETY: the communicator owns this workspace while the call lives, and gives every rank
        // this layout. Only calls and their movers touch it, one call of a rank at a time. The ranks
        // agreed on their programs when the op was built.
        let memory = unsafe { HostMemory::new(&memory.data, &memory.pads, memory.control, memory.fault, memory.size, deadline) };
        // SAFETY: the views borrow this memory for longer than the call, `y` alone; host memory was
        // checked for, and that `y` overlaps neither.
        let (x, w, y) = unsafe { (rows(&operands.x), rows(&operands.w), rows_mut(&operands.y)) };
        // SAFETY: as `x` and `w`.
        let bias = operands.bias.as_ref().map(|bias| unsafe { rows(bias) }.elements);
        let epilogue = Epilogue { bias, activation: self.activation };
        let done = executor.run(CpuArgs { x, w, y, epilogue, memory, await_pushed, op_hash: self.plan.number });
        let finished = call.finish();
        match done {
            Ok(()) => finished.map_err(|error| failure_of(comm, error.into())),
            Err(error) => Err(failure_of(comm, CallError::Execute(error))),
        }
    }

    pub(super) fn execution(&self) -> Execution {
        self.plan.execution("CPU executor".to_owned())
    }
}

/// Why the communicator is broken after a failed call; the call's own error where it is not.
fn failure_of(comm: &Communicator, error: CallError) -> CallError {
    comm.failure().map_or(error, |failure| CallError::Fault(Box::new(failure.clone())))
}

fn first(view: &View) -> usize {
    // An address that a pointer of this process was exposed as.
    usize::try_from(view.address).unwrap_or_default()
}

/// # Safety
/// The view is of host memory that is readable, and not written, for `'a`.
unsafe fn rows<'a, T>(view: &View) -> Rows<'a, T> {
    let memory = with_exposed_provenance::<T>(first(view));
    // SAFETY: as promised, for all of the layout's span, which the view's memory was checked to
    // hold; aligned, since to 16 bytes.
    Rows { elements: unsafe { std::slice::from_raw_parts(memory, view.layout.span()) }, stride: view.layout.row_stride }
}

/// # Safety
/// The view is of host memory that nothing else accesses for `'a`.
unsafe fn rows_mut<'a, T>(view: &View) -> RowsMut<'a, T> {
    let memory = with_exposed_provenance_mut::<T>(first(view));
    // SAFETY: as in `rows`.
    RowsMut { elements: unsafe { std::slice::from_raw_parts_mut(memory, view.layout.span()) }, stride: view.layout.row_stride }
}
