//! One rank's operands and clock.
//!
//! Invariant: the ranks' operands are parts of the same global matrices. A sample begins with all
//! ranks lined up: by a barrier on the host, on GPUs by an untimed call on the same stream.

use super::TuneError;
use super::oracle::{Oracle, SEEDS};
use crate::op::FusedLinear;
use crate::operands::Operands;
use crate::tensor::{Layout, Location, RawTensor};
use cudarc::driver::{CudaStream, DriverError, result};
use flux_core::problem::Shape;
use flux_core::{Problem, Rank};
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, Event};
use flux_kernels::Element;
use flux_kernels::harness::data::{self, Window, elements, w_window, x_window, y_window};
use flux_kernels::harness::{Fill, HostBuffer, NoMemory};
use flux_transport::{Communicator, Stream, TransportError};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

/// Operand sets that calls on a GPU take in turn, so that L2 does not hold the next call's.
const SETS: usize = 3;

/// What a rank times and checks with.
pub(super) struct TuneRank<T> {
    comm: Communicator,
    problem: Problem,
    gpu: Option<Gpu>,
    /// `x`, `w` and `y`.
    sets: Vec<[Operand<T>; 3]>,
    oracle: Oracle,
}

/// On the host, or on the device.
struct Operand<T> {
    host: HostBuffer<T>,
    device: Option<DeviceBlock>,
}

/// The rank's device, with the stream of all its calls.
struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    start: Event,
    end: Event,
}

impl<T: Element> TuneRank<T> {
    /// Allocates and fills the operands.
    pub(super) fn new(comm: &Communicator, problem: &Problem) -> Result<Self, TuneError> {
        let gpu = comm.device().ordinal().map(Gpu::open).transpose()?;
        let host = |window: fn(&Problem, Rank) -> Window, seed| {
            filled(window(problem, comm.rank()), seed, comm)
        };
        let hosts = [host(x_window, SEEDS[0])?, host(w_window, SEEDS[1])?, host(y_window, 0)?];
        let sets =
            match &gpu {
                None => vec![hosts.map(|host| Operand { host, device: None })],
                Some(gpu) => {
                    let [x, w, y] = &hosts;
                    (0..SETS)
                        .map(|_| Ok([gpu.copy(x)?, gpu.copy(w)?, gpu.copy(y)?]))
                        .collect::<Result<_, TuneError>>()?
                }
            };
        Ok(Self {
            comm: comm.clone(),
            problem: *problem,
            gpu,
            sets,
            oracle: Oracle::new::<T>(problem, comm.rank()),
        })
    }

    /// Whether the op's result is right; where it is not, why.
    pub(super) fn verify(&mut self, op: &FusedLinear) -> Result<Result<(), String>, TuneError> {
        let mut y = HostBuffer::new(elements(y_window(&self.problem, self.comm.rank())))?;
        y.elements_mut().fill(T::from_f32(f32::NAN));
        match (&self.gpu, &self.sets[0][2].device) {
            (Some(gpu), Some(block)) => gpu.upload(block, y.elements())?,
            _ => std::mem::swap(&mut y, &mut self.sets[0][2].host),
        }
        self.call(op, 0)?;
        match (&self.gpu, &self.sets[0][2].device) {
            (Some(gpu), Some(block)) => gpu.download(y.elements_mut(), block)?,
            _ => std::mem::swap(&mut y, &mut self.sets[0][2].host),
        }
        op.status().map_err(|fault| TransportError::Broken { fault })?;
        Ok(self.oracle.check(y.elements(), op.plan(op.max_m())?.comm))
    }

    /// What one call takes on this rank, in microseconds; `call` counts the samples.
    pub(super) fn sample(&mut self, op: &FusedLinear, call: usize) -> Result<f64, TuneError> {
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
        op.status().map_err(|fault| TransportError::Broken { fault })?;
        Ok(f64::from(ms) * 1e3)
    }

    fn record(&self, event: fn(&Gpu) -> &Event) -> Result<(), TuneError> {
        Ok(self
            .gpu
            .as_ref()
            .map_or(Ok(()), |gpu| event(gpu).record(gpu.stream.cu_stream().addr()))?)
    }

    /// Calls the op on the next set, in order on the rank's stream.
    fn call(&mut self, op: &FusedLinear, call: usize) -> Result<(), TuneError> {
        let problem = self.problem;
        let location = self.comm.device().ordinal().map_or(Location::Host, Location::Cuda);
        let stream = self.gpu.as_ref().map_or(Stream::Host, |gpu| Stream::from(&gpu.stream));
        let raw = |operand: &mut Operand<T>, shape: Shape| {
            let layout = Layout::dense(shape.rows as usize, shape.cols as usize);
            // Exposed: the executor makes slices from the address again.
            let host = operand.host.elements_mut().as_mut_ptr().expose_provenance() as u64;
            let address = operand.device.as_ref().map_or(host, DeviceBlock::address);
            RawTensor {
                address,
                dtype: T::TYPE,
                location,
                layout,
                available: layout.rows * layout.cols,
            }
        };
        let set = call % self.sets.len();
        let [x, w, y] = &mut self.sets[set];
        let rank = self.comm.rank();
        let mut operands = Operands::new(raw(x, problem.x_shape(rank)));
        operands.add_weight(raw(w, problem.w_shape(rank)), raw(y, problem.y_shape(rank)));
        // SAFETY: an operand holds its window's elements and is used by calls on this rank's one
        // stream alone. Its memory outlives them: freeing device memory waits for the device.
        Ok(unsafe { op.run(&operands, stream) }?)
    }
}

/// Random elements of a window, by this rank's share of the cores.
fn filled<T: Element>(
    window: Window,
    seed: u64,
    comm: &Communicator,
) -> Result<HostBuffer<T>, TuneError> {
    let mut host = HostBuffer::new(elements(window))?;
    let threads = std::thread::available_parallelism()
        .map_or(1, NonZero::get)
        .div_ceil(comm.world_size().index());
    // A rank may have no rows.
    let rows = window.rows.div_ceil(u32::try_from(threads).unwrap_or(1)).max(1);
    let part =
        |at: u32| Window { row0: window.row0 + at, rows: rows.min(window.rows - at), ..window };
    let starts = (0..window.rows).step_by(rows as usize);
    std::thread::scope(|scope| {
        for (at, to) in
            starts.zip(host.elements_mut().chunks_mut(rows as usize * window.cols as usize))
        {
            scope.spawn(move || data::fill(to, part(at), seed, Fill::Uniform));
        }
    });
    Ok(host)
}

impl Gpu {
    fn open(ordinal: u32) -> Result<Self, TuneError> {
        let device = CudaDevice::open(ordinal)?;
        device.bind()?;
        let (start, end) = (Event::timed(&device)?, Event::timed(&device)?);
        Ok(Self { stream: device.context().new_stream()?, device, start, end })
    }

    /// A copy in memory of its own.
    fn copy<T: Element>(&self, from: &HostBuffer<T>) -> Result<Operand<T>, TuneError> {
        // A rank without rows has an address, too.
        let block =
            DeviceBlock::new(&self.device, size_of_val(from.elements()).max(size_of::<T>()))?;
        self.upload(&block, from.elements())?;
        Ok(Operand { host: HostBuffer::new(0)?, device: Some(block) })
    }

    /// Copies to a block of as many bytes or more.
    fn upload<T>(&self, to: &DeviceBlock, from: &[T]) -> Result<(), TuneError> {
        self.device.bind()?;
        // SAFETY: the block has so many bytes; the copy is done before the slice can go away.
        unsafe { result::memcpy_htod_async(to.address(), from, self.stream.cu_stream()) }?;
        Ok(self.stream.synchronize()?)
    }

    /// Copies from a block of as many bytes or more, once all that is on the stream is done.
    fn download<T>(&self, to: &mut [T], from: &DeviceBlock) -> Result<(), TuneError> {
        self.device.bind()?;
        // SAFETY: as in `upload`.
        unsafe { result::memcpy_dtoh_async(to, from.address(), self.stream.cu_stream()) }?;
        Ok(self.stream.synchronize()?)
    }
}

/// All that keeps a rank from timing alone.
macro_rules! operands_error {
    ($($error:ty),*) => { $(impl From<$error> for TuneError {
        fn from(error: $error) -> Self {
            Self::Operands { reason: error.to_string() }
        }
    })* };
}
operands_error!(NoMemory, CudaError, DriverError);
