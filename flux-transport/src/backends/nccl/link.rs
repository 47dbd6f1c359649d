//! The communicators of a rank's calls, which another thread may take away.
//!
//! Invariant: a thread that uses the messages holds their lock, also while the end of a group waits
//! for a full stream. Nobody waits for that lock before the family was given up, which ends that
//! wait. The family's lock is held only for what waits for nobody. Once the family was taken, no
//! group is begun. Both are given up with the link.

use super::handle::Group;
use super::library::NcclError;
use super::members::Members;
use super::messages::{Family, GivenUp, Messages, Use, abort, close};
use super::proof::prove;
use super::{deferred, messages};
use crate::backends::connect_error::ConnectError;
use crate::bootstrap::control::{Collective, together};
use crate::sync::locked;
use flux_cuda::{CudaDevice, SideStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// One rank's end of the messages.
#[derive(Debug)]
pub(crate) struct Link {
    family: Mutex<Option<Family>>,
    messages: Mutex<Option<Messages>>,
}

impl Link {
    /// Joins the ranks of a rail, each of which then sends every other a message on `stream`, which
    /// is given back. Collective over the whole world, also where each rail makes a communicator of
    /// its own: if it fails on one rank it fails on all.
    pub(crate) fn join(
        device: &CudaDevice,
        stream: SideStream,
        members: &Members,
        steps: Collective<'_>,
        until: Instant,
    ) -> Result<(Arc<Self>, SideStream), ConnectError> {
        let joined = messages::join(device, members, until);
        let joined = joined.map_err(|error| ConnectError::Transport(error.into()));
        let link = together(steps, until, joined.map(Self::new))?;
        let proven = prove(device, &stream, &link, members, until);
        match together(steps, until, proven) {
            Ok(()) => Ok((link, stream)),
            Err(error) => {
                drop(link);
                deferred::defer(device, stream);
                Err(error)
            }
        }
    }

    fn new((family, messages): (Family, Messages)) -> Arc<Self> {
        Arc::new(Self { family: Mutex::new(Some(family)), messages: Mutex::new(Some(messages)) })
    }

    /// Puts one group on `stream`; returns when it is there.
    pub(super) fn group(
        &self,
        by: Use,
        stream: usize,
        fill: impl FnOnce(&Group<'_>) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        let messages = locked(&self.messages);
        if locked(&self.family).is_none() {
            return Err(NcclError::GivenUp);
        }
        let group = messages.as_ref().ok_or(NcclError::GivenUp)?.group(by, stream)?;
        fill(&group)?;
        group.end()
    }

    /// NCCL's error, where something has failed.
    pub(super) fn status(&self) -> Result<(), NcclError> {
        locked(&self.family).as_ref().ok_or(NcclError::GivenUp)?.is_ready().map(|_| ())
    }

    /// Takes the family; whoever has it ends it and the [messages](Self::messages).
    fn family(&self) -> Option<Family> {
        locked(&self.family).take()
    }

    /// Takes the family, to give it up and then the [messages](Self::messages); nothing where that
    /// was done.
    pub(super) fn give_up(&self) -> Option<GivenUp> {
        self.family().map(Family::give_up)
    }

    /// Takes the messages, when no call uses them any more.
    pub(super) fn messages(&self) -> Option<Messages> {
        locked(&self.messages).take()
    }

    /// Gives both up, on a thread of its own.
    pub(super) fn abort(self: &Arc<Self>) {
        if let Some(family) = self.family() {
            let link = Arc::clone(self);
            abort(family, move || link.messages());
        }
    }

    /// Leaves in good order, unless it was given up before. No call is under way.
    pub(super) fn close(&self, until: Instant) -> Result<(), NcclError> {
        match self.family().and_then(|family| Some((family, self.messages()?))) {
            Some((family, messages)) => close(family, messages, until),
            None => Ok(()),
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(family) = self.family() {
            let messages = self.messages();
            abort(family, || messages);
        }
    }
}
