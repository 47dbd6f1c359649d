//! Ends a rank that waits for too long in a collective of NCCL.
//!
//! Invariant: inside [`Watchdog::guard`] samples follow each other within the limit and no peer is
//! lost, or the process ends with status 1 and the reason. NCCL's collectives have no deadline.

use crate::end;
use flux_core::Rank;
use flux_transport::World;
use flux_transport::internal::control::{Notice, Watcher};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// For the rank's own error, which says more than that a peer is lost.
const OWN_ERROR: Duration = Duration::from_secs(5);

/// The thread that looks; dropped, it ends.
pub(super) struct Watchdog {
    state: Arc<State>,
    // Forgotten by the control plane once it is dropped.
    _watcher: Arc<Watcher>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    seen: Mutex<Seen>,
    changed: Condvar,
}

#[derive(Default)]
struct Seen {
    /// When something was last timed; none outside of [`Watchdog::guard`].
    last: Option<Instant>,
    lost: Option<(Rank, Instant)>,
    stop: bool,
}

/// What there is to say, or when to look again.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Idle,
    Until(Instant),
    Over(String),
}

impl Seen {
    fn look(&self, now: Instant, limit: Duration) -> Look {
        let Some(last) = self.last else { return Look::Idle };
        let slow = last + limit;
        if let Some((rank, when)) = self.lost {
            // Lost before the wait began, it is lost for this wait too.
            let end = when.max(last) + OWN_ERROR.min(limit);
            if end <= now {
                return Look::Over(format!(
                    "rank {rank} is gone, and a collective of NCCL waits for it"
                ));
            }
            return Look::Until(end.min(slow));
        }
        if slow <= now {
            return Look::Over(format!(
                "nothing was timed for {} s: a rank does not come to a collective of NCCL",
                limit.as_secs_f64()
            ));
        }
        Look::Until(slow)
    }
}

impl State {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen());
        self.changed.notify_all();
    }

    /// Why the process has to end; `None` when the watchdog does.
    fn wait(&self, limit: Duration) -> Option<String> {
        let mut seen = self.seen();
        while !seen.stop {
            let now = Instant::now();
            seen = match seen.look(now, limit) {
                Look::Over(why) => return Some(why),
                Look::Idle => self.changed.wait(seen).unwrap_or_else(PoisonError::into_inner),
                Look::Until(then) => {
                    self.changed
                        .wait_timeout(seen, then - now)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
        None
    }
}

impl Watchdog {
    pub(super) fn start(world: &World, limit: Duration) -> std::io::Result<Self> {
        let state = Arc::new(State::default());
        let theirs = Arc::clone(&state);
        let watcher: Arc<Watcher> = Arc::new(move |notice| {
            if let Notice::Lost(rank) = notice {
                theirs.change(|seen| seen.lost = seen.lost.or(Some((rank, Instant::now()))));
            }
        });
        world.control().watch(Arc::downgrade(&watcher));
        let (theirs, rank) = (Arc::clone(&state), world.rank());
        let thread = std::thread::Builder::new().name(format!("watchdog of rank {rank}")).spawn(
            move || {
                if let Some(why) = theirs.wait(limit) {
                    end::give_up(rank, &anyhow::anyhow!(why));
                }
            },
        )?;
        Ok(Self { state, _watcher: watcher, thread: Some(thread) })
    }

    /// Runs work that may wait in collectives.
    pub(super) fn guard<R>(&self, work: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        self.heartbeat();
        let done = work();
        // After an error the rank gives itself up, and may not come to that.
        if done.is_ok() {
            self.state.change(|seen| seen.last = None);
        }
        done
    }

    /// Restarts the limit.
    pub(super) fn heartbeat(&self) {
        // Without waking the thread: it finds the later time when it looks.
        let first = self.state.seen().last.replace(Instant::now()).is_none();
        if first {
            self.state.changed.notify_all();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.state.change(|seen| seen.stop = true);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that watches a rank has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_mins(1);

    #[test]
    fn a_wait_is_over_at_its_limit_and_earlier_where_a_peer_is_lost() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut seen = Seen::default();
        assert_eq!(seen.look(at(100), LIMIT), Look::Idle);
        seen.last = Some(at(10));
        assert_eq!(seen.look(at(69), LIMIT), Look::Until(at(70)));
        assert!(matches!(seen.look(at(70), LIMIT), Look::Over(why) if why.contains("for 60 s")));
        seen.lost = Some((Rank::new(3), at(20)));
        assert_eq!(seen.look(at(24), LIMIT), Look::Until(at(25)));
        assert!(
            matches!(seen.look(at(25), LIMIT), Look::Over(why) if why.contains("rank 3 is gone"))
        );
        // Something was timed since: it may have needed that rank no more.
        seen.last = Some(at(30));
        assert_eq!(seen.look(at(31), LIMIT), Look::Until(at(35)));
    }

    #[test]
    fn a_watch_tells_of_what_does_not_end_and_ends_with_what_does() {
        let state = Arc::new(State::default());
        let start = Instant::now();
        let limit = Duration::from_millis(50);
        let theirs = Arc::clone(&state);
        let waiting = std::thread::spawn(move || theirs.wait(limit));
        state.change(|seen| seen.last = Some(Instant::now()));
        assert!(waiting.join().unwrap().unwrap().contains("nothing was timed"));
        assert!(start.elapsed() >= limit);
        let worlds = World::local(2).unwrap();
        let watchdog = Watchdog::start(&worlds[0], Duration::from_mins(10)).unwrap();
        let timed = || {
            watchdog.heartbeat();
            Ok(())
        };
        watchdog.guard(timed).unwrap();
        assert!(watchdog.state.seen().last.is_none());
        drop(watchdog);
    }
}
