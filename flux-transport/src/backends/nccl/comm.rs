//! One rank's end of a group of devices: the baseline that ops are compared with.
//!
//! Invariant: NCCL lets any thread use a communicator, one at a time: [`Comm`] is `Send` and not
//! `Sync`. Collectives are enqueued on the caller's stream and return at once; they run in the
//! order in which they were enqueued, which must be the same on all ranks.

use super::abi::{ElementType, UniqueId};
use super::handle::Handle;
use super::library::{NcclError, library};
use crate::backends::jobs::CollectiveKind;
use flux_cuda::{CudaDevice, is_by};
use std::marker::PhantomData;
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
