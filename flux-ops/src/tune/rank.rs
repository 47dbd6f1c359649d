//! One rank's operands and clock.
//!
//! Invariant: the ranks' operands are parts of the same global matrices. A sample begins with all
//! ranks lined up: by a barrier on the host, on GPUs by an untimed call on the same stream.

use super::TuneError;
use super::oracle::{Oracle, SEEDS};
use crate::op::{FusedLinear, OpMarker};
use crate::tensor::{Layout, Location, RawTensor, TensorMut, TensorRef};
use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};
use flux_core::problem::Shape;
use flux_core::{Problem, Rank};
use flux_kernels::Element;
use flux_kernels::harness::data::{self, Window, elements, w_window, x_window, y_window};
use flux_kernels::harness::{Fill, HostBuffer};
use flux_transport::internal::cuda::{CudaDevice, DeviceBlock};
use flux_transport::{Communicator, Stream};
use std::sync::Arc;
use std::time::Instant;

/// Operand sets that calls on a GPU take in turn, so that L2 does not hold the next call's.
const SETS: usize = 3;

/// What a rank times and checks with.
pub(super) struct TuneRank<T> {
    comm: Communicator,
    gpu: Option<Gpu>,
    /// `x`, `w` and `y`.
    sets: Vec<[Operand<T>; 3]>,
    oracle: Oracle,
}

enum Operand<T> {
    Host(HostBuffer<T>),
    Cuda(DeviceBlock),
}

/// The rank's device, with the stream of all its calls.
struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    start: CudaEvent,
    end: CudaEvent,
}

impl From<DriverError> for TuneError {
    fn from(error: DriverError) -> Self {
        Self::Device { reason: error.to_string() }
    }
}

impl<T: Element> TuneRank<T> {
    /// Allocates and fills the operands.
    pub(super) fn new(comm: &Communicator, problem: &Problem) -> Result<Self, TuneError> {
        let gpu = comm.device().ordinal().map(Gpu::open).transpose()?;
        let operand = |window: fn(&Problem, Rank) -> Window, seed: Option<u64>| -> Result<Operand<T>, TuneError> {
            let window = window(problem, comm.rank());
            let mut host = HostBuffer::new(elements(window))?;
            if let Some(seed) = seed {
                data::fill(host.elements_mut(), window, seed, Fill::Uniform);
            }
            match &gpu {
                None => Ok(Operand::Host(host)),
                Some(gpu) => gpu.uploaded(&host).map(Operand::Cuda),
            }
        };
        let set = |_| Ok([operand(x_window, Some(SEEDS[0]))?, operand(w_window, Some(SEEDS[1]))?, operand(y_window, None)?]);
        let sets = (0..if gpu.is_some() { SETS } else { 1 }).map(set).collect::<Result<_, TuneError>>()?;
        if let Some(gpu) = &gpu {
            // Copies from pageable memory may be on their way, and the stream does not wait for them.
            gpu.device.synchronize()?;
        }
        Ok(Self { comm: comm.clone(), gpu, sets, oracle: Oracle::new::<T>(problem, comm.rank()) })
    }

    /// Whether the op's result is right; where it is not, why.
    pub(super) fn verify<K: OpMarker>(&mut self, op: &FusedLinear<K, T>) -> Result<Result<(), String>, TuneError> {
        let problem = *op.problem();
        if let (Some(gpu), Operand::Cuda(y)) = (&self.gpu, &self.sets[0][2]) {
            gpu.poison(y)?;
        }
        if let Operand::Host(y) = &mut self.sets[0][2] {
            y.elements_mut().fill(T::from_f32(f32::NAN));
        }
        self.call(op, 0)?;
        if let Some(gpu) = &self.gpu {
            gpu.stream.synchronize()?;
        }
        op.status()?;
        match (&self.sets[0][2], &self.gpu) {
            (Operand::Cuda(y), Some(gpu)) => {
                let y = gpu.downloaded::<T>(y, elements(y_window(&problem, self.comm.rank())))?;
                Ok(self.oracle.check(y.elements(), op.plan().comm))
            }
            (Operand::Host(y), _) => Ok(self.oracle.check(y.elements(), op.plan().comm)),
            (Operand::Cuda(_), None) => Err(TuneError::Device { reason: "device memory without a device".to_owned() }),
        }
    }

    /// What one call takes on this rank, in microseconds; `call` counts the samples.
    pub(super) fn sample<K: OpMarker>(&mut self, op: &FusedLinear<K, T>, call: usize) -> Result<f64, TuneError> {
        if self.gpu.is_none() {
            self.comm.barrier()?;
            let begun = Instant::now();
            self.call(op, call)?;
            return Ok(begun.elapsed().as_secs_f64() * 1e6);
        }
        self.call(op, call)?;
        self.record(|gpu| &gpu.start)?;
        self.call(op, call + 1)?;
        self.record(|gpu| &gpu.end)?;
        let ms = self.gpu.as_ref().map_or(Ok(0.0), |gpu| gpu.start.elapsed_ms(&gpu.end))?;
        op.status()?;
        Ok(f64::from(ms) * 1e3)
    }

    fn record(&self, event: fn(&Gpu) -> &CudaEvent) -> Result<(), TuneError> {
        Ok(self.gpu.as_ref().map_or(Ok(()), |gpu| event(gpu).record(&gpu.stream))?)
    }

    /// Calls the op on the next set, in order on the rank's stream.
    fn call<K: OpMarker>(&mut self, op: &FusedLinear<K, T>, call: usize) -> Result<(), TuneError> {
        let problem = op.problem();
        let location = self.comm.device().ordinal().map_or(Location::Host, Location::Cuda);
        let stream = self.gpu.as_ref().map_or(Stream::Host, |gpu| Stream::from(&*gpu.stream));
        let raw = |operand: &mut Operand<T>, shape: Shape| {
            let layout = Layout::dense(shape.rows as usize, shape.cols as usize);
            let address = match operand {
                // Exposed: the executor makes slices from the address again.
                Operand::Host(buffer) => buffer.elements_mut().as_mut_ptr().expose_provenance() as u64,
                Operand::Cuda(block) => block.address(),
            };
            RawTensor { address, dtype: T::DTYPE, location, layout, available: layout.rows * layout.cols }
        };
        let set = call % self.sets.len();
        let [x, w, y] = &mut self.sets[set];
        // SAFETY: an operand holds its window's elements and is used by calls on this rank's one
        // stream alone. Its memory outlives them: freeing device memory waits for the device.
        let (x, w, mut y) = unsafe {
            (
                TensorRef::from_raw(raw(x, problem.x_shape()))?,
                TensorRef::from_raw(raw(w, problem.w_shape()))?,
                TensorMut::from_raw(raw(y, problem.y_shape()))?,
            )
        };
        Ok(op.forward(&x, &w, &mut y, stream)?)
    }
}

impl Gpu {
    fn open(ordinal: u32) -> Result<Self, TuneError> {
        let device = CudaDevice::open(ordinal)?;
        device.bind()?;
        let timed = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let (start, end) = (device.context().new_event(timed)?, device.context().new_event(timed)?);
        Ok(Self { stream: device.context().new_stream()?, device, start, end })
    }

    fn uploaded<T: Element>(&self, from: &HostBuffer<T>) -> Result<DeviceBlock, TuneError> {
        let block = DeviceBlock::new(&self.device, size_of_val(from.elements()))?;
        self.device.bind()?;
        // SAFETY: the block has as many bytes, and nobody else knows it.
        unsafe { result::memcpy_htod_sync(block.address(), from.elements()) }?;
        Ok(block)
    }

    fn downloaded<T: Element>(&self, from: &DeviceBlock, elements: usize) -> Result<HostBuffer<T>, TuneError> {
        let mut to = HostBuffer::new(elements)?;
        self.device.bind()?;
        // SAFETY: the block has as many elements, and the stream that writes it is done.
        unsafe { result::memcpy_dtoh_sync(to.elements_mut(), from.address()) }?;
        Ok(to)
    }

    /// Fills memory with NaN, in order on the stream.
    fn poison(&self, block: &DeviceBlock) -> Result<(), TuneError> {
        self.device.bind()?;
        // SAFETY: the block's own bytes; all that uses them is on this stream.
        unsafe { result::memset_d8_async(block.address(), 0xFF, block.bytes(), self.stream.cu_stream()) }?;
        Ok(())
    }
}
