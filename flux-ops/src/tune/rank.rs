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
use flux_core::{Problem, Scales};
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, Event};
use flux_kernels::harness::data::{self, Window, elements, w_window, x_window, y_window};
use flux_kernels::harness::scaled::{Generator, Part, bytes_behind_rows};
use flux_kernels::harness::{Fill, HostBuffer, NoMemory};
use flux_kernels::{Element, Operand, Shapes, TensorElement};
use flux_transport::{Communicator, Stream, TransportError};
use std::num::NonZero;
use std::sync::Arc;
use std::time::Instant;

/// Operand sets that calls on a GPU take in turn, so that L2 does not hold the next call's.
const SETS: usize = 3;

/// What a rank times and checks with.
pub(super) struct TuneRank<X, Y> {
    comm: Communicator,
    problem: Problem,
    gpu: Option<Gpu>,
    sets: Vec<Set<X, Y>>,
    oracle: Oracle,
}

/// A call's operands. Rows of an AllGather-GEMM's `x` have their scales behind them.
struct Set<X, Y> {
    x: Memory<X>,
    w: Memory<X>,
    y: Memory<Y>,
    scales: Option<[Memory<f32>; 2]>,
}

/// On the host, or on the device.
struct Memory<T> {
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

impl<X: Element, Y: Element> TuneRank<X, Y> {
    /// Allocates and fills the operands.
    pub(super) fn new(comm: &Communicator, problem: &Problem) -> Result<Self, TuneError> {
        let gpu = comm.device().ordinal().map(Gpu::open).transpose()?;
        let set = Set::<X, Y>::new(comm, problem)?;
        let sets = match &gpu {
            None => vec![set],
            Some(gpu) => (0..SETS).map(|_| set.on(gpu)).collect::<Result<_, TuneError>>()?,
        };
        let oracle = Oracle::new::<X>(problem, comm.rank());
        Ok(Self { comm: comm.clone(), problem: *problem, gpu, sets, oracle })
    }

    /// Whether the op's result is right; where it is not, why.
    pub(super) fn verify(&mut self, op: &FusedLinear) -> Result<Result<(), String>, TuneError> {
        let mut y = HostBuffer::new(elements(y_window(&self.problem, self.comm.rank())))?;
        y.elements_mut().fill(Y::from_f32(f32::NAN));
        match (&self.gpu, &self.sets[0].y.device) {
            (Some(gpu), Some(block)) => gpu.upload(block, y.elements())?,
            _ => std::mem::swap(&mut y, &mut self.sets[0].y.host),
        }
        self.call(op, 0)?;
        match (&self.gpu, &self.sets[0].y.device) {
            (Some(gpu), Some(block)) => gpu.download(y.elements_mut(), block)?,
            _ => std::mem::swap(&mut y, &mut self.sets[0].y.host),
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
        let set = call % self.sets.len();
        let Set { x, w, y, scales } = &mut self.sets[set];
        let rank = self.comm.rank();
        let dense = |shape: Shape| Layout::dense(shape.rows as usize, shape.cols as usize);
        let x_shape = problem.x_shape(rank);
        let (rows, k) = (x_shape.rows as usize, x_shape.cols as usize);
        let x_row = k + bytes_behind_rows(&problem) / size_of::<X>();
        let of_x = x.raw(location, Layout::strided(rows, k, x_row));
        let mut operands = Operands::new(of_x);
        let of_w = w.raw(location, dense(problem.w_shape(rank)));
        operands.add_weight(of_w, y.raw(location, dense(problem.y_shape(rank))));
        if let Some([scale_x, scale_w]) = scales {
            let shapes = Shapes::new(&problem, rank);
            let [x_shape, w_shape] =
                [Operand::ScaleX, Operand::ScaleW].map(|of| shapes.of_operand(of, 0));
            let scale_x = if x_row == k {
                scale_x.raw(location, dense(x_shape))
            } else {
                let layout = Layout::strided(
                    x_shape.rows as usize,
                    x_shape.cols as usize,
                    x_row / size_of::<f32>(),
                );
                RawTensor {
                    address: of_x.address + k as u64,
                    dtype: f32::TYPE,
                    location,
                    layout,
                    available: rows * layout.row_stride - k / size_of::<f32>(),
                }
            };
            operands.set(Operand::ScaleX, 0, scale_x);
            operands.set(Operand::ScaleW, 0, scale_w.raw(location, dense(w_shape)));
        }
        // SAFETY: an operand holds its window's elements and is used by calls on this rank's one
        // stream alone. Its memory outlives them: freeing device memory waits for the device.
        Ok(unsafe { op.run(&operands, stream) }?)
    }
}

impl<X: Element, Y: Element> Set<X, Y> {
    /// In host memory.
    fn new(comm: &Communicator, problem: &Problem) -> Result<Self, TuneError> {
        let rank = comm.rank();
        let (x, w) = (x_window(problem, rank), w_window(problem, rank));
        let [of_x, of_w] = SEEDS.map(|seed| Generator { fill: Fill::Uniform, seed });
        let y = Memory::on_host(HostBuffer::new(elements(y_window(problem, rank)))?);
        if problem.numerics().scales == Scales::None {
            let [x, w] = [filled(x, of_x, comm)?, filled(w, of_w, comm)?].map(Memory::on_host);
            return Ok(Self { x, w, y, scales: None });
        }
        let parts = [Part::of_x(problem, of_x, x, rank), Part::of_w(problem, of_w, w, rank)];
        let codes = |part: Part, window: Window, behind: usize| {
            let bytes = elements(window) + window.rows as usize * behind;
            let mut host = HostBuffer::<X>::new(bytes)?;
            part.write_codes(host.elements_mut(), behind);
            Ok::<_, NoMemory>(Memory::on_host(host))
        };
        let scales = |part: Part| {
            let list = part.scales(part.layout());
            let mut host = HostBuffer::new(list.len())?;
            host.elements_mut().copy_from_slice(&list);
            Ok::<_, NoMemory>(Memory::on_host(host))
        };
        Ok(Self {
            x: codes(parts[0], x, bytes_behind_rows(problem))?,
            w: codes(parts[1], w, 0)?,
            y,
            scales: Some([scales(parts[0])?, scales(parts[1])?]),
        })
    }

    /// A copy on the device.
    fn on(&self, gpu: &Gpu) -> Result<Self, TuneError> {
        let scales = self.scales.as_ref();
        let scales = scales.map(|[x, w]| Ok::<_, TuneError>([gpu.copy(x)?, gpu.copy(w)?]));
        Ok(Self {
            x: gpu.copy(&self.x)?,
            w: gpu.copy(&self.w)?,
            y: gpu.copy(&self.y)?,
            scales: scales.transpose()?,
        })
    }
}

impl<T: TensorElement> Memory<T> {
    const fn on_host(host: HostBuffer<T>) -> Self {
        Self { host, device: None }
    }

    fn raw(&mut self, location: Location, layout: Layout) -> RawTensor {
        // Exposed: the executor makes slices from the address again.
        let host = self.host.elements_mut().as_mut_ptr().expose_provenance() as u64;
        let address = self.device.as_ref().map_or(host, DeviceBlock::address);
        let available = layout.rows * layout.row_stride;
        RawTensor { address, dtype: T::TYPE, location, layout, available }
    }
}

/// Random elements of a window, by this rank's share of the cores.
fn filled<T: Element>(
    window: Window,
    Generator { fill, seed }: Generator,
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
            scope.spawn(move || data::fill(to, part(at), seed, fill));
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
    fn copy<T: TensorElement>(&self, from: &Memory<T>) -> Result<Memory<T>, TuneError> {
        // A rank without rows has an address, too.
        let elements = from.host.elements();
        let block = DeviceBlock::new(&self.device, size_of_val(elements).max(size_of::<T>()))?;
        self.upload(&block, elements)?;
        Ok(Memory { host: HostBuffer::new(0)?, device: Some(block) })
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
