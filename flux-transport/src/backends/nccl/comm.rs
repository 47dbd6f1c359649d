//! An NCCL communicator: one rank's end of a group of devices.
//!
//! Invariant: NCCL lets any thread use a communicator, one at a time: [`Comm`] is `Send` and not
//! `Sync`. Collectives are enqueued on the caller's stream and return at once; they run in the
//! order in which they were enqueued, which must be the same on all ranks.

use super::library::{Library, NcclError, library};
use crate::cuda::CudaDevice;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::sync::mpsc;
use std::time::Duration;

/// Names one communicator to all its ranks; made by one of them.
///
/// It is NCCL's `ncclUniqueId`, 128 bytes that NCCL takes by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// A fresh one.
    pub fn new() -> Result<Self, NcclError> {
        let library = library()?;
        let mut id = Self([0; 128]);
        // SAFETY: `id` is a place for the result.
        library.check("ncclGetUniqueId", unsafe { (library.nccl_get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    /// From the bytes of another rank's.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }

    /// To send to the other ranks.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0
    }
}

/// What a collective moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// Bytes.
    U8,
    /// 32-bit words.
    U32,
}

impl ElementType {
    /// Its `ncclDataType_t`.
    pub(super) const fn code(self) -> c_int {
        match self {
            Self::U8 => 1,
            Self::U32 => 3,
            Self::F16 => 6,
            Self::F32 => 7,
            Self::Bf16 => 9,
        }
    }
}

impl From<flux_core::DType> for ElementType {
    fn from(dtype: flux_core::DType) -> Self {
        match dtype {
            flux_core::DType::Bf16 => Self::Bf16,
            flux_core::DType::F16 => Self::F16,
        }
    }
}

/// `ncclSum` of `ncclRedOp_t`.
pub(super) const SUM: c_int = 0;

/// One rank's communicator.
pub struct Comm {
    library: &'static Library,
    device: CudaDevice,
    raw: usize,
    rank: u32,
    world: u32,
    // One thread at a time.
    not_sync: PhantomData<std::cell::Cell<()>>,
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comm")
            .field("rank", &self.rank)
            .field("world", &self.world)
            .finish_non_exhaustive()
    }
}

impl Comm {
    /// Joins the communicator `id` as `rank` of `world`, on `device`. Every rank calls it, each
    /// from a thread of its own.
    ///
    /// # Errors
    /// No NCCL, NCCL's refusal, or [`NcclError::Deadline`] when the others have not come. The
    /// attempt then goes on in a thread that is left behind: NCCL offers no way to end it.
    pub fn join(
        device: &CudaDevice,
        id: UniqueId,
        rank: u32,
        world: u32,
        deadline: Duration,
    ) -> Result<Self, NcclError> {
        let library = library()?;
        // Without a place for a result: one that nobody takes is given back to be aborted, whenever
        // the deadline passes.
        let (send, receive) = mpsc::sync_channel(0);
        let on = device.clone();
        let join = move || {
            let joined = on.bind().map_err(NcclError::from).and_then(|()| {
                let mut comm = 0;
                // SAFETY: `comm` is a place for the result; the id is passed by value; NCCL checks
                // rank and world.
                let code = unsafe {
                    (library.nccl_comm_init_rank)(
                        &raw mut comm,
                        world.cast_signed(),
                        id,
                        rank.cast_signed(),
                    )
                };
                library.check("ncclCommInitRank", code).map(|()| comm)
            });
            if let Err(mpsc::SendError(Ok(late))) = send.send(joined) {
                // SAFETY: nobody waits any more; this thread is the communicator's only user.
                unsafe { (library.nccl_comm_abort)(late) };
            }
        };
        // NCCL joins in blocking mode: in its other mode every collective would start a thread,
        // which a baseline must not pay for.
        std::thread::Builder::new()
            .name(format!("nccl-join-{rank}"))
            .spawn(join)
            .map_err(|error| NcclError::Thread { reason: error.to_string() })?;
        match receive.recv_timeout(deadline) {
            Ok(comm) => Ok(Self {
                library,
                device: device.clone(),
                raw: comm?,
                rank,
                world,
                not_sync: PhantomData,
            }),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                Err(NcclError::Deadline { rank, world, waited: deadline })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                Err(NcclError::Thread { reason: "the thread ended without a result".to_owned() })
            }
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Gathers `elements` elements of every rank, in rank order, into `to`: `world * elements`
    /// elements.
    ///
    /// # Safety
    /// Device addresses of this rank's device with that much memory, until the stream is past the
    /// call; `stream` is a `CUstream` of its context.
    pub unsafe fn all_gather(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let _current = self.device.enter()?;
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.library.nccl_all_gather)(
                source(from),
                target(to),
                elements,
                of.code(),
                self.raw,
                stream,
            )
        };
        self.library.check("ncclAllGather", code)
    }

    /// Sums `world * elements` elements over the ranks and leaves this rank's block of `elements`
    /// of the sum in `to`.
    ///
    /// # Safety
    /// As [`Comm::all_gather`].
    pub unsafe fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let _current = self.device.enter()?;
        let entry = self.library.nccl_reduce_scatter;
        // SAFETY: the caller's promise.
        let code =
            unsafe { entry(source(from), target(to), elements, of.code(), SUM, self.raw, stream) };
        self.library.check("ncclReduceScatter", code)
    }

    /// Sums `elements` elements over the ranks into `to`, which may be `from`.
    ///
    /// # Safety
    /// As [`Comm::all_gather`].
    pub unsafe fn all_reduce(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let _current = self.device.enter()?;
        // SAFETY: the caller's promise.
        let code = unsafe {
            (self.library.nccl_all_reduce)(
                source(from),
                target(to),
                elements,
                of.code(),
                SUM,
                self.raw,
                stream,
            )
        };
        self.library.check("ncclAllReduce", code)
    }

    /// What went wrong on the device or the network since, if anything.
    pub fn status(&self) -> Result<(), NcclError> {
        let mut state = 0;
        // SAFETY: `state` is a place for the result; the communicator lives as long as `self`.
        let code = unsafe { (self.library.nccl_comm_get_async_error)(self.raw, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code)?;
        self.library.check("an earlier collective", state)
    }

    /// Leaves the communicator without waiting for the other ranks; what was enqueued is given up.
    ///
    /// # Errors
    /// NCCL's refusal; the communicator is gone either way.
    pub fn abort(self) -> Result<(), NcclError> {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so the device's reference is moved out once.
        let device = unsafe { std::ptr::read(&raw const this.device) };
        let _current = device.enter()?;
        // SAFETY: the destructor, which would destroy the communicator again, does not run.
        this.library.check("ncclCommAbort", unsafe { (this.library.nccl_comm_abort)(this.raw) })
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else {
            return;
        };
        // SAFETY: the communicator is destroyed only here.
        let code = unsafe { (self.library.nccl_comm_destroy)(self.raw) };
        if let Err(error) = self.library.check("ncclCommDestroy", code) {
            tracing::warn!(%error, rank = self.rank, "while leaving an NCCL communicator");
        }
    }
}

// Device addresses: no memory of this process is behind them.
pub(super) fn source(address: u64) -> *const c_void {
    with_exposed_provenance(usize::try_from(address).unwrap_or(0))
}

pub(super) fn target(address: u64) -> *mut c_void {
    with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_trip_as_bytes() {
        let bytes: [u8; 128] = std::array::from_fn(|i| u8::try_from(i * 2 % 251).unwrap());
        assert_eq!(UniqueId::from_bytes(bytes).to_bytes(), bytes);
    }

    #[test]
    fn a_communicator_moves_between_threads() {
        fn send<T: Send>() {}
        send::<Comm>();
    }
}
