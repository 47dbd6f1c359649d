//! Time lines of calls, whoever tells them: stamps of a GPU or of host threads, or the simulator.
//!
//! Invariant: a track covers its worker from begin to end. Tracks of one rank share a clock; ranks
//! are lined up where their first workers begin.

mod stamps;
#[cfg(test)]
mod tests;

pub(crate) use stamps::workers;

use flux_core::simulate::Simulated;
use flux_core::timeline::{Phase, Track};
use std::time::Duration;

/// A worker of a rank: a CTA, an SM of a model, a thread.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worker {
    pub(crate) name: String,
    pub(crate) track: Track,
}

/// A call's time line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// Which call it is.
    pub(crate) title: String,
    /// Where it ran and how, line by line.
    pub(crate) about: Vec<String>,
    /// The workers, by rank.
    pub(crate) ranks: Vec<Vec<Worker>>,
}

impl Call {
    /// A simulated call.
    pub(crate) fn simulated(title: String, about: Vec<String>, call: Simulated) -> Self {
        let worker = |(sm, track)| Worker { name: format!("SM {sm}"), track };
        let rank = |tracks: Vec<Track>| tracks.into_iter().enumerate().map(worker).collect();
        Self { title, about, ranks: call.tracks.into_iter().map(rank).collect() }
    }

    /// From the begin of a rank's first worker to the end of its last, on the rank with the most.
    pub(crate) fn length(&self) -> Duration {
        let of_rank = |rank: &Vec<Worker>| {
            let end = rank.iter().map(|worker| worker.track.end()).max().unwrap_or_default();
            end.saturating_sub(begin(rank))
        };
        self.ranks.iter().map(of_rank).max().unwrap_or_default()
    }

    /// Which call it is, and its exposed wait.
    pub(crate) fn headline(&self) -> String {
        format!("{}: {}", self.title, self.exposed())
    }

    /// How many workers there are on all ranks.
    pub(crate) fn workers(&self) -> usize {
        self.ranks.iter().map(Vec::len).sum()
    }

    /// The time that all workers together wait, in words.
    pub(crate) fn exposed(&self) -> String {
        let all: Vec<&Worker> = self.ranks.iter().flatten().collect();
        let wait = total(&all, Phase::Wait);
        let mean = wait / u32::try_from(all.len()).unwrap_or(u32::MAX).max(1);
        format!(
            "exposed wait {} us of {} workers, {} us each, {:.1} %",
            us(wait),
            all.len(),
            us(mean),
            percent(wait, lives(&all))
        )
    }
}

/// When a rank's first worker begins.
pub(crate) fn begin(rank: &[Worker]) -> Duration {
    rank.iter().map(|worker| worker.track.begin()).min().unwrap_or_default()
}

/// The time of workers in a phase.
pub(crate) fn total(workers: &[&Worker], phase: Phase) -> Duration {
    workers.iter().map(|worker| worker.track.total(phase)).sum()
}

/// The time of workers from begin to end.
pub(crate) fn lives(workers: &[&Worker]) -> Duration {
    workers.iter().map(|worker| worker.track.end().saturating_sub(worker.track.begin())).sum()
}

/// A part of a whole, in per cent.
pub(crate) fn percent(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { 100.0 * part.as_secs_f64() / whole.as_secs_f64() }
}

/// Microseconds with a digit behind the point.
pub(crate) fn us(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e6)
}
