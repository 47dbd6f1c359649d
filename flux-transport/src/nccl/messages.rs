//! An NCCL communicator for messages, made and used without blocking.
//!
//! Invariant: no call of this module waits for another rank, but for [`Messages::join`] and [`Messages::leave`], which have a deadline. What NCCL does without
//! one is done on a thread of its own, and [noted](GivingUp) until it is done. What a group enqueues is on the stream when [`Messages::is_ready`] says so, and only
//! then may the communicator be used again.

use super::comm::{source, target};
use super::library::{Config, Library, NcclError, library, version};
use super::members::Members;
use super::remains::GivingUp;
use crate::cuda::{CudaDevice, done_by};
use cudarc::nccl::sys::{ncclDataType_t, ncclUniqueId};
use std::convert::Infallible;
use std::ffi::c_int;
use std::fmt;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// Between looks at what takes milliseconds.
const LOOK: Duration = Duration::from_millis(1);
/// For the other ranks of this host to leave as well, without whom NCCL does not destroy a communicator. Ranks mostly leave together, and what NCCL may still
/// use is then freed at once.
const TOGETHER: Duration = Duration::from_secs(1);

/// One rank's communicator. Whoever has it ends it by [`leave`](Self::leave) or [`abort`](Self::abort).
pub(crate) struct Messages {
    library: &'static Library,
    device: CudaDevice,
    raw: usize,
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Messages {
    /// Joins the communicator of `members`.
    pub(super) fn join(device: &CudaDevice, members: &Members, until: Instant) -> Result<Self, NcclError> {
        let began = Instant::now();
        let library = library()?;
        let ((place, count), sharing) = (members.place(), members.sharing);
        let (mut raw, mut config) = (0, Config::without_blocking(sharing.asked, sharing.lanes, version()?));
        let id = ncclUniqueId { internal: members.id.to_bytes().map(u8::cast_signed) };
        {
            let _current = device.enter()?;
            let init = library.nccl_comm_init_rank_config;
            // SAFETY: `raw` is a place for the result, the configuration is of the size that it says and is read before the call returns.
            let code = unsafe { init(&raw mut raw, count.cast_signed(), id, place.cast_signed(), &raw mut config) };
            library.accepted("ncclCommInitRankConfig", code)?;
        }
        let this = Self { library, device: device.clone(), raw };
        loop {
            match this.is_ready() {
                Ok(true) => return Ok(this),
                Ok(false) if Instant::now() < until => std::thread::sleep(LOOK),
                Ok(false) => {
                    this.abort();
                    return Err(members.incomplete(began.elapsed()));
                }
                Err(error) => {
                    this.abort();
                    return Err(error);
                }
            }
        }
    }

    /// Whether everything that was asked for before is done or on its stream; NCCL's error where something has failed since.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        let mut state = 0;
        // SAFETY: `state` is a place for the result; the communicator lives as long as `self`.
        let code = unsafe { (self.library.nccl_comm_get_async_error)(self.raw, &raw mut state) };
        self.library.check("ncclCommGetAsyncError", code)?;
        self.library.accepted("an NCCL communicator", state)?;
        Ok(state != IN_PROGRESS)
    }

    /// Begins a group of messages, which all go at once; the communicator is ready, and the thread adds them and ends it.
    pub(super) fn group(&self, stream: usize) -> Result<Group<'_>, NcclError> {
        let current = self.device.enter()?;
        // SAFETY: takes nothing; the group is this thread's, and its guard ends it.
        self.library.check("ncclGroupStart", unsafe { (self.library.nccl_group_start)() })?;
        Ok(Group { of: self, stream, open: true, _current: current })
    }

    /// Leaves in good order: what was sent arrives. For other ranks' leaving it waits a moment only: NCCL may go on with that, and what it may use is to be
    /// [left](super::remains::leave) meanwhile.
    pub(crate) fn leave(self, until: Instant) -> Result<(), NcclError> {
        let finalised = self.device.enter().map_err(NcclError::from).and_then(|_current| {
            // SAFETY: the communicator lives as long as `self`, and is used for nothing more.
            self.library.accepted("ncclCommFinalize", unsafe { (self.library.nccl_comm_finalize)(self.raw) })
        });
        let done = finalised.and_then(|()| {
            while !self.is_ready()? {
                if Instant::now() >= until {
                    return Err(NcclError::Slow { what: "ncclCommFinalize" });
                }
                std::thread::sleep(LOOK);
            }
            Ok(())
        });
        if let Err(error) = done {
            self.abort();
            return Err(error);
        }
        let note = GivingUp::begin(&self.device);
        let (library, device, raw) = self.into_parts();
        let destroy = move || {
            let destroyed = device.enter().map_err(NcclError::from).and_then(|_current| {
                // SAFETY: finalised, and destroyed once: `self` is no more.
                library.accepted("ncclCommDestroy", unsafe { (library.nccl_comm_destroy)(raw) })
            });
            if let Err(error) = destroyed {
                tracing::warn!(%error, "while leaving an NCCL communicator");
            }
        };
        let thread = note.apart("flux-nccl-destroy", destroy).map_err(|error| NcclError::Thread { reason: error.to_string() })?;
        let Ok(_) = done_by(until.min(Instant::now() + TOGETHER), || Ok::<_, Infallible>(thread.is_finished()));
        Ok(())
    }

    /// Notes that it is given up: what is [left](super::remains::leave) from now on stays until [`GivenUp::end`] has returned.
    pub(super) fn give_up(self) -> GivenUp {
        let note = GivingUp::begin(&self.device);
        GivenUp { messages: self, _note: note }
    }

    /// Gives it up, on a thread of its own.
    pub(super) fn abort(self) {
        let (device, given_up) = (self.device.clone(), self.give_up());
        let abort = move || match device.enter() {
            Ok(_current) => given_up.end(),
            Err(error) => tracing::error!(%error, "no context to give up an NCCL communicator in"),
        };
        if let Err(error) = std::thread::Builder::new().name("flux-nccl-abort".to_owned()).spawn(abort) {
            tracing::error!(%error, "no thread to give up an NCCL communicator on");
        }
    }

    fn into_parts(self) -> (&'static Library, CudaDevice, usize) {
        let this = ManuallyDrop::new(self);
        // SAFETY: `this` is not dropped, so the device's reference is moved out once.
        (this.library, unsafe { std::ptr::read(&raw const this.device) }, this.raw)
    }
}

/// A communicator that is to be given up, for which what its kernels may use stays.
#[derive(Debug)]
pub(super) struct GivenUp {
    messages: Messages,
    _note: GivingUp,
}

impl GivenUp {
    /// Ends what is on streams of it, now and later, without regard for the peers. The device's context is current. The flags that end NCCL's kernels are set
    /// before anything is asked of the driver. Then it may take as long as a peer that is stopped: NCCL waits until processes of this host that have
    /// reached its memory have closed their connections (2.28), and frees what it has on the device.
    pub(super) fn end(self) {
        let Self { messages, _note } = self;
        let (library, _device, raw) = messages.into_parts();
        // SAFETY: the only use of the communicator from now on: `messages` is no more.
        if let Err(error) = library.accepted("ncclCommAbort", unsafe { (library.nccl_comm_abort)(raw) }) {
            tracing::debug!(%error, "while giving up an NCCL communicator");
        }
    }
}

/// Messages that go together. Dropped, it ends the group; [`end`](Self::end) says whether that was accepted.
pub(super) struct Group<'a> {
    of: &'a Messages,
    stream: usize,
    open: bool,
    _current: crate::cuda::Current,
}

impl Group<'_> {
    /// Sends `bytes` bytes to `peer`.
    ///
    /// # Safety
    /// They are memory of the communicator's device, or pinned memory of the host by its address there, until the stream is past the group.
    pub(super) unsafe fn send(&self, from: u64, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let Messages { library, raw, .. } = self.of;
        // SAFETY: the caller's promise.
        let code = unsafe { (library.nccl_send)(source(from), bytes, BYTES, peer.cast_signed(), *raw, self.stream) };
        library.accepted("ncclSend", code)
    }

    /// Receives `bytes` bytes from `peer`.
    ///
    /// # Safety
    /// As [`send`](Self::send), and nobody else uses them meanwhile.
    pub(super) unsafe fn receive(&self, to: u64, bytes: usize, peer: u32) -> Result<(), NcclError> {
        let Messages { library, raw, .. } = self.of;
        // SAFETY: the caller's promise.
        let code = unsafe { (library.nccl_recv)(target(to), bytes, BYTES, peer.cast_signed(), *raw, self.stream) };
        library.accepted("ncclRecv", code)
    }

    /// Hands the messages over.
    pub(super) fn end(mut self) -> Result<(), NcclError> {
        self.open = false;
        self.close()
    }

    fn close(&self) -> Result<(), NcclError> {
        // SAFETY: ends the group that `Messages::group` began on this thread: the guard of the context keeps `self` on it.
        self.of.library.accepted("ncclGroupEnd", unsafe { (self.of.library.nccl_group_end)() })
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open
            && let Err(error) = self.close()
        {
            tracing::debug!(%error, "while ending a group of messages that failed");
        }
    }
}

const BYTES: c_int = ncclDataType_t::ncclUint8 as c_int;

impl Library {
    /// As [`check`](Self::check), where a call may also be under way.
    fn accepted(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == IN_PROGRESS { Ok(()) } else { self.check(call, code) }
    }
}
