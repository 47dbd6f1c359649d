//! A rank's communicator, memory and device.
//!
//! Invariant: data, checks and the order of events on the stream are the same on a device as on the
//! host.

use crate::harness::data::{self, Window};
use crate::harness::gpu::Gpu;
use crate::harness::scaled::Part;
use crate::harness::{Buffer, Fill, HostBuffer, elements, room};
use crate::machine;
use anyhow::Context;
use bytemuck::Zeroable;
use flux_core::Rank;
use flux_cuda::CudaDevice;
use flux_kernels::{Element, TensorElement};
use flux_ops::FusedLinear;
use flux_transport::{Communicator, Select, Stream, World};
use std::ptr::with_exposed_provenance_mut;
use std::time::{Duration, Instant};

/// Elements of a copy from a device: enough for its full speed.
const BLOCK: usize = 1 << 21;

/// A rank's communicator and device.
#[derive(Debug)]
pub struct RankContext {
    comm: Communicator,
    gpu: Option<Gpu>,
}

impl RankContext {
    /// The context of `comm`'s rank.
    ///
    /// # Errors
    /// A device that cannot be opened, harness kernels that cannot be had.
    pub fn new(comm: Communicator) -> anyhow::Result<Self> {
        let gpu = comm
            .device()
            .ordinal()
            .map(|ordinal| Gpu::open(&CudaDevice::open(ordinal)?))
            .transpose()?;
        Ok(Self { comm, gpu })
    }

    /// Of a rank of `world` that has its device to itself. Collective.
    pub(crate) fn connect(world: &World, transport: Select) -> anyhow::Result<Self> {
        let options = machine::options(transport, world.local_rank(), 1);
        Self::new(Communicator::connect_blocking(world, options)?)
    }

    /// The communicator.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// The rank.
    pub fn rank(&self) -> Rank {
        self.comm.rank()
    }

    /// The device, where the rank works on one.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// The stream of the rank's calls.
    pub fn stream(&self) -> Stream<'_> {
        self.gpu.as_ref().map_or(Stream::Host, Gpu::stream)
    }

    /// Memory of `elements` elements; the contents are undefined.
    pub fn alloc<T: TensorElement>(&self, elements: usize) -> anyhow::Result<Buffer<T>> {
        Ok(match &self.gpu {
            None => Buffer::Host(HostBuffer::new(elements)?),
            Some(gpu) => Buffer::Cuda { block: gpu.alloc(elements * size_of::<T>())?, elements },
        })
    }

    /// Fills the start of a buffer with a window of a generated matrix, in order on the stream.
    pub(crate) fn fill_part<T: Element>(
        &self,
        to: &mut Buffer<T>,
        window: Window,
        seed: u64,
        fill: Fill,
    ) -> anyhow::Result<()> {
        match to {
            Buffer::Host(buffer) => {
                let part = buffer.elements_mut().get_mut(..elements(window));
                let part = part.with_context(|| format!("{window:?} is larger than its memory"))?;
                data::fill(part, window, seed, fill);
            }
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.fill(block, 0, window, seed, fill, T::DTYPE)?;
            }
        }
        Ok(())
    }

    /// Fills the start of a buffer with rows of codes, each with so many bytes behind it that begin
    /// with its scales, in order on the stream.
    pub(crate) fn fill_codes<X: Element>(
        &self,
        to: &mut Buffer<X>,
        part: &Part,
        behind: usize,
    ) -> anyhow::Result<()> {
        match to {
            Buffer::Host(buffer) => {
                let Window { rows, cols, .. } = part.window();
                let rows =
                    buffer.elements_mut().get_mut(..rows as usize * (cols as usize + behind));
                let rows = rows.with_context(|| format!("{part:?} is larger than its memory"))?;
                part.write_codes(rows, behind);
                Ok(())
            }
            Buffer::Cuda { block, .. } => self.expect_gpu()?.fill_codes(block, 0, part, behind),
        }
    }

    /// Fills the start of a buffer with the scales of a part, in order on the stream.
    pub(crate) fn fill_scales(&self, to: &mut Buffer<f32>, part: &Part) -> anyhow::Result<()> {
        match to {
            Buffer::Host(_) => self.upload(to, &part.scales(part.layout())),
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.fill_scales(block, part, part.layout())
            }
        }
    }

    /// Fills memory with NaN, in order on the stream.
    pub fn poison<T: Element>(&self, buffer: &mut Buffer<T>) -> anyhow::Result<()> {
        match buffer {
            Buffer::Host(buffer) => buffer.elements_mut().fill(T::from_f32(f32::NAN)),
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.poison(block.address(), block.bytes())?;
            }
        }
        Ok(())
    }

    /// Fills this rank's part of the communicator's data region, both buffers, with NaN, in order
    /// on the stream.
    ///
    /// # Safety
    /// No rank has a call under way, nor begins one before all ranks' streams are past this.
    pub unsafe fn poison_workspace(&self) -> anyhow::Result<()> {
        let workspace = self.comm.workspace();
        let (data, bytes) =
            (workspace.data[self.rank().index()], workspace.size.data_bytes() as usize);
        match &self.gpu {
            // SAFETY: the region has this length and belongs to this process; the caller keeps
            // others away.
            None if bytes > 0 => unsafe {
                with_exposed_provenance_mut::<u8>(data as usize).write_bytes(0xFF, bytes);
            },
            None => {}
            Some(gpu) => gpu.poison(data, bytes)?,
        }
        Ok(())
    }

    /// Copies from host memory to the start of `buffer`.
    pub fn upload<T: TensorElement>(
        &self,
        buffer: &mut Buffer<T>,
        from: &[T],
    ) -> anyhow::Result<()> {
        match buffer {
            Buffer::Host(buffer) => buffer.elements_mut()[..from.len()].copy_from_slice(from),
            Buffer::Cuda { block, .. } => {
                self.expect_gpu()?.upload(block, bytemuck::cast_slice(from))?;
            }
        }
        Ok(())
    }

    /// Waits for the stream, then copies to host memory.
    pub fn download<T: TensorElement>(&self, buffer: &Buffer<T>) -> anyhow::Result<Vec<T>> {
        let mut all = room(buffer.len())?;
        self.download_blocks(buffer, buffer.len(), BLOCK, |_, block| {
            all.extend_from_slice(block);
            Ok(())
        })?;
        Ok(all)
    }

    /// Waits for the stream, then shows the first `elements`, at most `size` at a time, each time
    /// with the number of the first. Those of a device pass through one block of host memory.
    pub(crate) fn download_blocks<T: TensorElement>(
        &self,
        buffer: &Buffer<T>,
        elements: usize,
        size: usize,
        mut show: impl FnMut(usize, &[T]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let size = size.min(elements).max(1);
        let firsts = (0..elements).step_by(size);
        match buffer {
            Buffer::Host(buffer) => firsts
                .zip(buffer.elements()[..elements].chunks(size))
                .try_for_each(|(first, block)| show(first, block)),
            Buffer::Cuda { block, .. } => {
                let mut to = room(size)?;
                to.resize(size, Zeroable::zeroed());
                for first in firsts {
                    let part = &mut to[..size.min(elements - first)];
                    let (from, bytes) = (first * size_of::<T>(), bytemuck::cast_slice_mut(part));
                    self.expect_gpu()?.download(block, from, bytes)?;
                    show(first, part)?;
                }
                Ok(())
            }
        }
    }

    /// Occupies the rank: the thread on the host, the stream on a device.
    pub fn delay(&self, time: Duration) -> anyhow::Result<()> {
        match &self.gpu {
            None => std::thread::sleep(time),
            Some(gpu) => gpu.spin(time)?,
        }
        Ok(())
    }

    /// Waits for everything on the stream, then reads the op's status.
    pub(crate) fn sync(&self, op: &FusedLinear) -> anyhow::Result<()> {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize()?;
        }
        op.status()?;
        Ok(())
    }

    /// As [`sync`](Self::sync) for at most `limit`; the error tells the call's progress.
    pub(crate) fn sync_within(&self, op: &FusedLinear, limit: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + limit;
        if let Some(gpu) = &self.gpu {
            while !gpu.is_idle()? {
                if Instant::now() >= end {
                    let progress = self.comm.progress().unwrap_or_default();
                    anyhow::bail!(
                        "rank {}: the stream has not come past a call in {limit:?}; {progress}",
                        self.rank()
                    );
                }
                std::thread::yield_now();
            }
        }
        op.status()?;
        Ok(())
    }

    pub(crate) fn expect_gpu(&self) -> anyhow::Result<&Gpu> {
        self.gpu.as_ref().context("device memory on a rank that works on the host")
    }
}
