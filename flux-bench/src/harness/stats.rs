//! Order statistics of repeated samples.
//!
//! Invariant: a [`Times`] is taken over rounds, and a round lasts as long as its slowest rank.

use serde::{Deserialize, Serialize};

/// Tenth percentile, median and ninetieth percentile, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// A tenth of the rounds were faster.
    pub p10: f64,
    /// Half of the rounds were faster.
    pub median: f64,
    /// A tenth of the rounds were slower.
    pub p90: f64,
}

/// What one rank says of one round, in milliseconds on a clock that the ranks of the round share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When the rank began; 0 where the ranks were lined up on their devices.
    pub start: f64,
    pub end: f64,
}

impl Times {
    /// Over `rounds` in milliseconds, in any order; `None` without any. Percentiles are
    /// interpolated.
    pub fn of(rounds: &[f64]) -> Option<Self> {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |percent| percentile(&sorted, percent);
        Some(Self { p10: at(10)?, median: at(50)?, p90: at(90)? })
    }

    /// Of one of `calls` that were timed together.
    #[must_use]
    pub fn over(self, calls: f64) -> Self {
        Self { p10: self.p10 / calls, median: self.median / calls, p90: self.p90 / calls }
    }

    /// Over rounds that each rank timed, as [`of_slowest`] has them; `None` without any.
    pub fn of_slowest(ranks: &[Vec<Span>]) -> Option<Self> {
        Self::of(&of_slowest(ranks)?)
    }
}

/// How long each round lasted: `ranks[r][i]` is rank `r`'s span of round `i`, which lasts from the
/// first start to the last end. `None` with different numbers of rounds.
pub(crate) fn of_slowest(ranks: &[Vec<Span>]) -> Option<Vec<f64>> {
    let rounds = ranks.first()?.len();
    if ranks.iter().any(|r| r.len() != rounds) {
        return None;
    }
    let lasts = (0..rounds).map(|i| {
        let start = ranks.iter().map(|r| r[i].start).fold(f64::INFINITY, f64::min);
        let end = ranks.iter().map(|r| r[i].end).fold(f64::NEG_INFINITY, f64::max);
        end - start
    });
    Some(lasts.collect())
}

/// The value below which `percent` hundredths of `sorted` lie, interpolated.
pub(crate) fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let at = percent * sorted.len().checked_sub(1)?;
    let (below, above) = (sorted[at / 100], sorted[at.div_ceil(100)]);
    Some(below + (above - below) * (at % 100) as f64 / 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate_between_neighbours() {
        let t = Times::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        assert_eq!((t.median, t.p10, t.p90), (3.0, 1.4, 4.6));
        assert_eq!(Times::of(&[7.0]).unwrap(), Times { p10: 7.0, median: 7.0, p90: 7.0 });
        assert_eq!(Times::of(&[]), None);
    }

    #[test]
    fn a_round_lasts_from_the_first_start_to_the_last_end() {
        let fast = vec![Span { start: 1.0, end: 2.0 }, Span { start: 10.0, end: 11.0 }];
        let slow = vec![Span { start: 1.5, end: 4.0 }, Span { start: 9.0, end: 10.0 }];
        assert_eq!(of_slowest(&[fast.clone(), slow]).unwrap(), [3.0, 2.0]);
        assert_eq!(of_slowest(&[fast, vec![]]), None);
    }
}
