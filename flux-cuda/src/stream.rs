//! Streams, events and capture, where the bindings' safe layer does not reach.
//!
//! Invariant: a stream or event lives under its device's context. Callers' handles are only passed
//! on.

use super::driver::{Handle, driver};
use super::{CudaDevice, CudaError};

/// A stream of the highest priority that does not order itself after the default stream.
#[derive(Debug)]
pub struct SideStream {
    device: CudaDevice,
    stream: Handle,
}

const NON_BLOCKING: u32 = 1;
const DISABLE_TIMING: u32 = 2;

impl SideStream {
    /// Makes a stream on `device`.
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: a context is current; both are places for results.
        let code =
            unsafe { (driver.cu_ctx_get_stream_priority_range)(&raw mut least, &raw mut greatest) };
        driver.check("cuCtxGetStreamPriorityRange", code)?;
        let mut stream = 0;
        // SAFETY: a context is current; `stream` is a place for the result.
        let code = unsafe {
            (driver.cu_stream_create_with_priority)(&raw mut stream, NON_BLOCKING, greatest)
        };
        driver.check("cuStreamCreateWithPriority", code)?;
        Ok(Self { device: device.clone(), stream })
    }

    /// The `CUstream`.
    pub fn raw(&self) -> usize {
        self.stream
    }

    /// Whether everything on the stream is done.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the stream lives as long as `self`.
        driver.is_ready("cuStreamQuery", unsafe { (driver.cu_stream_query)(self.stream) })
    }

    /// Waits on this thread until everything on the stream is done.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the stream lives as long as `self`.
        driver.check("cuStreamSynchronize", unsafe { (driver.cu_stream_synchronize)(self.stream) })
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_free() else {
            return;
        };
        let driver = self.device.driver();
        // SAFETY: made in `new`, destroyed only here; work on it finishes first, as the driver
        // promises.
        driver.report("cuStreamDestroy", unsafe { (driver.cu_stream_destroy)(self.stream) });
    }
}

/// A place in the work of a stream.
#[derive(Debug)]
pub struct Event {
    device: CudaDevice,
    event: Handle,
}

impl Event {
    /// Makes an event on `device`, without timing. Waiting for one that was never recorded returns
    /// at once.
    pub fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Self::with_flags(device, DISABLE_TIMING)
    }

    /// Makes an event on `device` for [`elapsed_ms`](Self::elapsed_ms).
    pub fn timed(device: &CudaDevice) -> Result<Self, CudaError> {
        Self::with_flags(device, 0)
    }

    fn with_flags(device: &CudaDevice, flags: u32) -> Result<Self, CudaError> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut event = 0;
        // SAFETY: a context is current; `event` is a place for the result.
        let code = unsafe { (driver.cu_event_create)(&raw mut event, flags) };
        driver.check("cuEventCreate", code)?;
        Ok(Self { device: device.clone(), event })
    }

    /// Milliseconds from this event to `end`, both timed and recorded; waits until both are done.
    ///
    /// With cudarc's bindings of CUDA 13 its own events call an entry point that drivers before
    /// 12.8 lack, and panic there.
    pub fn elapsed_ms(&self, end: &Self) -> Result<f32, CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        for event in [self.event, end.event] {
            // SAFETY: both events live as long as their owners.
            driver.check("cuEventSynchronize", unsafe { (driver.cu_event_synchronize)(event) })?;
        }
        let mut ms = 0.0;
        // SAFETY: `ms` is a place for the result; the driver refuses events without timing.
        driver.check("cuEventElapsedTime", unsafe {
            (driver.cu_event_elapsed_time)(&raw mut ms, self.event, end.event)
        })?;
        Ok(ms)
    }

    /// Records what is on `stream` so far.
    pub fn record(&self, stream: usize) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the event lives as long as `self`; a stream of another context is refused by the
        // driver.
        driver.check("cuEventRecord", unsafe { (driver.cu_event_record)(self.event, stream) })
    }

    /// Whether what was recorded last is done; so it is where nothing was.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the event lives as long as `self`.
        driver.is_ready("cuEventQuery", unsafe { (driver.cu_event_query)(self.event) })
    }

    /// Orders what comes next on `stream` after what was recorded last.
    pub fn make_wait(&self, stream: usize) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the event lives as long as `self`; flags 0 is the plain wait.
        driver.check("cuStreamWaitEvent", unsafe {
            (driver.cu_stream_wait_event)(stream, self.event, 0)
        })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Some(_current) = self.device.enter_to_free() else {
            return;
        };
        let driver = self.device.driver();
        // SAFETY: made in `new`, destroyed only here; the driver keeps what streams still wait for.
        driver.report("cuEventDestroy", unsafe { (driver.cu_event_destroy)(self.event) });
    }
}

/// Whether what is put on a stream runs, or becomes part of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capture {
    /// It runs.
    Off,
    /// It is captured, in the sequence with this number, unique in the process.
    On(u64),
    /// A capture was broken by a call that cannot be captured; it must be ended first.
    Broken,
}

/// Whether `stream`, a `CUstream` of the current context, is being captured.
///
/// # Errors
/// For the default stream while another one is captured.
pub fn capture(stream: usize) -> Result<Capture, CudaError> {
    use std::ptr::null_mut;
    let driver = driver()?;
    let (mut status, mut id) = (0, 0);
    // SAFETY: the first two are places for results, the others are optional and left out; the
    // caller vouches for the handle.
    let code = unsafe {
        (driver.cu_stream_get_capture_info)(
            stream,
            &raw mut status,
            &raw mut id,
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
        )
    };
    driver.check("cuStreamGetCaptureInfo", code)?;
    Ok(match status {
        0 => Capture::Off,
        1 => Capture::On(id),
        _ => Capture::Broken,
    })
}

/// Whether what is put on `stream`, a `CUstream` of the current context, becomes part of a graph.
///
/// # Errors
/// As the driver's: for the default stream while another one is captured.
pub fn is_capturing(stream: usize) -> Result<bool, CudaError> {
    Ok(matches!(capture(stream)?, Capture::On(_)))
}

/// A stream's number, which unlike its handle is never reused. Not for a stream being captured.
pub fn stream_id(stream: usize) -> Result<u64, CudaError> {
    let driver = driver()?;
    let mut id = 0;
    // SAFETY: `id` is a place for the result; the caller vouches for the handle.
    driver.check("cuStreamGetId", unsafe { (driver.cu_stream_get_id)(stream, &raw mut id) })?;
    Ok(id)
}
