//! NCCL's communicators: the handle, and one rank's end of a group of devices, the baseline that
//! ops are compared with.
//!
//! Invariant: NCCL lets any thread use a communicator, one at a time: [`Comm`] is `Send` and not
//! `Sync`. Collectives are enqueued on the caller's stream and return at once; they run in the
//! order in which they were enqueued, which must be the same on all ranks.

use super::abi::{ElementType, SUM, UniqueId};
use super::library::{IN_PROGRESS, Library, NcclError, library};
use crate::backends::jobs::CollectiveKind;
use flux_cuda::{CudaDevice, is_by};
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::time::{Duration, Instant};

impl UniqueId {
    /// A fresh one.
    pub fn new() -> Result<Self, NcclError> {
        let library = library()?;
        let mut id = Self([0; 128]);
        // SAFETY: `id` is a place for the result.
        library.check("ncclGetUniqueId", unsafe { (library.nccl_get_unique_id)(&raw mut id) })?;
        Ok(id)
    }
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
    /// Puts a collective on `stream`: of `elements` of every rank to gather, or of every rank's
    /// part of a sum that is scattered; or of all to sum on every rank. The device's context is
    /// current.
    ///
    /// # Safety
    /// `from` and `to` are memory of this rank's device of that many elements, or as many for each
    /// rank, until `stream`, of the device's context, is past it; nobody else uses `to`.
    pub(super) unsafe fn collective(
        &self,
        kind: CollectiveKind,
        (from, to): (u64, u64),
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let Self { library, raw, .. } = self;
        // Device addresses: no memory of this process is behind them.
        let (from, to) = (
            with_exposed_provenance(usize::try_from(from).unwrap_or(0)),
            with_exposed_provenance_mut(usize::try_from(to).unwrap_or(0)),
        );
        let of = of.code();
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

/// One rank's communicator.
#[derive(Debug)]
pub struct Comm {
    handle: Handle,
    rank: u32,
    // One thread at a time.
    not_sync: PhantomData<std::cell::Cell<()>>,
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
        let on = device.clone();
        // Where nobody waits for it any more, the thread drops what it has joined.
        let join = move || {
            on.bind()?;
            let (mut raw, init) = (0, library.nccl_comm_init_rank);
            // SAFETY: `raw` is a place for the result; the id is passed by value; NCCL checks rank
            // and world.
            let code = unsafe { init(&raw mut raw, world.cast_signed(), id, rank.cast_signed()) };
            library.check("ncclCommInitRank", code)?;
            let handle = Handle { library, device: on, raw };
            Ok(Self { handle, rank, not_sync: PhantomData })
        };
        // NCCL joins in blocking mode: in its other mode every collective would start a thread,
        // which a baseline must not pay for.
        let thread = std::thread::Builder::new()
            .name(format!("nccl-join-{rank}"))
            .spawn(join)
            .map_err(|error| NcclError::Thread { reason: error.to_string() })?;
        if !is_by(Instant::now() + deadline, || thread.is_finished()) {
            return Err(NcclError::Deadline { rank, world, waited: deadline });
        }
        thread.join().unwrap_or_else(|_| {
            Err(NcclError::Thread { reason: "the thread has panicked".to_owned() })
        })
    }

    /// Puts a collective on `stream`: each rank's `elements` are gathered in rank order, or the
    /// ranks' blocks of so many are summed and each rank has one, or all have the sum.
    ///
    /// # Safety
    /// Device addresses of this rank's device with that much memory, until the stream is past the
    /// call; `stream` is a `CUstream` of its context.
    pub unsafe fn collective(
        &self,
        kind: CollectiveKind,
        (from, to): (u64, u64),
        elements: usize,
        of: ElementType,
        stream: usize,
    ) -> Result<(), NcclError> {
        let _current = self.handle.device.enter()?;
        // SAFETY: the caller's promise.
        unsafe { self.handle.collective(kind, (from, to), elements, of, stream) }
    }

    /// Puts a gather of several tensors on `stream`, as one operation: of each so many bytes of
    /// every rank.
    ///
    /// # Safety
    /// As [`collective`](Self::collective), of all of them.
    pub unsafe fn gather(
        &self,
        tensors: &[((u64, u64), usize)],
        stream: usize,
    ) -> Result<(), NcclError> {
        let group = self.handle.group(stream)?;
        for &(ends, bytes) in tensors {
            // SAFETY: the caller's promise.
            unsafe { group.collective(CollectiveKind::AllGather, ends, bytes, ElementType::U8) }?;
        }
        group.end()
    }

    /// What went wrong on the device or the network since, if anything.
    pub fn status(&self) -> Result<(), NcclError> {
        self.handle.is_ready().map(|_| ())
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let Ok(_current) = self.handle.device.enter() else {
            return;
        };
        if let Err(error) = self.handle.destroy() {
            tracing::warn!(%error, rank = self.rank, "while leaving an NCCL communicator");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_moves_between_threads() {
        fn send<T: Send>() {}
        send::<Comm>();
    }
}
