//! The fused kernel, on the communicator's CUDA device.
//!
//! Invariant: a call only enqueues: it allocates nothing and waits for nothing, so it may be captured in a graph.

use super::Hands;
use crate::error::{BuildError, CallError};
use crate::fused::Operands;
use crate::tensor::{Location, View};
use cudarc::driver::sys;
use flux_core::layout::gather_place_bytes;
use flux_core::program::{Schedule, TileProgram};
use flux_kernels::Variant;
use flux_kernels::cache::{self, Origin};
use flux_kernels::cuda::{DeviceProgram, Kernel, LaunchArgs, Matrix, launch};
use flux_kernels::nvrtc::Arch;
use flux_transport::cuda::CudaDevice;
use flux_transport::{Communicator, Stream, TransportError};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// CTAs that push the shard where copy engines cannot: 8 move 261 GB/s of the 339 that 128 do, 16 move 294 (hardware.md, links).
const MOVERS: u32 = 8;

/// The compute capability that the kernels are compiled for.
const COMPUTE: (u32, u32) = (9, 0);

/// Why peers' waits end when this rank could not launch its part of a call: the reason of an abort.
const LAUNCH_REFUSED: u32 = 0x464c_0001;

/// Kernels in use, by device: a model's many ops of one shape load one.
static KERNELS: Mutex<Vec<(u32, Weak<Kernel>)>> = Mutex::new(Vec::new());

/// A kernel with a program on the device.
#[derive(Debug)]
pub(crate) struct CudaExecutor {
    device: CudaDevice,
    kernel: Arc<Kernel>,
    program: DeviceProgram,
    hands: Hands,
}

impl CudaExecutor {
    pub(super) fn prepare(ordinal: u32, program: TileProgram, schedule: &Schedule, hands: Hands) -> Result<Self, BuildError> {
        let device = CudaDevice::open(ordinal)?;
        let compute = device.info().compute;
        if compute != COMPUTE {
            return Err(BuildError::Compute { found: compute, needed: COMPUTE });
        }
        let _current = device.enter()?;
        let variant = Variant::of(program.problem.op(), program.problem.dtype(), schedule)?;
        let kernel = kernel(ordinal, variant)?;
        let sms = kernel.multiprocessors();
        for (name, wanted, max) in [("workers", hands.workers, sms), ("movers", hands.movers, sms - 1)] {
            if let Some(value) = wanted.filter(|value| !(1..=max).contains(value)) {
                return Err(BuildError::Workers { name, value, max, place: Location::Cuda(ordinal) });
            }
        }
        Ok(Self { kernel, program: DeviceProgram::upload(program)?, hands, device })
    }

    pub(super) fn run<T>(&self, comm: &Communicator, operands: &Operands, stream: Stream) -> Result<(), CallError> {
        let wrong_stream = || TransportError::WrongStream { stream, device: comm.device() };
        let raw_stream = stream.raw().ok_or_else(wrong_stream)?;
        let _current = self.device.enter().map_err(TransportError::from)?;
        for (operand, view) in operands.named() {
            self.check_claim(operand, view)?;
        }
        let program = self.program.program();
        let mut call = comm.begin(stream)?;
        let by_kernel = self.hands.movers.is_some() || !call.copy_engine_usable();
        let movers = if program.transfers.is_empty() || !by_kernel { 0 } else { self.hands.movers.unwrap_or(MOVERS) };
        if !by_kernel {
            let place = gather_place_bytes(&program.problem);
            let x = &operands.x;
            // SAFETY: the view borrows `x`, which is memory of this device; that it stays untouched until the stream has come past the call is
            // what the view's maker promised, or what cudarc orders with the view's end.
            unsafe { call.push(x.address, x.row_bytes::<T>(), x.payload_bytes::<T>(), place, &program.transfers) }?;
        }
        let matrix = |view: &View| Matrix { address: view.address, row_bytes: view.row_bytes::<T>() };
        let memory = call.memory();
        let args = LaunchArgs {
            x: matrix(&operands.x),
            w: matrix(&operands.w),
            y: matrix(&operands.y),
            data: &memory.data,
            pads: &memory.pads,
            control: memory.control,
            fault: memory.fault,
            half_stride: memory.size.half_stride(),
            deadline_ns: memory.deadline_ns,
            await_pushed: call.pushes(),
            workers: self.workers(movers),
            movers,
            stream: raw_stream,
        };
        // SAFETY: the operands were checked against the problem and are held as above; the workspace is the communicator's, covers this program since
        // the op was built, and stays while the call lives and, on the device, until it is drained. That all ranks enqueue the same is agreed.
        match unsafe { launch(&self.kernel, &self.program, &args) } {
            Ok(()) => Ok(call.finish()?),
            Err(error) => {
                drop(call);
                // The peers' kernels need not wait for the deadline.
                comm.abort(LAUNCH_REFUSED);
                Err(CallError::Launch(error))
            }
        }
    }

    /// CTAs that compute: as many as find room beside the movers, and have an item.
    fn workers(&self, movers: u32) -> u32 {
        let items = u32::try_from(self.program.program().items.len()).unwrap_or(u32::MAX);
        let room = self.kernel.multiprocessors() - movers;
        self.hands.workers.unwrap_or(room).min(room).min(items)
    }

    /// Asks the driver about memory whose location is only claimed.
    fn check_claim(&self, operand: &'static str, view: &View) -> Result<(), CallError> {
        if !view.claimed {
            return Ok(());
        }
        let mut ordinal = -1i32;
        let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        // SAFETY: the attribute is an `int`, and `ordinal` is a place for one; any address may be asked about.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), attribute, view.address) };
        match u32::try_from(ordinal) {
            Ok(ordinal) if code == sys::CUresult::CUDA_SUCCESS => match (Location::Cuda(ordinal), Location::Cuda(self.device.ordinal())) {
                (found, expected) if found == expected => Ok(()),
                (found, expected) => Err(CallError::Location { operand, expected, found }),
            },
            _ => Err(CallError::NotDeviceMemory { operand, address: view.address, code: code as i32 }),
        }
    }

    pub(super) fn explain(&self) -> String {
        let Hands { movers, .. } = self.hands;
        let pushes = !self.program.program().transfers.is_empty();
        let in_kernel = movers.unwrap_or(MOVERS);
        let mover = match movers {
            _ if !pushes => String::new(),
            Some(movers) => format!(", {movers} CTAs push the shard"),
            None => format!(", copy engines push the shard ({in_kernel} CTAs once a call was captured)"),
        };
        let always = if pushes && movers.is_some() { in_kernel } else { 0 };
        format!("kernel {} on {}, {} worker CTAs{mover}", self.kernel.variant(), self.device.info().name, self.workers(always))
    }
}

/// The variant, loaded into the current context, which is the primary one of device `ordinal`.
fn kernel(ordinal: u32, variant: Variant) -> Result<Arc<Kernel>, BuildError> {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    kernels.retain(|(_, kernel)| kernel.strong_count() > 0);
    let loaded = kernels.iter().filter(|(device, _)| *device == ordinal).filter_map(|(_, kernel)| kernel.upgrade());
    if let Some(kernel) = loaded.into_iter().find(|kernel| kernel.variant() == variant) {
        return Ok(kernel);
    }
    let cubin = cache::cubin(&variant.source(), Arch::Sm90a)?;
    if cubin.origin == Origin::Compiled {
        tracing::info!(kernel = %variant, "compiled; the next process finds it in the cache");
    }
    let kernel = Arc::new(Kernel::load(variant, &cubin.image)?);
    kernels.push((ordinal, Arc::downgrade(&kernel)));
    Ok(kernel)
}
