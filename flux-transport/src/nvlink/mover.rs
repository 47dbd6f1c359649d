//! The push of an AllGather-GEMM: who carries the shard to the peers.
//!
//! Invariant: every word raised is this call's epoch, read from the control block on the device, and follows the rows that it announces.
//! The half that rows go to is the epoch's, which the host knows only as long as nothing but its own calls advances the epoch. So:
//! - the copy engines carry the rows as long as no call of the communicator was ever captured: the host counts calls;
//! - from the first capture on, captured or not, a [`CaptureMover`] carries them: a replay advances the epoch unseen, and reading it back
//!   would be a synchronisation.

use super::lane::Lane;
use super::order::Mode;
use super::plan::copies;
use crate::Push;
use crate::cuda::{CudaDevice, CudaError, copy_async, copy_rows_async, host_size, write_value_async};
use flux_core::layout::{WorkspaceSize, control};
use flux_core::signal::Epoch;
use std::error::Error;

/// A kernel that carries transfers where copy engines cannot: it reads the epoch from the control block.
///
/// For each transfer, in order: copy the rows from `push.x` to `data[dest] + half + place * place_bytes + row * row_bytes`, with `half`
/// the half of the epoch, then store the epoch with release order at system scope into the signal `raise` of `pads[dest]`; after the
/// last, store the epoch into `pushed` of the control block.
pub trait CaptureMover: Send + Sync {
    /// Launches the kernel on `stream`, a `CUstream` of the communicator's device, whose context is current. It must be loaded already and must
    /// not allocate, synchronise or use another stream: the stream may be being captured.
    ///
    /// # Errors
    /// Whatever the launch failed with.
    fn launch(&self, job: &MoverJob<'_>, stream: usize) -> Result<(), Box<dyn Error + Send + Sync>>;

    /// SMs that the kernel occupies and that the fused kernel beside it must leave free.
    fn sms(&self) -> u32;
}

/// What a [`CaptureMover`] carries.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MoverJob<'a> {
    /// The caller's shard and the transfers, as the program lists them.
    pub push: Push<'a>,
    /// Address of each rank's data region, by rank.
    pub data: &'a [u64],
    /// Address of each rank's pad, by rank.
    pub pads: &'a [u64],
    /// Address of this rank's control block.
    pub control: u64,
    /// Bytes between the halves of a data region.
    pub half_stride: u64,
}

/// Where things are, for a push.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses<'a> {
    pub(super) data: &'a [u64],
    pub(super) pads: &'a [u64],
    pub(super) control: u64,
    pub(super) size: &'a WorkspaceSize,
}

/// The two lanes of a rank: one runs, the other is drawn into captures, so that an eager call beside a capture stays out of it.
#[derive(Debug)]
pub(super) struct Lanes {
    eager: Lane,
    captured: Lane,
}

impl Lanes {
    pub(super) fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self { eager: Lane::new(device)?, captured: Lane::new(device)? })
    }

    pub(super) fn of(&self, mode: Mode) -> &Lane {
        match mode {
            Mode::Eager => &self.eager,
            Mode::Captured => &self.captured,
        }
    }
}

/// Enqueues a push by copy engines on `lane`, for the call with number `epoch`.
///
/// # Safety
/// The push was checked; `lane` is forked from the caller's stream; the shard's rows are mapped for `device` and stay so until the lane is joined; the addresses are
/// those of the current workspace; the epoch in the control block is `epoch` when the lane gets there.
pub(super) unsafe fn by_copy_engine(
    device: &CudaDevice,
    lane: &Lane,
    push: &Push<'_>,
    at: Addresses<'_>,
    epoch: Epoch,
) -> Result<(), CudaError> {
    let half = epoch.half() as u64 * at.size.half_stride();
    let _current = device.enter()?;
    for copy in copies(push, half, at.data, at.pads) {
        let (rows, row_bytes, pitch) = (host_size(copy.rows), host_size(copy.row_bytes), host_size(copy.pitch));
        if copy.rows == 0 || copy.row_bytes == 0 {
            // Nothing to carry; the signal still says so.
        } else if copy.dense() {
            // SAFETY: the push was checked against the workspace; the caller promised the source.
            unsafe { copy_async(device, copy.to, copy.from, rows * row_bytes, lane.raw()) }?;
        } else {
            // SAFETY: as above.
            unsafe { copy_rows_async(device, copy.to, copy.from, (rows, row_bytes, pitch), lane.raw()) }?;
        }
        // SAFETY: both words are in the workspace. 1.5 us, where a stream's write of a value takes 2.5 (docs/architecture.md).
        unsafe { copy_async(device, copy.signal, at.control + control::EPOCH, 4, lane.raw()) }?;
    }
    // Not a copy: within one device the driver may copy by a kernel, and the fused kernel that awaits this word may hold every SM.
    // SAFETY: the word is in the control block.
    unsafe { write_value_async(device, at.control + control::PUSHED, epoch.get(), lane.raw()) }
}
