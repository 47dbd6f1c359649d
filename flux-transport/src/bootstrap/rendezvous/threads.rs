//! Ranks that are threads of one process exchange bytes in its memory.

use super::Rendezvous;
use crate::bootstrap::deadlines::WAITING_FOR_RANKS;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::unblock::{LOOK, cancelled, on_own_thread};
use crate::sync::{locked, wait_timeout};
use async_trait::async_trait;
use flux_core::{Rank, WorldSize};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// One rank's end of a [`Rendezvous`] of threads, which may be ranks of several worlds.
///
/// ```
/// use flux_transport::{ThreadRendezvous, World, WorldError, WorldSize};
/// use std::sync::Arc;
/// let world = WorldSize::new(2).unwrap();
/// std::thread::scope(|scope| {
///     let meet = |(rank, end): (_, Arc<ThreadRendezvous>)| {
///         World::builder(rank, world).meet_blocking(end)
///     };
///     let ends = world.ranks().zip(ThreadRendezvous::group(world));
///     let ranks: Vec<_> = ends.map(|end| scope.spawn(move || meet(end))).collect();
///     ranks.into_iter().try_for_each(|rank| rank.join().expect("no rank panics").map(drop))
/// })?;
/// # Ok::<(), WorldError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ThreadRendezvous {
    rank: Rank,
    world: WorldSize,
    given: Arc<Given>,
}

/// What each rank has given, by generation and rank.
#[derive(Debug, Default)]
struct Given {
    payloads: Mutex<BTreeMap<u64, BTreeMap<Rank, Vec<u8>>>>,
    changed: Condvar,
}

impl ThreadRendezvous {
    /// The ends of a group, by rank.
    pub fn group(world: WorldSize) -> Vec<Arc<Self>> {
        let given = Arc::<Given>::default();
        world
            .ranks()
            .map(|rank| Arc::new(Self { rank, world, given: Arc::clone(&given) }))
            .collect()
    }

    fn exchanged(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let Self { rank, world, given } = self;
        let mut payloads = locked(&given.payloads);
        payloads.entry(generation).or_default().insert(*rank, payload);
        given.changed.notify_all();
        loop {
            let came = payloads.entry(generation).or_default();
            if came.len() == world.index() {
                return Ok(came.values().cloned().collect());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || cancelled() {
                return Err(BootstrapError::Timeout {
                    step: WAITING_FOR_RANKS,
                    missing: world.ranks().filter(|rank| !came.contains_key(rank)).collect(),
                    denied: 0,
                    sought: None,
                });
            }
            payloads = wait_timeout(&given.changed, payloads, left.min(LOOK));
        }
    }
}

#[async_trait]
impl Rendezvous for ThreadRendezvous {
    async fn exchange(
        &self,
        generation: u64,
        payload: Vec<u8>,
        deadline: Instant,
    ) -> Result<Vec<Vec<u8>>, BootstrapError> {
        let end = self.clone();
        on_own_thread(move || end.exchanged(generation, payload, deadline)).await
    }
}
