//! The communicators of this process, by number.
//!
//! Invariant: a number names one communicator for as long as the process lives. Those of a parent
//! stay alone in a forked child.

use crate::error::{Error, of_world};
use crate::ops::{Call, Limits, Ops};
use crate::signals::{INTERRUPTED, heard, raise_later};
use flux_ops::binding::{Class, Handles, OfProcess};
use flux_ops::{Location, Quantizer};
use flux_transport::{Communicator, ConnectError, Options, World};
use pyo3::PyResult;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A communicator with its ops.
pub(crate) struct Member {
    // Before the communicator, of which they hold clones.
    pub(crate) ops: Ops,
    quantizer: OnceLock<Quantizer>,
    pub(crate) comm: Communicator,
}

impl Member {
    pub(crate) fn new(comm: Communicator, limits: Limits) -> Self {
        Self { ops: Ops::new(comm.clone(), limits), quantizer: OnceLock::new(), comm }
    }

    /// Runs work that may wait for other ranks. What a handler of a signal raises meanwhile aborts
    /// the communicator, on all ranks.
    ///
    /// # Errors
    /// What the handler has raised.
    pub(crate) fn hearing_signals<T: Send>(
        &self,
        work: impl FnOnce(&Self) -> T + Send,
    ) -> PyResult<T> {
        heard(|| self.comm.abort(INTERRUPTED), || work(self))
    }

    /// Makes a call of torch's: on the host it waits for the other ranks.
    ///
    /// # Safety
    /// As of [`Ops::call`].
    pub(crate) unsafe fn call_in_kernel(&self, call: &Call<'_>) -> Result<(), Error> {
        // SAFETY: as the caller vouches.
        let made = |member: &Self| unsafe { member.ops.call(call) };
        if self.location() != Location::Host {
            return made(self);
        }
        self.hearing_signals(made).unwrap_or_else(|raised| {
            let error = Error::new(Class::Aborted, format!("the call was interrupted: {raised}"));
            raise_later(raised);
            Err(error)
        })
    }

    /// What quantises rows, loaded on first use.
    pub(crate) fn quantizer(&self) -> Result<&Quantizer, Error> {
        if let Some(quantizer) = self.quantizer.get() {
            return Ok(quantizer);
        }
        let loaded = Quantizer::new(&self.comm)?;
        Ok(self.quantizer.get_or_init(|| loaded))
    }

    /// Where operands must be.
    pub(crate) fn location(&self) -> Location {
        self.comm.device().info().map_or(Location::Host, |info| Location::Cuda(info.ordinal))
    }
}

static MEMBERS: Handles<Member> = Handles::new();
/// The launcher's world, which is joined once.
static LAUNCHED: Mutex<Option<OfProcess<World>>> = Mutex::new(None);

/// Keeps a communicator, and returns its number.
///
/// Rank and world size are part of it. Shapes of results follow from both, and torch keeps compiled
/// graphs by the arguments of their ops, on disk and for other worlds too.
pub(crate) fn keep(member: Member) -> u64 {
    let (rank, world) =
        (u64::from(member.comm.rank().get()), u64::from(member.comm.world_size().get()));
    let number = Handles::<Member>::number() << 16 | world << 8 | rank;
    MEMBERS.keep(number, member);
    number
}

/// The communicator with this number.
///
/// # Errors
/// It is closed.
pub(crate) fn named(number: u64) -> Result<Arc<OfProcess<Member>>, Error> {
    let closed = || {
        Error::new(
            Class::Other,
            "the communicator is closed: call flux_tp.init again on every rank",
        )
    };
    MEMBERS.get(number).ok_or_else(closed)
}

/// The value, if this process has made it.
pub(crate) fn here<T>(value: &OfProcess<T>) -> Result<&T, Error> {
    value.get().map_err(|process| {
        let this = std::process::id();
        Error::new(
            Class::Other,
            format!(
                "this communicator belongs to process {process}, and this is process {this}, \
                 forked from it: call flux_tp.init in each process, or start workers with spawn"
            ),
        )
    })
}

/// Leaves the communicator with this number, when the calls in progress have ended.
pub(crate) fn close(number: u64) {
    drop(MEMBERS.remove(number));
}

/// Leaves all communicators, and the launcher's world.
pub(crate) fn close_all() {
    drop(MEMBERS.remove_all());
    drop(LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Connects in the launcher's world, which it joins first where this process has not. One that fell
/// out of step is left, also when the future is dropped.
#[expect(clippy::await_holding_lock, reason = "the future is polled on one thread to its end")]
pub(crate) async fn connect_launched(
    deadline: Duration,
    options: Options,
) -> Result<Communicator, Error> {
    let mut launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let world = match launched.take() {
        Some(world) if world.get().is_ok() => world,
        _ => OfProcess::new(World::join(deadline).await.map_err(of_world)?),
    };
    let connected = Communicator::connect(here(&world)?, options).await;
    if !matches!(connected, Err(ConnectError::Control(_))) {
        *launched = Some(world);
    }
    Ok(connected?)
}
