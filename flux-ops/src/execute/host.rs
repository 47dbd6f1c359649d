//! The CPU executor, on threads of this process.
//!
//! Invariant: a call returns when `y` is written, or with the fault that ended it.

use super::host_programs::{HostBuffers, HostPrograms};
use super::{Planned, Recipe, Resolved, label};
use crate::epilogue::EpilogueSpec;
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::tensor::{Location, View};
use flux_kernels::cpu::{
    CpuArgs, CpuWeight, Epilogue, HostMemory, Residual, Rows, RowsMut, rms_norm,
};
use flux_kernels::{Element, WeightLayout};
use flux_transport::{Communicator, HeldBytes, Job, Stream};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::Arc;
use std::time::Duration;

/// What the communicator's ops share.
#[derive(Debug)]
pub(crate) struct HostExecutor<T> {
    programs: Arc<HostPrograms<T>>,
    buffers: Arc<HostBuffers>,
    epilogue: EpilogueSpec,
    weights: WeightLayout,
}

impl<T: Element> HostExecutor<T> {
    pub(super) fn new(
        comm: &Communicator,
        largest: &[(Recipe, Resolved)],
        (epilogue, weights): (EpilogueSpec, WeightLayout),
    ) -> Result<Self, BuildError> {
        if largest.iter().any(|(recipe, _)| recipe.launch.trace) {
            return Err(BuildError::Trace { place: Location::Host });
        }
        let (programs, buffers) = (HostPrograms::of(comm), HostBuffers::of(comm));
        let mut shared = buffers.lock();
        for (recipe, resolved) in largest {
            programs.check(recipe, &resolved.program)?;
            shared.reserve(&resolved.program, resolved.execution.workers as usize)?;
        }
        comm.holds(
            "buffers of calls",
            HeldBytes { host: shared.bytes() as u64, ..HeldBytes::default() },
        );
        drop(shared);
        Ok(Self { programs, buffers, epilogue, weights })
    }

    pub(super) fn prepare(&self, comm: &Communicator, planned: &Planned) -> Result<(), CallError> {
        self.programs
            .get(comm, &planned.recipe, true)
            .map(drop)
            .map_err(|error| planned.refused(error))
    }

    pub(super) fn run(
        &self,
        comm: &Communicator,
        planned: &Planned,
        operands: &Operands,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let program = self
            .programs
            .get(comm, &planned.recipe, false)
            .map_err(|error| planned.refused(error))?;
        let mut call = comm.begin_as(stream, Some(label(&planned.recipe.problem)))?;
        let op_hash = planned.call_number(&call);
        let job = Job::Rows(super::push_of::<T>(&operands.x, program.program()));
        // SAFETY: the view borrows `x` for longer than the call, and it is host memory.
        let started = match unsafe { call.start(&job) } {
            Ok(started) => started,
            Err(error) => return super::end(comm, call, Err(error.into())),
        };
        let (memory, await_pushed) = (&started.view, started.pushes);
        let deadline = Duration::from_nanos(memory.deadline_ns);
        // SAFETY: the communicator owns this workspace while the call lives, and gives every rank
        // this layout. Only calls and their movers touch it, one call of a rank at a time. The
        // ranks agreed on their plans when the op was built.
        let memory = unsafe {
            HostMemory::new(
                &memory.data,
                &memory.pads,
                memory.control,
                memory.fault,
                memory.size,
                deadline,
            )
        };
        // SAFETY: the views borrow this memory for longer than the call, `y` alone; host memory was
        // checked for, and that `y` overlaps no other operand.
        let (x, w, y) = unsafe { (rows(&operands.x), rows(&operands.w), rows_mut(&operands.y)) };
        // SAFETY: as `y`.
        let gathered = operands.x_full.as_ref().map(|view| unsafe { rows_mut(view) });
        // SAFETY: as `x` and `w`.
        let bias = operands.bias.as_ref().map(|bias| unsafe { rows(bias) }.elements);
        let residual = operands.residual.as_ref().map(|residual| {
            if operands.residual_is_y() {
                return Residual::InY;
            }
            // SAFETY: as `x` and `w`; `y` does not overlap it.
            Residual::Rows(unsafe { rows(residual) })
        });
        let more = operands.more.each_ref().map(|more| {
            // SAFETY: as `w`, the bias and `y`.
            more.as_ref().map(|more| unsafe {
                CpuWeight {
                    w: rows(&more.w),
                    y: rows_mut(&more.y),
                    bias: more.bias.as_ref().map(|bias| rows(bias).elements),
                }
            })
        });
        let EpilogueSpec { activation, gates, .. } = self.epilogue;
        let epilogue = Epilogue { bias, residual, activation, gates };
        let done = program.run(
            &mut self.buffers.lock(),
            CpuArgs {
                x,
                w,
                weights: self.weights,
                y,
                more,
                gathered,
                epilogue,
                memory,
                await_pushed,
                op_hash,
            },
        );
        let finished = call.finish();
        if let Err(error) = done {
            let failed = failure_of(comm, CallError::Execute(error));
            if matches!(failed, CallError::Execute(_)) {
                // No fault of a peer, who may have this rank's rows and wait for its results.
                comm.abort(super::LAUNCH_REFUSED);
            }
            return Err(failed);
        }
        finished.map_err(|error| failure_of(comm, error.into()))?;
        self.normalise(operands);
        Ok(())
    }

    /// Writes the normalised rows of `y`, where the op has a norm.
    fn normalise(&self, operands: &Operands) {
        let (Some(eps), Some(norm)) = (self.epilogue.rms_norm, &operands.norm) else { return };
        // SAFETY: as in `run`: `y` is written, and `y_norm` overlaps no other operand.
        let (y, gain, y_norm) =
            unsafe { (rows::<T>(&operands.y), rows(&norm.gain), rows_mut(&norm.y_norm)) };
        rms_norm(y, gain.elements, eps.get(), operands.y.layout.rows, y_norm);
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
    if view.layout.span() == 0 {
        return Rows { elements: &[], stride: view.layout.row_stride };
    }
    let memory = with_exposed_provenance::<T>(first(view));
    // SAFETY: as promised, for all of the layout's span, which the view's memory was checked to
    // hold; aligned, since to 16 bytes.
    let elements = unsafe { std::slice::from_raw_parts(memory, view.layout.span()) };
    Rows { elements, stride: view.layout.row_stride }
}

/// # Safety
/// The view is of host memory that nothing else accesses for `'a`.
unsafe fn rows_mut<'a, T>(view: &View) -> RowsMut<'a, T> {
    if view.layout.span() == 0 {
        return RowsMut { elements: &mut [], stride: view.layout.row_stride };
    }
    let memory = with_exposed_provenance_mut::<T>(first(view));
    // SAFETY: as in `rows`.
    let elements = unsafe { std::slice::from_raw_parts_mut(memory, view.layout.span()) };
    RowsMut { elements, stride: view.layout.row_stride }
}
