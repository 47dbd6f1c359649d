//! Counts of a run of the fault suite.
//!
//! Invariant: a run passes only if nothing was counted against it.

use super::interrupt::Interrupt;
use crate::out;
use std::fmt;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Injection {
    Kill,
    /// SIGSTOP at a random moment, for less than the deadline.
    ShortStop,
    /// SIGSTOP at a random moment, until the others have gone on.
    LongStop,
    /// A rank that stays away from a call.
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finding {
    /// Something that did not end within its limit.
    Hang,
    /// An output that was not right to the bit.
    Wrong,
    /// An error that named another fault or another rank, or none where there had to be one.
    Misnamed,
    /// An error that came too early or too late.
    Mistimed,
    Residue,
    /// A process that ended, or an order that failed, for another reason.
    Broken,
}

const ALL: [(Finding, &str); 6] = [
    (Finding::Hang, "hangs"),
    (Finding::Wrong, "wrong results"),
    (Finding::Misnamed, "misnamed"),
    (Finding::Mistimed, "mistimed"),
    (Finding::Residue, "residue"),
    (Finding::Broken, "broken"),
];

#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    /// Of each [`Injection`], in their order.
    injected: [u32; 4],
    pub(super) rebuilt_with_survivors: u32,
    pub(super) rebuilt_whole: u32,
    finding: [u32; ALL.len()],
    /// After a signal nothing counts: a terminal's signal ends ranks too.
    interrupt: Option<Interrupt>,
    /// The longest time from a kill to a survivor's error.
    pub(super) slowest_loss: Duration,
    /// The longest time beyond the deadline to a timeout.
    pub(super) slowest_timeout: Duration,
}

impl Tally {
    /// Of a run that a signal may end.
    pub(super) fn until(interrupt: Interrupt) -> Self {
        Self { interrupt: Some(interrupt), ..Self::default() }
    }

    /// Counts a fault that was injected and handled.
    pub(super) fn injected(&mut self, injection: Injection) {
        self.injected[injection as usize] += 1;
    }

    /// Counts something against the run, and says what.
    pub(super) fn count(&mut self, finding: Finding, words: &str) {
        if self.interrupt.as_ref().is_some_and(|interrupt| interrupt.came().is_some()) {
            return;
        }
        self.finding[finding as usize] += 1;
        out::line(&format_args!("{finding:?}: {words}"));
    }

    /// Counts a rank's wrong outputs, if there are any.
    pub(super) fn count_wrong(&mut self, rank: u32, wrong: u64, when: &str) {
        if wrong > 0 {
            self.count(Finding::Wrong, &format!("rank {rank}, {wrong} outputs {when}"));
        }
    }

    /// Whether nothing was counted against the run.
    pub(super) fn clean(&self) -> bool {
        self.finding.iter().all(|&count| count == 0)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [kills, short_stops, long_stops, missing] = self.injected;
        let (survivors, whole) = (self.rebuilt_with_survivors, self.rebuilt_whole);
        writeln!(
            f,
            "{kills} kills, {short_stops} short and {long_stops} long stops, {missing} missing; \
             {survivors} rebuilds with survivors, {whole} with replacements"
        )?;
        let (loss, timeout) = (self.slowest_loss.as_secs_f64(), self.slowest_timeout.as_secs_f64());
        writeln!(f, "slowest error {loss:.3} s after a kill, {timeout:.3} s after a deadline")?;
        let counts: Vec<String> = ALL
            .iter()
            .map(|&(finding, name)| format!("{} {name}", self.finding[finding as usize]))
            .collect();
        f.write_str(&counts.join(", "))
    }
}
