//! Choices by timing before a measurement: the baseline's algorithm, and the length of the spin.
//!
//! Invariant: a first use, which may load a kernel, decides nothing.

use crate::harness::Span;
use std::time::Duration;

/// Least time for which the spinning kernel holds the stream.
pub(crate) const SPIN: Duration = Duration::from_micros(100);
/// Samples of a candidate, and how many of them are thrown away.
const SAMPLES: usize = 8;
const SETTLING: usize = 3;
/// Candidates that are judged by more than one sample.
const SHORT: usize = 16;

/// The samples that a candidate is judged by; `sample` is told their numbers.
pub(crate) fn settled(
    mut sample: impl FnMut(usize) -> anyhow::Result<Span>,
) -> anyhow::Result<Vec<Span>> {
    let spans = (0..SAMPLES).map(&mut sample).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(spans[SETTLING..].to_vec())
}

/// The candidates of the least single times, as many as are worth more samples.
pub(crate) fn shortlist(
    candidates: usize,
    mut once: impl FnMut(usize) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<usize>> {
    let mut short: Vec<usize> = (0..candidates).collect();
    if candidates > SHORT {
        let times =
            short.iter().map(|&candidate| once(candidate)).collect::<anyhow::Result<Vec<f64>>>()?;
        short.sort_by(|&a, &b| times[a].total_cmp(&times[b]));
        short.truncate(SHORT);
    }
    Ok(short)
}

/// The candidate of the least `median`; the first where there is no figure.
pub(crate) fn fastest(
    candidates: usize,
    mut median: impl FnMut(usize) -> anyhow::Result<f64>,
) -> anyhow::Result<usize> {
    let medians = (0..candidates).map(&mut median).collect::<anyhow::Result<Vec<_>>>()?;
    let best = (0..candidates).min_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    Ok(best.unwrap_or(0))
}

/// The longest that `enqueue` says of any contender, once everything is loaded.
pub(crate) fn longest_enqueue<C: Copy>(
    contenders: &[C],
    mut enqueue: impl FnMut(C, usize) -> anyhow::Result<Duration>,
) -> anyhow::Result<Duration> {
    let mut longest = Duration::ZERO;
    for round in 0..2 * SETTLING {
        for &contender in contenders {
            let took = enqueue(contender, round)?;
            if round >= SETTLING {
                longest = longest.max(took);
            }
        }
    }
    Ok(longest)
}

/// For how long to hold a stream on which the host takes `longest` to enqueue what is timed.
pub(crate) fn spin(longest: Duration) -> Duration {
    SPIN.max(longest + longest / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_samples_are_taken_of_the_fastest_few() {
        assert_eq!(
            shortlist(SHORT, |_| anyhow::bail!("not asked")).unwrap(),
            (0..SHORT).collect::<Vec<_>>()
        );
        let short = shortlist(3 * SHORT, |candidate| Ok(-(candidate as f64))).unwrap();
        assert_eq!(short, (2 * SHORT..3 * SHORT).rev().collect::<Vec<_>>());
        assert!(shortlist(2 * SHORT, |_| anyhow::bail!("refused")).is_err());
    }

    #[test]
    fn first_uses_decide_nothing_and_the_least_median_everything() {
        let spans = settled(|round| {
            Ok(Span { start: 0.0, end: if round < 3 { 100.0 } else { round as f64 } })
        })
        .unwrap();
        assert_eq!(spans.iter().map(|s| s.end).collect::<Vec<_>>(), [3.0, 4.0, 5.0, 6.0, 7.0]);
        let medians = [3.0, 1.0, 2.0, 1.0, f64::NAN];
        assert_eq!(
            (fastest(5, |c| Ok(medians[c])).unwrap(), fastest(0, |_| Ok(0.0)).unwrap()),
            (1, 0)
        );
        assert!(fastest(1, |_| anyhow::bail!("refused")).is_err());
        let micros = |us| Duration::from_micros(us);
        let longest = longest_enqueue(&[1, 2], |contender, round| {
            Ok(micros(if round < 3 { 900 } else { 100 * contender }))
        });
        assert_eq!(longest.unwrap(), micros(200));
        assert_eq!((spin(micros(10)), spin(micros(200))), (micros(100), micros(300)));
    }
}
