//! Devices made ready for moving bytes between them.
//!
//! Invariant: only what is measured uses `outbox`, `inbox` and `staging`; after [`reach`] every
//! device can access the others' boxes.

use crate::harness::gpu::{Gpu, kernels};
use anyhow::Context;
use cudarc::driver::{CudaStream, result, sys};
use flux_cuda::{CudaDevice, DeviceBlock, Event, PinnedBlock};
use flux_kernels::harness::Links;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of an inbox and of an outbox: what one device moves at most in one go.
pub(super) const BOX: usize = 256 << 20;
/// How long streams are held while the host enqueues: some hundred driver calls for 8 devices.
const HOLD: Duration = Duration::from_millis(3);

pub(super) struct Rig {
    pub(super) gpu: Gpu,
    pub(super) links: Links,
    pub(super) outbox: DeviceBlock,
    pub(super) inbox: DeviceBlock,
    pub(super) staging: PinnedBlock,
    pub(super) streams: Vec<TimedStream>,
}

/// A stream with a timed end and beginning.
pub(super) struct TimedStream {
    pub(super) cuda: Arc<CudaStream>,
    start: Event,
    end: Event,
}

impl TimedStream {
    pub(super) fn raw(&self) -> usize {
        self.cuda.cu_stream().addr()
    }
}

/// Fewest streams of a rig: one for each way to the host and back.
const BOTH_WAYS: usize = 2;

/// Opens every device.
pub(super) fn open_all() -> anyhow::Result<Vec<Rig>> {
    let count = flux_cuda::device_count()?;
    let devices = (0..count).map(CudaDevice::open).collect::<Result<Vec<_>, _>>()?;
    devices.iter().map(|device| Rig::open(device, BOTH_WAYS.max(devices.len() - 1))).collect()
}

/// Lets each device reach the others, or says which one cannot.
pub(super) fn reach(rigs: &[Rig]) -> anyhow::Result<Result<(), String>> {
    let devices = || rigs.iter().map(|rig| rig.gpu.device());
    for (from, to) in devices()
        .flat_map(|f| devices().map(move |t| (f, t)))
        .filter(|(f, t)| f.ordinal() != t.ordinal())
    {
        let (here, there) = (from.ordinal(), to.ordinal());
        if !flux_cuda::can_access_peer(here, there)? {
            return Ok(Err(format!("GPU {here} cannot access memory of GPU {there}")));
        }
        from.bind()?;
        // SAFETY: both contexts are retained; `from`'s is current.
        match unsafe { sys::cuCtxEnablePeerAccess(to.context().cu_ctx(), 0) } {
            sys::CUresult::CUDA_SUCCESS | sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {
            }
            code => return Ok(Err(format!("GPU {here} may not access GPU {there}: {code:?}"))),
        }
    }
    Ok(Ok(()))
}

impl Rig {
    fn open(device: &CudaDevice, streams: usize) -> anyhow::Result<Self> {
        let gpu = Gpu::open(device)?;
        let links = Links::load(&kernels::links(device)?)?;
        let stream = || {
            let (cuda, start, end) =
                (device.context().new_stream()?, Event::timed(device)?, Event::timed(device)?);
            anyhow::Ok(TimedStream { cuda, start, end })
        };
        let streams = (0..streams).map(|_| stream()).collect::<anyhow::Result<_>>()?;
        let (outbox, inbox) = (gpu.alloc(BOX)?, gpu.alloc(BOX)?);
        // Where the transport takes it.
        let staging = flux_cuda::near(&device.info().pci, || PinnedBlock::new(device, BOX))
            .context("pinned memory")?;
        Ok(Self { gpu, links, outbox, inbox, staging, streams })
    }
}

/// Runs a movement once on `streams` streams of each of `rigs`; the microseconds of the slowest
/// rig.
pub(super) fn once(
    rigs: &[&Rig],
    streams: usize,
    movement: &dyn Fn(usize, &Rig, usize, &TimedStream) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    // The streams wait until everything is enqueued, on whichever device.
    for rig in rigs {
        rig.gpu.spin(HOLD)?;
        let held = rig.gpu.record_event()?;
        for stream in &rig.streams[..streams] {
            stream.cuda.wait(&held)?;
        }
    }
    for (device, rig) in rigs.iter().enumerate() {
        rig.gpu.device().bind()?;
        for (number, stream) in rig.streams[..streams].iter().enumerate() {
            stream.start.record(stream.cuda.cu_stream().addr())?;
            movement(device, rig, number, stream)?;
            stream.end.record(stream.cuda.cu_stream().addr())?;
        }
    }
    let mut slowest = 0.0_f64;
    for rig in rigs {
        // One engine may serve the streams of a device one after the other, and their starts too.
        for (first, last) in rig.streams[..streams]
            .iter()
            .flat_map(|first| rig.streams[..streams].iter().map(move |last| (first, last)))
        {
            slowest = slowest.max(f64::from(first.start.elapsed_ms(&last.end)?) * 1e3);
        }
    }
    Ok(slowest)
}

/// Copies by a copy engine.
///
/// # Safety
/// Both ranges are memory of rigs, or pinned, and nothing else uses them meanwhile.
pub(super) unsafe fn copy(
    stream: &TimedStream,
    to: u64,
    from: u64,
    bytes: usize,
) -> anyhow::Result<()> {
    // SAFETY: the caller's promise; one address space covers all devices and pinned memory.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cuda.cu_stream())? };
    Ok(())
}
