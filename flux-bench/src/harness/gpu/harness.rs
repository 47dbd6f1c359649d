//! A rank's device with the harness's kernels, and the stream on which everything of the rank goes.

use super::kernels;
use crate::harness::data::Window;
use crate::harness::scaled::{Generator, Part, ScaleLayout};
use crate::harness::{Fill, MadeBy, Operands, Verdict, Violation};
use cudarc::driver::{CudaEvent, CudaStream, result, sys};
use flux_core::{DType, Rank};
use flux_cuda::{CudaDevice, DeviceBlock, Event};
use flux_kernels::Operand;
use flux_kernels::harness::{self, Expected, Harness, Seeds, UnfusedEpilogue};
use flux_transport::internal::nccl::{Comm, ElementType};
use flux_transport::{CollectiveKind, Stream};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug)]
pub struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    harness: Harness,
    start: Event,
    end: Event,
}

impl Gpu {
    /// Loads the harness on `device` and makes the stream.
    ///
    /// # Errors
    /// Kernels that cannot be compiled or loaded, or the driver's refusal.
    pub fn open(device: &CudaDevice) -> anyhow::Result<Self> {
        device.bind()?;
        let harness = Harness::load(&kernels::harness(device)?)?;
        let (start, end) = (Event::timed(device)?, Event::timed(device)?);
        let stream = device.context().new_stream()?;
        Ok(Self { device: device.clone(), stream, harness, start, end })
    }

    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The stream, as ops take it.
    pub fn stream(&self) -> Stream<'_> {
        Stream::from(&self.stream)
    }

    /// The stream's handle.
    pub fn raw_stream(&self) -> usize {
        self.stream.cu_stream().addr()
    }

    /// Device memory; the contents are undefined.
    pub fn alloc(&self, bytes: usize) -> anyhow::Result<DeviceBlock> {
        Ok(DeviceBlock::new(&self.device, bytes)?)
    }

    pub fn synchronize(&self) -> anyhow::Result<()> {
        Ok(self.stream.synchronize()?)
    }

    /// Whether everything on the stream is done.
    pub(crate) fn is_idle(&self) -> anyhow::Result<bool> {
        self.device.bind()?;
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            done => Ok(done.result().map(|()| true)?),
        }
    }

    /// Fills a window of a matrix from byte `offset` of the memory on.
    pub(crate) fn fill(
        &self,
        to: &DeviceBlock,
        offset: usize,
        window: Window,
        seed: u64,
        fill: Fill,
        dtype: DType,
    ) -> anyhow::Result<()> {
        let stride = u64::from(window.cols);
        let to = matrix(to, offset, window, stride, dtype.bytes())?;
        self.device.bind()?;
        // SAFETY: the block holds the window, and whatever else uses it is on the same stream.
        unsafe { self.harness.fill(to, seed, fill, dtype, self.raw_stream())? };
        Ok(())
    }

    /// Fills rows of codes from byte `offset` on, each with so many bytes behind it that begin with
    /// its scales.
    pub(crate) fn fill_codes(
        &self,
        to: &DeviceBlock,
        offset: usize,
        part: &Part,
        behind: usize,
    ) -> anyhow::Result<()> {
        let (window, Generator { fill, seed }) = (part.window(), part.generator());
        let (codes, row) = (window.cols as usize, window.cols as usize + behind);
        let rows = matrix(to, offset, window, row as u64, part.dtype().bytes())?;
        self.device.bind()?;
        // SAFETY: the memory has these rows, and is used on this stream alone.
        unsafe { self.harness.fill(rows, seed, fill, part.dtype(), self.raw_stream())? };
        if behind == 0 {
            return Ok(());
        }
        let scales = harness::Window {
            address: rows.address + codes as u64,
            row_stride: (row / size_of::<f32>()) as u64,
            ..window_of_scales(part)
        };
        // SAFETY: the memory has these scales behind its rows, and is used on this stream alone.
        unsafe { self.harness.fill_scales(scales, seed, fill, self.raw_stream())? };
        Ok(())
    }

    /// Fills the scales of a part.
    pub(crate) fn fill_scales(
        &self,
        to: &DeviceBlock,
        part: &Part,
        layout: ScaleLayout,
    ) -> anyhow::Result<()> {
        let ScaleLayout { stride, transposed, elements } = layout;
        anyhow::ensure!(
            to.bytes() >= elements * size_of::<f32>(),
            "{part:?} has more scales than its memory"
        );
        let scales = harness::Window {
            address: to.address(),
            row_stride: stride.into(),
            transposed,
            ..window_of_scales(part)
        };
        let Generator { fill, seed } = part.generator();
        self.device.bind()?;
        // SAFETY: the memory has these scales, and is used on this stream alone.
        unsafe { self.harness.fill_scales(scales, seed, fill, self.raw_stream())? };
        Ok(())
    }

    /// Enqueues [`Harness::interleave_shards`] of `[shards, lines, cols]`.
    pub(crate) fn interleave_shards(
        &self,
        from: &DeviceBlock,
        to: &DeviceBlock,
        extents: [u32; 3],
    ) -> anyhow::Result<()> {
        let bytes = extents.iter().map(|&extent| extent as usize).product::<usize>() * 4;
        anyhow::ensure!(
            from.bytes().min(to.bytes()) >= bytes,
            "{bytes} bytes are more than {} and {}",
            from.bytes(),
            to.bytes()
        );
        let ends = (from.address(), to.address());
        self.device.bind()?;
        // SAFETY: two blocks, each of so many bytes, that only this stream uses.
        unsafe { self.harness.interleave_shards(ends, extents, self.raw_stream())? };
        Ok(())
    }

    /// Fills device memory with NaN.
    ///
    /// The range must be memory of this device that only this stream uses.
    pub(crate) fn poison(&self, address: u64, bytes: usize) -> anyhow::Result<()> {
        self.device.bind()?;
        // SAFETY: the callers' promise above.
        unsafe { self.harness.poison(address, bytes as u64, self.raw_stream())? };
        Ok(())
    }

    /// Sets `count` words of device memory from byte `offset` on, in order on the stream.
    pub(crate) fn set_words(
        &self,
        to: &DeviceBlock,
        offset: u64,
        count: u64,
        value: u32,
    ) -> anyhow::Result<()> {
        anyhow::ensure!(
            offset.is_multiple_of(4) && offset + count * 4 <= to.bytes() as u64,
            "{count} words from {offset} on are not in their memory"
        );
        self.device.bind()?;
        let (first, stream) = (to.address() + offset, self.stream.cu_stream());
        // SAFETY: the block holds these words; whatever else uses it is on the same stream.
        let set = unsafe { sys::cuMemsetD32Async(first, value, count as usize, stream) };
        Ok(set.result()?)
    }

    pub(crate) fn verify(
        &self,
        operands: &Operands,
        rank: Rank,
        y: u64,
        MadeBy { flattened, unfused, nodes }: MadeBy,
    ) -> anyhow::Result<Verdict> {
        let problem = &operands.problem;
        let expected = Expected {
            seeds: Seeds { x: operands.seed_x, w: operands.seed_w },
            fill: operands.fill,
            bias: operands.has(Operand::Bias).then_some(operands.seed_bias),
            residual: operands.has(Operand::Residual).then_some(operands.seed_residual),
            activation: operands.epilogue.activation,
            gates: operands.epilogue.gates,
            flattened,
            // Flattened, every rank's own is sent.
            per_node: if flattened { 1 } else { nodes.per_node() },
            unfused,
        };
        let stride = u64::from(operands.y_window(rank).cols);
        self.device.bind()?;
        // SAFETY: `y` is the set's, of the problem's shape.
        let report =
            unsafe { self.harness.verify(problem, rank, y, stride, &expected, self.raw_stream())? };
        let first = report.first;
        Ok(Verdict {
            max_error: f64::from(report.max_error),
            max_reference: f64::from(report.max_reference),
            violations: report.violations,
            first: first.map(|(row, col)| Violation { rank: rank.get(), weight: 0, row, col }),
        })
    }

    /// Enqueues the epilogue of an unfused layer.
    ///
    /// # Safety
    /// As [`Harness::unfused_epilogue`], of memory that only this stream uses.
    pub(crate) unsafe fn unfused_epilogue(
        &self,
        args: &UnfusedEpilogue,
        dtype: DType,
    ) -> anyhow::Result<()> {
        self.device.bind()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { self.harness.unfused_epilogue(args, dtype) }?)
    }

    pub fn spin(&self, time: Duration) -> anyhow::Result<()> {
        self.device.bind()?;
        self.harness.spin(time.as_nanos() as u64, self.raw_stream())?;
        Ok(())
    }

    /// Holds the stream until every rank's has come here, and for `spin` longer. `word` is 4 bytes
    /// that nothing else uses.
    pub(crate) fn line_up(
        &self,
        nccl: &Comm,
        word: &DeviceBlock,
        spin: Duration,
    ) -> anyhow::Result<()> {
        anyhow::ensure!(word.bytes() >= 4, "{} bytes are no word", word.bytes());
        let (kind, ends) = (CollectiveKind::AllReduce, (word.address(), word.address()));
        // SAFETY: one word of this rank's memory, on its one stream.
        unsafe { nccl.collective(kind, ends, 1, ElementType::U32, self.raw_stream())? };
        self.spin(spin)
    }

    /// An event that marks what is on the stream now.
    pub(crate) fn record_event(&self) -> anyhow::Result<CudaEvent> {
        Ok(self.stream.record_event(None)?)
    }

    /// Times what `launch` puts on the stream in milliseconds, and waits for it.
    pub fn time(&self, launch: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        self.start.record(self.raw_stream())?;
        launch()?;
        self.end.record(self.raw_stream())?;
        Ok(f64::from(self.start.elapsed_ms(&self.end)?))
    }

    /// Copies to the start of a block.
    pub(crate) fn upload(&self, to: &DeviceBlock, from: &[u8]) -> anyhow::Result<()> {
        let (bytes, room) = (from.len(), to.bytes());
        anyhow::ensure!(bytes <= room, "{bytes} bytes do not fit {room}");
        self.device.bind()?;
        // SAFETY: the block holds as many bytes, and the stream is synchronised before the slice
        // goes.
        unsafe { result::memcpy_htod_async(to.address(), from, self.stream.cu_stream())? };
        self.synchronize()
    }

    /// Copies from byte `first` of a block.
    pub(crate) fn download(
        &self,
        from: &DeviceBlock,
        first: usize,
        to: &mut [u8],
    ) -> anyhow::Result<()> {
        let (bytes, room) = (to.len(), from.bytes());
        anyhow::ensure!(
            first + bytes <= room,
            "{bytes} bytes from {first} on are more than {room}"
        );
        self.device.bind()?;
        // SAFETY: the slice holds as many bytes as are copied, which lie in the block. The stream is
        // synchronised before the slice goes.
        unsafe {
            result::memcpy_dtoh_async(to, from.address() + first as u64, self.stream.cu_stream())?;
        };
        self.synchronize()
    }
}

/// A window that lies in a block from byte `offset` on, with so many elements from a row to the
/// next.
fn matrix(
    block: &DeviceBlock,
    offset: usize,
    window: Window,
    row_stride: u64,
    element: usize,
) -> anyhow::Result<harness::Window> {
    let bytes = window.rows as usize * row_stride as usize * element;
    anyhow::ensure!(block.bytes() >= offset + bytes, "{window:?} is larger than its memory");
    let Window { row0, col0, rows, cols } = window;
    let address = block.address() + offset as u64;
    Ok(harness::Window { address, row_stride, row0, col0, rows, cols, transposed: false })
}

/// The scales of a part, wherever they lie.
const fn window_of_scales(part: &Part) -> harness::Window {
    let Window { row0, col0, rows, cols } = part.scale_window();
    harness::Window { address: 0, row_stride: 0, row0, col0, rows, cols, transposed: false }
}
