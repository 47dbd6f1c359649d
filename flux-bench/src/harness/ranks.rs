//! Ranks as threads of this process.
//!
//! Invariant: when [`on_threads`] returns, every rank's body has ended. An error names each failed
//! rank, and each reason once.

use crate::end::{self, Told};
use anyhow::{Context, anyhow};
use flux_core::Rank;
use flux_transport::World;
use flux_transport::internal::control::ranks as named;

/// Runs `body` for each world on a thread of its own, and returns the results in rank order.
pub(crate) fn on_threads<R: Send>(
    worlds: Vec<World>,
    body: impl Fn(&World) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<R>> {
    let body = &body;
    let results: Vec<anyhow::Result<R>> = std::thread::scope(|scope| {
        let start = |(rank, world): (usize, World)| {
            std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .spawn_scoped(scope, move || body(&world))
        };
        let threads: Vec<_> = worlds.into_iter().enumerate().map(start).collect();
        let join =
            |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, anyhow::Result<R>>>| {
                thread
                    .context("no thread for a rank")?
                    .join()
                    .unwrap_or_else(|panic| Err(anyhow!("panicked: {}", words(&*panic))))
            };
        threads.into_iter().map(join).collect()
    });
    if results.iter().all(Result::is_ok) {
        return results.into_iter().collect();
    }
    let mut told = Told::default();
    for (rank, error) in
        (0..).map(Rank::new).zip(results).filter_map(|(r, of)| Some((r, of.err()?)))
    {
        told.add(rank, end::words(&error));
    }
    let line = |(ranks, words): &(Vec<Rank>, String)| format!("{}: {words}", named(ranks));
    Err(anyhow!(told.0.iter().map(line).collect::<Vec<_>>().join("\n")))
}

fn words(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or(panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a message")
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
        assert_eq!(
            on_threads(World::local(3).unwrap(), |w| Ok(w.rank().get())).unwrap(),
            [0, 1, 2]
        );
    }

    #[test]
    fn what_several_ranks_fail_with_is_said_once() {
        let body = |world: &World| -> anyhow::Result<()> {
            match world.rank().get() {
                0 | 2 | 3 => Err(anyhow!("no room").context("a step")),
                1 => anyhow::bail!("no time"),
                _ => Ok(()),
            }
        };
        let error = on_threads(World::local(5).unwrap(), body).unwrap_err().to_string();
        assert_eq!(error, "ranks 0, 2 and 3: a step: no room\nrank 1: no time");
    }
}
