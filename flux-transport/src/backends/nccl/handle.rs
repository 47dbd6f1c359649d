//! A communicator of NCCL as NCCL names it, and groups of operations on it.
//!
//! Invariant: nothing here waits for another rank, but for the end of a group where the stream is
//! full. Whoever has a handle ends it.

use super::abi::{ElementType, SUM};
use super::library::{IN_PROGRESS, Library, NcclError};
use crate::backends::jobs::CollectiveKind;
use flux_cuda::CudaDevice;
use std::ffi::{c_int, c_void};
use std::fmt;

const BYTES: c_int = ElementType::U8.code();

/// A device address as NCCL takes it: no memory of this process is behind it.
fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}

/// A communicator, ended by whoever has it.
pub(super) struct Handle {
    pub(super) library: &'static Library,
    pub(super) device: CudaDevice,
    pub(super) raw: usize,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Handle {
    /// Begins a group on this thread.
    pub(super) fn group(&self, stream: usize) -> Result<Group<'_>, NcclError> {
        let current = self.device.enter()?;
        // SAFETY: takes nothing; the group is this thread's, and its guard ends it.
        self.library.check("ncclGroupStart", unsafe { (self.library.nccl_group_start)() })?;
        Ok(Group { of: self, stream, open: true, _current: current })
    }

    /// Puts a collective on `stream`, which is of the device's context, the current one. `elements`
    /// are those of a rank to gather, of a rank's part of a scattered sum, or all of an AllReduce.
    ///
    /// # Safety
    /// Until `stream` is past it, `from` and `to` are memory of this rank's device, of that many
    /// elements or, where they are all ranks' parts, as many for each. Nobody else uses `to`.
    pub(super) unsafe fn collective(
        &self,
        kind: CollectiveKind,
        (from, to): (u64, u64),
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let Self { library, raw, .. } = self;
        let (from, to, of) = (pointer(from).cast_const(), pointer(to), of.code());
        // SAFETY: the caller's promise.
        let (call, code) = unsafe {
            match kind {
                CollectiveKind::AllGather => (
                    "ncclAllGather",
                    (library.nccl_all_gather)(from, to, elements, of, *raw, stream),
                ),
                CollectiveKind::ReduceScatter => (
                    "ncclReduceScatter",
                    (library.nccl_reduce_scatter)(from, to, elements, of, SUM, *raw, stream),
                ),
                CollectiveKind::AllReduce => (
                    "ncclAllReduce",
                    (library.nccl_all_reduce)(from, to, elements, of, SUM, *raw, stream),
                ),
            }
        };
        library.accepted(call, code)
    }

    /// What went wrong on the device or the network; whether what was asked of it is done.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        let mut state = 0;
        // SAFETY: `state` is a place for the result; the communicator lives as long as `self`.
        let code = unsafe { (self.library.nccl_comm_get_async_error)(self.raw, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code)?;
        self.library.accepted("an NCCL communicator", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Ends it and what is on its streams, without waiting for the other ranks. The device's
    /// context is current.
    pub(super) fn abort(self) -> Result<(), NcclError> {
        // SAFETY: the only use of the communicator from now on: `self` is no more.
        self.library.accepted("ncclCommAbort", unsafe { (self.library.nccl_comm_abort)(self.raw) })
    }

    /// Ends it, once its calls are done. The device's context is current.
    pub(super) fn destroy(&mut self) -> Result<(), NcclError> {
        // SAFETY: by whoever has the communicator, as its last use.
        let code = unsafe { (self.library.nccl_comm_destroy)(self.raw) };
        self.library.accepted("ncclCommDestroy", code)
    }
}

/// Operations that go together. Dropped, it ends the group; [`end`](Self::end) says whether that
/// was accepted.
pub(super) struct Group<'a> {
    of: &'a Handle,
    stream: usize,
    open: bool,
    _current: flux_cuda::Current,
}

impl Group<'_> {
    /// Sends `bytes` bytes to `peer`.
    ///
    /// # Safety
    /// They are memory of the communicator's device, or pinned memory of the host by its address
    /// there, until the stream is past the group.
    pub(super) unsafe fn send(&self, from: u64, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let Handle { library, raw, .. } = self.of;
        let from = pointer(from).cast_const();
        // SAFETY: the caller's promise.
        let code = unsafe {
            (library.nccl_send)(from, bytes, BYTES, peer.cast_signed(), *raw, self.stream)
        };
        library.accepted("ncclSend", code)
    }

    /// Receives `bytes` bytes from `peer`.
    ///
    /// # Safety
    /// As [`send`](Self::send), and nobody else uses them meanwhile.
    pub(super) unsafe fn receive(&self, to: u64, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let Handle { library, raw, .. } = self.of;
        // SAFETY: the caller's promise.
        let code = unsafe {
            (library.nccl_recv)(pointer(to), bytes, BYTES, peer.cast_signed(), *raw, self.stream)
        };
        library.accepted("ncclRecv", code)
    }

    /// A collective of `elements` of every rank, or of all for an AllReduce.
    ///
    /// # Safety
    /// As [`receive`](Self::receive), of both ranges. An AllReduce may be in place. So may this
    /// rank's part of what is gathered or scattered.
    pub(super) unsafe fn collective(
        &self,
        kind: CollectiveKind,
        (from, to): (u64, u64),
        elements: usize,
        of: ElementType,
    ) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        unsafe { self.of.collective(kind, (from, to), elements, of, self.stream) }
    }

    /// Puts the operations on the stream.
    pub(super) fn end(mut self) -> Result<(), NcclError> {
        self.open = false;
        self.close()
    }

    fn close(&self) -> Result<(), NcclError> {
        // SAFETY: ends the group that `Handle::group` began on this thread: the guard of the
        // context keeps `self` on it.
        self.of.library.accepted("ncclGroupEnd", unsafe { (self.of.library.nccl_group_end)() })
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open
            && let Err(error) = self.close()
        {
            tracing::debug!(%error, "while ending a group that failed");
        }
    }
}
