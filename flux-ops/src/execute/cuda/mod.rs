//! The fused kernel, on the communicator's CUDA device.
//!
//! Invariant: an op's kernels are loaded when it is built, so that its calls compile nothing.

mod call;

pub(super) use call::matrix;

use super::device_programs::{CopyOn, DevicePrograms, PlacedProgram};
use super::plan::Execution;
use super::ranges::NoRoom;
use super::{Recipe, Resolved, kernels, no_room};
use crate::error::{BuildError, CallError};
use crate::spec::{NormSpec, OpSpec};
use crate::timeline::{TimedItem, Timeline, TimelineError};
use flux_core::Scales;
use flux_cuda::{CudaDevice, DeviceInfo};
use flux_kernels::cuda::{
    DeviceProgram, EpilogueStaging, GatheredRows, Kernel, Quantize, RmsNorm, TraceBuffer,
};
use flux_kernels::nvrtc::Arch;
use flux_kernels::{Activation, GateLayout, KernelTarget, Variant};
use flux_transport::{Communicator, Label, Stream, TransportError};
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
