//! The CPU executor, on threads of this process.
//!
//! Invariant: a call returns when `y` is written, or with the fault that ended it.

use super::host_programs::{HostBuffers, HostPrograms};
use super::{Recipe, Resolved, call_number, labelled};
use crate::error::{BuildError, CallError};
use crate::operands::Operands;
use crate::spec::{EpilogueSpec, OpSpec};
use crate::tensor::View;
use crate::timeline::{TimedItem, Timeline, TimelineError};
use flux_core::Scales;
use flux_core::problem::WeightList;
use flux_kernels::cpu::{CpuArgs, CpuWeight, Epilogue, HostMemory, Input, Rows, RowsMut, rms_norm};
use flux_kernels::{Element, Operand, Stamps, WeightLayout, with_elements};
use flux_transport::{Communicator, HeldBytes, Job, Label, Stream};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What the communicator's ops share.
#[derive(Debug)]
pub(crate) struct HostExecutor {
    programs: Arc<HostPrograms>,
    buffers: Arc<HostBuffers>,
    epilogue: EpilogueSpec,
    weights: WeightLayout,
    label: Label,
    /// The last call's time line, of an op that is traced.
    trace: Option<Mutex<Option<Timeline>>>,
}

impl HostExecutor {
    pub(super) fn new(
        comm: &Communicator,
        largest: &[(Recipe, Resolved)],
        spec: &OpSpec,
    ) -> Result<Self, BuildError> {
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
        let (epilogue, weights, label) = (spec.epilogue, spec.weights, spec.label());
        let traced = largest.iter().any(|(recipe, _)| recipe.launch.trace);
        let trace = traced.then(Mutex::default);
        Ok(Self { programs, buffers, epilogue, weights, label, trace })
    }

    pub(super) fn timeline(&self) -> Result<Timeline, TimelineError> {
        let last = self.trace.as_ref().ok_or(TimelineError::NotTraced)?;
        last.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(TimelineError::NoCall)
    }

    pub(super) fn prepare(&self, comm: &Communicator, recipe: &Recipe) -> Result<(), CallError> {
        self.programs.get(comm, recipe, true).map(drop).map_err(|error| recipe.refused(error))
    }

    pub(super) fn run(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        op: u32,
        operands: &Operands<View>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let numerics = recipe.problem.numerics();
        with_elements!(numerics, X, Y, self.run_as::<X, Y>(comm, recipe, op, operands, stream))
    }

    fn run_as<X: Element, Y: Element>(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        op: u32,
        operands: &Operands<View>,
        stream: Stream<'_>,
    ) -> Result<(), CallError> {
        let program =
            self.programs.get(comm, recipe, false).map_err(|error| recipe.refused(error))?;
        let mut call = comm.begin_as(stream, Some(labelled(self.label, &recipe.problem)))?;
        let op_hash = call_number(op, recipe, &call);
        let job = Job::Rows(super::push_of(operands.expect(Operand::X, 0), program.program()));
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
        // SAFETY: the view borrows `x` for longer than the call, and it is host memory, as was
        // checked.
        let x = unsafe { rows::<X>(operands.expect(Operand::X, 0)) };
        // SAFETY: as of `x`.
        let scale_of =
            |operand, weight| operands.get(operand, weight).map(|view| unsafe { rows(view) });
        let scale = scale_of(Operand::ScaleX, 0);
        // SAFETY: the view borrows this host memory alone for longer than the call, and it overlaps
        // no other operand, as was checked.
        let gathered = operands.get(Operand::XFull, 0).map(|view| unsafe { rows_mut(view) });
        let mut weights = WeightList::new();
        for weight in 0..operands.weight_count() {
            let view = |operand| operands.expect(operand, weight);
            // SAFETY: the views borrow host memory for longer than the call, `y` alone. It overlaps
            // no other operand but a residual, which is not read through a view of its own.
            let (w, y) = unsafe { (rows(view(Operand::W)), rows_mut(view(Operand::Y))) };
            let one = CpuWeight { w, scale: scale_of(Operand::ScaleW, weight), y };
            // There is room for as many.
            let _ = weights.push(one);
        }
        let EpilogueSpec { operands: added, activation, gates, .. } = self.epilogue;
        let mut epilogue = Epilogue::<Y> { activation, gates, ..Epilogue::default() };
        for (operand, weight, view) in operands.list().iter().filter(|&(of, ..)| added.has(of)) {
            let input = if operand == Operand::Residual && operands.residual_is_y() {
                Input::InY
            } else {
                // SAFETY: the view borrows host memory for longer than the call, and no output
                // overlaps it, as was checked.
                Input::Rows(unsafe { rows(view) })
            };
            epilogue.operands.set(operand, weight, input);
        }
        let layout = self.weights;
        let mut recorded = self.trace.as_ref().map(|_| Stamps::default());
        let stamps = recorded.as_mut();
        let args = CpuArgs {
            x,
            scale,
            weights,
            layout,
            gathered,
            epilogue,
            memory,
            await_pushed,
            op_hash,
            stamps,
        };
        let done = program.run(&mut self.buffers.lock(), args);
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
        if let Some((trace, Stamps { items, workers })) = self.trace.as_ref().zip(recorded) {
            let items = program.program().items.iter().zip(items);
            let items = items.map(|(&item, times)| TimedItem { item, times }).collect();
            *trace.lock().unwrap_or_else(PoisonError::into_inner) =
                Some(Timeline { rank: comm.rank(), items, workers });
        }
        self.normalise::<Y>(operands);
        Ok(())
    }

    /// Writes the normalised rows of `y`, where the op has a norm.
    fn normalise<T: Element>(&self, operands: &Operands<View>) {
        let Some(norm) = self.epilogue.rms_norm else { return };
        if norm.scales != Scales::None {
            // SAFETY: the operands were checked, `y` is written, and outputs overlap no other.
            return unsafe { operands.of_norm(norm).write_on_host::<T>() };
        }
        let [y, gain, y_norm] =
            [Operand::Y, Operand::Gain, Operand::YNorm].map(|operand| operands.expect(operand, 0));
        // SAFETY: as in `run`: `y` is written, and `y_norm` overlaps no other operand.
        let (of_y, gain, y_norm) = unsafe { (rows::<T>(y), rows(gain), rows_mut(y_norm)) };
        rms_norm(of_y, gain.elements, norm.eps.get(), y.layout.rows, y_norm);
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
pub(super) unsafe fn rows<'a, T>(view: &View) -> Rows<'a, T> {
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
pub(super) unsafe fn rows_mut<'a, T>(view: &View) -> RowsMut<'a, T> {
    if view.layout.span() == 0 {
        return RowsMut { elements: &mut [], stride: view.layout.row_stride };
    }
    let memory = with_exposed_provenance_mut::<T>(first(view));
    // SAFETY: as in `rows`.
    let elements = unsafe { std::slice::from_raw_parts_mut(memory, view.layout.span()) };
    RowsMut { elements, stride: view.layout.row_stride }
}
