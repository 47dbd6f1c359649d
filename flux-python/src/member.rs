//! The communicators of this process, by number.
//!
//! Invariant: a number names one communicator for as long as the process lives. Those of a parent
//! stay alone in a forked child.

use crate::error::Error;
use crate::ops::{Limits, Ops};
use crate::process::OfProcess;
use flux_ops::Location;
use flux_transport::{Communicator, World};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// A communicator with its ops.
pub(crate) struct Member {
    // Before the communicator, of which they hold clones.
    pub(crate) ops: Ops,
    pub(crate) comm: Communicator,
}

impl Member {
    pub(crate) fn new(comm: Communicator, limits: Limits) -> Self {
        Self { ops: Ops::new(comm.clone(), limits), comm }
    }

    /// Where operands must be.
    pub(crate) fn location(&self) -> Location {
        self.comm.device().info().map_or(Location::Host, |info| Location::Cuda(info.ordinal))
    }
}

static MEMBERS: RwLock<Option<HashMap<u64, Arc<OfProcess<Member>>>>> = RwLock::new(None);
static NEXT: AtomicU64 = AtomicU64::new(1);
/// The launcher's world, which is joined once.
static LAUNCHED: Mutex<Option<OfProcess<World>>> = Mutex::new(None);

/// Keeps a communicator, and returns its number.
///
/// Rank and world size are part of it. Shapes of results follow from both, and torch keeps compiled
/// graphs by the arguments of their ops, on disk and for other worlds too.
pub(crate) fn keep(member: Member) -> u64 {
    let (rank, world) = (u64::from(member.comm.rank().get()), u64::from(member.comm.world_size().get()));
    let number = NEXT.fetch_add(1, Ordering::Relaxed) << 16 | world << 8 | rank;
    let mut members = MEMBERS.write().unwrap_or_else(PoisonError::into_inner);
    members.get_or_insert_default().insert(number, Arc::new(OfProcess::new(member)));
    number
}

/// The communicator with this number.
///
/// # Errors
/// It is closed.
pub(crate) fn named(number: u64) -> Result<Arc<OfProcess<Member>>, Error> {
    let members = MEMBERS.read().unwrap_or_else(PoisonError::into_inner);
    let member = members.as_ref().and_then(|members| members.get(&number)).map(Arc::clone);
    member.ok_or_else(|| Error::new("FluxError", "the communicator is closed: call flux_tp.init again on every rank"))
}

/// Leaves the communicator with this number, when the calls in progress have ended.
pub(crate) fn close(number: u64) {
    let closed = MEMBERS.write().unwrap_or_else(PoisonError::into_inner).as_mut().and_then(|members| members.remove(&number));
    drop(closed);
}

/// Leaves all communicators, and the launcher's world.
pub(crate) fn close_all() {
    let closed = MEMBERS.write().unwrap_or_else(PoisonError::into_inner).take();
    drop(closed);
    drop(LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner).take());
}

/// Connects in the launcher's world, which it joins first where this process has not.
pub(crate) fn connect_launched(
    deadline: Duration,
    connect: impl FnOnce(&World) -> Result<Communicator, Error>,
) -> Result<Communicator, Error> {
    let mut launched = LAUNCHED.lock().unwrap_or_else(PoisonError::into_inner);
    let world = match launched.take() {
        Some(world) if world.get().is_ok() => world,
        _ => OfProcess::new(World::from_env_with(deadline)?),
    };
    let world = launched.insert(world);
    connect(world.get()?)
}
