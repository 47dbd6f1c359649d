//! An NCCL communicator for messages, made, and ended, without blocking.
//!
//! It is two or three. The [family](Family), of all ranks or of a rail, is of NCCL's mode in which
//! calls return at once. There NCCL starts a thread that puts each group on its stream: longer work
//! for the host than a short call. So the communicators that carry data are split from it, of the
//! other mode: the thread that ends a group puts it on its stream. It waits like any launch where
//! the stream is full, for a peer in the end. The family ends that wait: all share NCCL's flag for
//! aborts.
//!
//! Messages beside a kernel have few channels, as each takes a multiprocessor of it. The
//! collectives of sequential calls have a communicator of their own, with the channels that NCCL
//! chooses.
//!
//! Invariant: nothing here waits for another rank without a deadline, but for the end of a group
//! where the stream is full, which [`GivenUp::end`] ends. What NCCL does without one is done on a
//! thread of its own, and [noted](Ending) until it is done.

use super::abi::Config;
use super::deferred::Ending;
use super::handle::{Group, Handle};
use super::library::{NcclError, library, version};
use super::members::Members;
use super::sharing::most;
use flux_cuda::{CudaDevice, done_by, is_by};
use std::time::{Duration, Instant};

/// For the other ranks of this host to leave as well, without whom NCCL does not destroy a
/// communicator. Ranks mostly leave together, and what NCCL may still use is then freed at once.
const TOGETHER: Duration = Duration::from_secs(1);

/// What one rank's messages are split from. Whoever has it ends it, with them, by [`close`] or
/// [`give_up`](Self::give_up).
#[derive(Debug)]
pub(super) struct Family(Handle);

/// One rank's communicators for data, by their [use](Use).
#[derive(Debug)]
pub(super) struct Messages(Vec<(Use, Handle)>);

/// What a communicator is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Messages beside a kernel, which leaves them their channels.
    Overlapped,
    /// Collectives before or after a kernel.
    Sequential,
}

/// Joins the communicator of `members`, and splits those of its uses from it.
pub(super) fn join(
    device: &CudaDevice,
    members: &Members,
    until: Instant,
) -> Result<(Family, Messages), NcclError> {
    let began = Instant::now();
    let library = library()?;
    let ((place, count), sharing, version) =
        (members.place(members.widest()), members.sharing, version()?);
    let (overlapped, own_choice) = (sharing.asked..=sharing.asked, 1..=most(version));
    // A communicator that is split from the family has no more channels than that.
    let all =
        if members.uses().count() > 1 { sharing.asked..=most(version) } else { overlapped.clone() };
    let (mut raw, mut first) = (0, Config::new(false, true, all, sharing.lanes, version));
    let current = device.enter()?;
    let init = library.nccl_comm_init_rank_config;
    // SAFETY: `raw` is a place for the result, the configuration is of the size that it says and is
    // read before the call returns.
    let code = unsafe {
        init(&raw mut raw, count.cast_signed(), members.id, place.cast_signed(), &raw mut first)
    };
    library.accepted("ncclCommInitRankConfig", code)?;
    let family = Family(Handle { library, device: device.clone(), raw });
    let mut messages = Messages(Vec::new());
    let made = members.uses().try_for_each(|by| {
        let channels = if by == Use::Overlapped { overlapped.clone() } else { own_choice.clone() };
        let config = Config::new(true, by == Use::Overlapped, channels, sharing.lanes, version);
        match family.split(members.color(by), members.place(by).0, config, until)? {
            Some(communicator) => messages.0.push((by, communicator)),
            None => return Err(members.incomplete(began.elapsed())),
        }
        Ok(())
    });
    drop(current);
    match made {
        Ok(()) => Ok((family, messages)),
        Err(error) => {
            abort(family, || Some(messages));
            Err(error)
        }
    }
}

/// Leaves in good order: what was sent arrives. For other ranks' leaving it waits a moment only:
/// NCCL may go on with that, and what it may use is to be [deferred](super::deferred::defer)
/// meanwhile. No call is under way.
pub(super) fn close(family: Family, messages: Messages, until: Instant) -> Result<(), NcclError> {
    // Of the messages' own it waits for nothing but their streams, which are past them.
    let finalised = messages.0.iter().try_for_each(|(_, each)| finalize(each)).and_then(|()| {
        finalize(&family.0)?;
        if family.ready_by(until)? {
            Ok(())
        } else {
            Err(NcclError::Slow { what: "ncclCommFinalize" })
        }
    });
    if let Err(error) = finalised {
        abort(family, || Some(messages));
        return Err(error);
    }
    let note = Ending::begin(&family.0.device);
    let destroy = move || {
        for mut communicator in messages.into_all().chain([family.0]) {
            let ended = communicator.device.clone().enter().map_err(NcclError::from);
            if let Err(error) = ended.and_then(|_current| communicator.destroy()) {
                tracing::warn!(%error, "while leaving an NCCL communicator");
            }
        }
    };
    let thread = note
        .apart("flux-nccl-destroy", destroy)
        .map_err(|error| NcclError::Thread { reason: error.to_string() })?;
    is_by(until.min(Instant::now() + TOGETHER), || thread.is_finished());
    Ok(())
}

/// Gives both up, on a thread of its own, which gets the messages when no call uses them any more.
pub(super) fn abort(family: Family, messages: impl FnOnce() -> Option<Messages> + Send + 'static) {
    let (device, given_up) = (family.0.device.clone(), family.give_up());
    let abort = move || match device.enter() {
        Ok(_current) => given_up.end(messages),
        Err(error) => tracing::error!(%error, "no context to give up an NCCL communicator in"),
    };
    if let Err(error) = std::thread::Builder::new().name("flux-nccl-abort".to_owned()).spawn(abort)
    {
        tracing::error!(%error, "no thread to give up an NCCL communicator on");
    }
}

impl Family {
    /// Whether everything that was asked of it is done; NCCL's error where something has failed
    /// since, of the messages too: the threads that serve them are shared.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        self.0.is_ready()
    }

    /// Waits until it is ready; false where it is not by then.
    fn ready_by(&self, until: Instant) -> Result<bool, NcclError> {
        done_by(until, || self.is_ready())
    }

    /// Splits a communicator of its ranks with this `color` from it, if that is done by then, in
    /// which this rank has the number `place`. The device's context is current.
    fn split(
        &self,
        color: u32,
        place: u32,
        mut config: Config,
        until: Instant,
    ) -> Result<Option<Handle>, NcclError> {
        let Handle { library, device, raw } = &self.0;
        if !self.ready_by(until)? {
            return Ok(None);
        }
        // On the heap: NCCL writes it when the split is done, which may be after this has given up.
        let split = Box::into_raw(Box::new(0_usize));
        let (color, place) = (color.cast_signed(), place.cast_signed());
        // SAFETY: the family is ready; `split` is a place for the result until NCCL has written it;
        // the configuration is of the size that it says and is read before the call returns.
        let code = unsafe { (library.nccl_comm_split)(*raw, color, place, split, &raw mut config) };
        library.accepted("ncclCommSplit", code)?;
        if !self.ready_by(until)? {
            return Ok(None);
        }
        // SAFETY: made above, and NCCL is done with it.
        let raw = *unsafe { Box::from_raw(split) };
        Ok(Some(Handle { library, device: device.clone(), raw }))
    }

    /// Notes that it is given up: what is [deferred](super::deferred::defer) from now on stays
    /// until [`GivenUp::end`] has returned.
    pub(super) fn give_up(self) -> GivenUp {
        let note = Ending::begin(&self.0.device);
        GivenUp { family: self, _note: note }
    }
}

/// Has a communicator, which is used for nothing more, deliver what was sent.
fn finalize(handle: &Handle) -> Result<(), NcclError> {
    let Handle { library, device, raw } = handle;
    let _current = device.enter()?;
    // SAFETY: the communicator lives as long as its handle.
    library.accepted("ncclCommFinalize", unsafe { (library.nccl_comm_finalize)(*raw) })
}

/// Ends a communicator and what is on its streams. The device's context is current.
fn abort_one(handle: Handle) {
    if let Err(error) = handle.abort() {
        tracing::debug!(%error, "while giving up an NCCL communicator");
    }
}

impl Messages {
    /// Begins a group, whose operations all go at once; the thread adds them and ends it.
    pub(super) fn group(&self, by: Use, stream: usize) -> Result<Group<'_>, NcclError> {
        let of = self.0.iter().find(|(known, _)| *known == by).map(|(_, of)| of);
        of.ok_or(NcclError::GivenUp)?.group(stream)
    }

    fn into_all(self) -> impl Iterator<Item = Handle> {
        self.0.into_iter().map(|(_, communicator)| communicator)
    }
}

/// A communicator that is to be given up, for which what its kernels may use stays.
#[derive(Debug)]
pub(super) struct GivenUp {
    family: Family,
    _note: Ending,
}

impl GivenUp {
    /// Ends what is on streams of it, now and later, without regard for the peers. Then it ends
    /// what `messages` gives, which may wait for a call of NCCL to return: that returns now. The
    /// device's context is current.
    ///
    /// The flags that end NCCL's kernels are set before anything is asked of the driver. The rest
    /// may take as long as a stopped peer: NCCL waits until processes of this host have closed
    /// their connections to its memory (2.28).
    pub(super) fn end(self, messages: impl FnOnce() -> Option<Messages>) {
        let Self { family, _note } = self;
        abort_one(family.0);
        if let Some(messages) = messages() {
            messages.into_all().for_each(abort_one);
        }
    }
}
