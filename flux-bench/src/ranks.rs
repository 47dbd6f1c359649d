//! Ranks as threads of this process.
//!
//! Invariant: when [`on_threads`] returns, every rank's body has ended, and an error names each rank that failed.

use crate::end;
use anyhow::{Context, anyhow};
use flux_transport::World;
use std::fmt::Write as _;

/// Runs `body` once for each world, each on a thread of its own, and returns the results in rank order.
///
/// # Errors
/// What the ranks' bodies failed with, or that one panicked. A rank that fails gives up its communicator, so the others do not wait for it.
pub fn on_threads<R: Send>(worlds: Vec<World>, body: impl Fn(&World) -> anyhow::Result<R> + Sync) -> anyhow::Result<Vec<R>> {
    let body = &body;
    let results: Vec<anyhow::Result<R>> = std::thread::scope(|scope| {
        let start = |(rank, world): (usize, World)| {
            std::thread::Builder::new().name(format!("rank {rank}")).spawn_scoped(scope, move || body(&world))
        };
        let threads: Vec<_> = worlds.into_iter().enumerate().map(start).collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, anyhow::Result<R>>>| {
            thread.context("no thread for a rank")?.join().unwrap_or_else(|panic| Err(anyhow!("panicked: {}", words(&*panic))))
        };
        threads.into_iter().map(join).collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect();
    }
    let mut text = String::new();
    for (rank, error) in results.into_iter().enumerate().filter_map(|(rank, r)| Some((rank, r.err()?))) {
        let separator = if text.is_empty() { "" } else { "\n" };
        let _infallible = write!(text, "{separator}rank {rank}: {}", end::words(&error));
    }
    Err(anyhow!(text))
}

fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_that_fails_is_named() {
        let worlds = World::local(4).unwrap();
        let body = |world: &World| match world.rank().get() {
            1 => anyhow::bail!("out of luck"),
            2 => panic!("out of order"),
            rank => Ok(rank),
        };
        let error = on_threads(worlds, body).unwrap_err().to_string();
        assert_eq!(error, "rank 1: out of luck\nrank 2: panicked: out of order");
        assert_eq!(on_threads(World::local(3).unwrap(), |w| Ok(w.rank().get())).unwrap(), [0, 1, 2]);
    }
}
