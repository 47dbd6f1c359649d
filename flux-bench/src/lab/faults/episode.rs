//! One episode: the injection and its expected outcome.
//!
//! Invariant: an episode begins with a whole group of working ranks, and ends with one unless it
//! ends early.

use super::messages::{FailureKind, Reply, Request};
use super::process::Process;
use super::suite::{EarlyEnd, Suite};
use super::tally::{Finding, Injection};
use crate::machine::now_ns;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// How late after its deadline a timeout may come.
const SLACK: Duration = Duration::from_millis(500);
/// The same of ranks that take turns on a device: the kernel ahead of a wait, and the end of what
/// was given up, each come when their rank has its turn.
const SLACK_BY_TURNS: Duration = Duration::from_secs(1);
/// How long a stopped rank stays stopped beyond the deadline at least, so that every wait has
/// expired.
const SOON: Duration = Duration::from_millis(100);
/// The same of ranks that take turns on a device.
const SOON_BY_TURNS: Duration = Duration::from_millis(300);
/// How late after a kill a loss may be seen.
const LOSS: Duration = Duration::from_secs(1);
/// Calls of a short stop: some hundred milliseconds, the stop not counted.
const CALLS: u64 = 300;
/// The same of ranks that take turns on a device, each call of which takes tens of milliseconds.
const CALLS_BY_TURNS: u64 = 30;

impl Suite<'_> {
    /// One fault and what follows it; `survivors`: whether they rebuild before a replacement comes.
    pub(super) fn episode(
        &mut self,
        injection: Injection,
        survivors: bool,
    ) -> Result<(), EarlyEnd> {
        let victim = self.below(u64::from(self.args.ranks)) as usize;
        let moment = Duration::from_micros(self.below(60_000));
        match injection {
            Injection::ShortStop => self.short_stop(victim, moment)?,
            _ => self.loss(injection, victim, moment, survivors)?,
        }
        self.tally.injected(injection);
        Ok(())
    }

    fn short_stop(&mut self, victim: usize, moment: Duration) -> Result<(), EarlyEnd> {
        let calls = if self.args.ranks_per_gpu > 1 { CALLS_BY_TURNS } else { CALLS };
        self.request_all(Request::Run { calls })?;
        std::thread::sleep(moment);
        self.ranks[victim].signal(Signal::STOP)?;
        let stop = self.args.deadline().mul_f64(0.1 + 0.4 * self.below(1000) as f64 / 1000.0);
        std::thread::sleep(stop);
        self.ranks[victim].signal(Signal::CONT)?;
        let limit = self.limit();
        // All reply first: who waited for whom shows in all of their ends.
        let reports: Vec<Reply> =
            (0..self.ranks.len()).map(|at| self.next_reply(at, limit)).collect::<Result<_, _>>()?;
        let mut early = false;
        for (at, report) in reports.iter().enumerate() {
            if let Reply::Done { wrong } = report {
                self.tally.count_wrong(at as u32, *wrong, "around a short stop");
            } else {
                let words =
                    format!("rank {at} after {stop:?} of a stop of rank {victim}: {report:?}");
                self.tally.count(Finding::Misnamed, &words);
                early = true;
            }
        }
        if early { Err(EarlyEnd(None)) } else { Ok(()) }
    }

    /// A rank that is lost to the others, for good or for too long.
    fn loss(
        &mut self,
        injection: Injection,
        victim: usize,
        moment: Duration,
        survivors: bool,
    ) -> Result<(), EarlyEnd> {
        let away = self.below(20);
        for at in 0..self.ranks.len() {
            let calls =
                if injection == Injection::Missing && at == victim { away } else { u64::MAX };
            self.ranks[at].request(Request::Run { calls })?;
        }
        if injection == Injection::Missing {
            let limit = self.limit();
            let report = self.next_reply(victim, limit)?;
            if !matches!(report, Reply::Done { wrong: 0 }) {
                let words = format!("rank {victim}, which was to stay away, says {report:?}");
                return Err(self.early(Finding::Broken, &words));
            }
        } else {
            std::thread::sleep(moment);
        }
        let injected = now_ns();
        match injection {
            Injection::Kill => self.ranks[victim].signal(Signal::KILL)?,
            Injection::LongStop => self.ranks[victim].signal(Signal::STOP)?,
            _ => {}
        }
        // Half of these ranks run on while the others detect the stop, the rest after the rebuild.
        let soon = injection == Injection::LongStop && self.below(2) == 0;
        if soon {
            let soon = if self.args.ranks_per_gpu > 1 { SOON_BY_TURNS } else { SOON };
            let beyond = Duration::from_millis(self.below(200)) + soon;
            std::thread::sleep(
                (self.args.deadline() + beyond)
                    .saturating_sub(Duration::from_nanos(now_ns() - injected)),
            );
            self.ranks[victim].signal(Signal::CONT)?;
        }
        self.all_failed(injection, victim, injected)?;
        let mut late = self.ranks.remove(victim);
        if soon {
            self.has_failed(&mut late)?;
        }
        if survivors {
            self.request_all(Request::Rebuild { whole: false })?;
            self.all_ready(self.args.ranks - 1, false)?;
            self.tally.rebuilt_with_survivors += 1;
        }
        let replacement = self.start(victim as u32)?;
        self.request_all(Request::Rebuild { whole: true })?;
        self.ranks.insert(victim, replacement);
        // It holds memory of its GPU, and the others' old memory for as long as it maps that.
        let alone = late.ended(Instant::now())?;
        self.all_ready(self.args.ranks, alone)?;
        self.tally.rebuilt_whole += 1;
        match injection {
            Injection::Kill => Ok(()),
            _ if soon => Ok(()),
            _ => self.runs_on(injection, late),
        }
    }

    /// Whether every rank but the victim fails as it must, in time.
    fn all_failed(
        &mut self,
        injection: Injection,
        victim: usize,
        injected: u64,
    ) -> Result<(), EarlyEnd> {
        let (limit, deadline) = (self.limit(), self.args.deadline());
        let slack = if self.args.ranks_per_gpu > 1 { SLACK_BY_TURNS } else { SLACK };
        for at in (0..self.ranks.len()).filter(|&at| at != victim) {
            let report = self.next_reply(at, limit)?;
            let Reply::Failed { how, began, ended, wrong, text } = report else {
                let words = format!("rank {at} after {injection:?} of rank {victim}: {report:?}");
                return Err(self.early(Finding::Misnamed, &words));
            };
            let lasted = Duration::from_nanos(ended - began);
            let after = Duration::from_nanos(ended.saturating_sub(injected.max(began)));
            let (named, timely) = if injection == Injection::Kill {
                self.tally.slowest_loss = self.tally.slowest_loss.max(after);
                (how == FailureKind::PeerLost { rank: victim as u32 }, after < LOSS)
            } else {
                self.tally.slowest_timeout =
                    self.tally.slowest_timeout.max(after.saturating_sub(deadline));
                (
                    how == FailureKind::Timeout { late: vec![victim as u32] },
                    lasted >= deadline && after <= deadline + slack,
                )
            };
            if !named {
                let words = format!("rank {at} after {injection:?} of rank {victim}: {text}");
                self.tally.count(Finding::Misnamed, &words);
            }
            if !timely {
                let words = format!(
                    "rank {at} after {injection:?} of rank {victim}: {after:?} later, in a call of \
                     {lasted:?}: {text}"
                );
                self.tally.count(Finding::Mistimed, &words);
            }
            let when = format!("before {injection:?} of rank {victim}");
            self.tally.count_wrong(at as u32, wrong, &when);
        }
        Ok(())
    }

    /// Checks that a rank which the others gave up fails, and ends on request.
    fn has_failed(&mut self, late: &mut Process) -> Result<(), EarlyEnd> {
        let limit = self.limit();
        let itself = FailureKind::Timeout { late: vec![late.rank] };
        match late.reply(limit)? {
            // It has nobody else to blame, whatever its own waits came to while it was stopped. It
            // may know so before it hears from those that gave it up.
            Some(Reply::Failed { wrong: 0, how, .. })
                if matches!(how, FailureKind::Aborted { .. }) || how == itself => {}
            None => self.tally.count(Finding::Hang, &format!("rank {}, which ran on", late.rank)),
            Some(other) => {
                let words = format!("rank {}, which ran on, says {other:?}", late.rank);
                self.tally.count(Finding::Misnamed, &words);
            }
        }
        late.request(Request::Quit)?;
        if !late.ended(limit)? {
            let words = format!("rank {}, which ran on, does not end", late.rank);
            self.tally.count(Finding::Hang, &words);
        }
        Ok(())
    }

    /// Lets a given-up rank run on: it must fail, and the group must compute right results.
    fn runs_on(&mut self, injection: Injection, mut late: Process) -> Result<(), EarlyEnd> {
        match injection {
            Injection::LongStop => late.signal(Signal::CONT)?,
            _ => late.request(Request::Run { calls: 1 })?,
        }
        self.request_all(Request::Run { calls: 20 })?;
        self.has_failed(&mut late)?;
        let limit = self.limit();
        for at in 0..self.ranks.len() {
            let report = self.next_reply(at, limit)?;
            let Reply::Done { wrong } = report else {
                let words = format!("rank {at}, beside a late rank: {report:?}");
                return Err(self.early(Finding::Misnamed, &words));
            };
            self.tally.count_wrong(at as u32, wrong, "beside a late rank");
        }
        Ok(())
    }
}
