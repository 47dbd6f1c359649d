//! How long the host waits for calls that have failed, and for working ones.
//!
//! Invariant: a limit counts from when it was first needed, and no longer once it is not.

use flux_cuda::look;
use std::time::{Duration, Instant};

/// Deadlines that a kernel may take when nothing is missing that it waits for: it computes.
const COMPUTING: u32 = 4;
/// Besides, for work of the device that is not this communicator's.
const OTHERS: Duration = Duration::from_secs(20);

/// Deadlines for waits without an end of their own, each from when it was first needed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    failed: Option<Instant>,
    works: Option<Instant>,
}

impl Limits {
    /// Polls `done`: true; false once the limits are over. `allowed` returns how long failed calls,
    /// and working ones, are waited for.
    pub(crate) fn wait<E>(
        &mut self,
        mut done: impl FnMut() -> Result<bool, E>,
        mut allowed: impl FnMut() -> (Option<Duration>, Option<Duration>),
    ) -> Result<bool, E> {
        look(|now| {
            if done()? {
                return Ok(Some(true));
            }
            let (failed, works) = allowed();
            Ok(self.are_over(failed, works, now).then_some(false))
        })
    }

    fn are_over(
        &mut self,
        failed: Option<Duration>,
        works: Option<Duration>,
        now: Instant,
    ) -> bool {
        for (limit, allowed) in [(&mut self.failed, failed), (&mut self.works, works)] {
            *limit = allowed.map(|allowed| limit.unwrap_or(now + allowed));
        }
        [self.failed, self.works].into_iter().flatten().any(|limit| now >= limit)
    }
}

/// How long is waited for what has failed, where calls have this deadline.
pub(crate) const fn failing(deadline: Duration) -> Duration {
    deadline.saturating_add(OTHERS)
}

/// How long is waited for what works, where calls have this deadline.
pub(super) const fn working(deadline: Duration) -> Duration {
    deadline.saturating_mul(COMPUTING).saturating_add(OTHERS)
}

/// What is waited for as long as it takes steps, however many it has before it.
#[derive(Debug)]
pub(crate) struct HostSteps<P> {
    allowed: Duration,
    at: Option<P>,
}

impl<P: PartialEq> HostSteps<P> {
    pub(crate) const fn new(deadline: Duration) -> Self {
        Self { allowed: working(deadline), at: None }
    }

    /// How long a host at `place` may take to its next step, counted anew from each.
    pub(crate) fn allowed(&mut self, place: P) -> Option<Duration> {
        let stands = self.at.as_ref() == Some(&place);
        self.at = Some(place);
        stands.then_some(self.allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_works_is_waited_for_and_what_has_failed_for_the_deadline() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let mut limits = Limits::default();
        let mut over = |failed: bool, stands: bool, after: u32| {
            limits.are_over(
                failed.then_some(second),
                stands.then_some(4 * second),
                start + after * second,
            )
        };
        assert!(!over(false, false, 1000));
        assert!(!over(false, true, 1001));
        assert!(!over(false, true, 1004));
        assert!(!over(false, false, 1006), "it has taken a step");
        assert!(!over(true, true, 1007));
        assert!(over(true, true, 1008));
        let mut limits = Limits::default();
        assert!(!limits.are_over(None, Some(4 * second), start));
        assert!(
            limits.are_over(None, Some(4 * second), start + 4 * second),
            "a kernel that does not end, without a fault"
        );
    }

    #[test]
    fn who_takes_steps_is_waited_for_and_who_stands_is_given_up_though_nothing_has_failed() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        let (mut steps, mut limits) = (HostSteps::new(second), Limits::default());
        let mut over = |place: u32, after: u32| {
            limits.are_over(None, steps.allowed(place), start + after * second)
        };
        assert!((0..1000).all(|step| !over(step, 20 * step)), "a long queue");
        assert!(!over(999, 20_000));
        assert!(!over(999, 20_023));
        assert!(!over(1000, 20_024), "it came in time");
        assert!(!over(1000, 20_025));
        assert!(
            over(1000, 20_049),
            "four deadlines and 20 s after it was first seen to stand there"
        );
    }
}
