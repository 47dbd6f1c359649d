//! Calls back to back, until clocks and temperatures are those of a machine at work.
//!
//! Invariant: the contenders alternate in blocks of equal length, and none always follows the same
//! other, so all run at the same clocks. The first block of each does not count.

use super::measure::{Contender, Contenders, in_round, slowest};
use crate::harness::{Span, Times};
use crate::report::{Each, Sustained};
use anyhow::Context;
use flux_transport::Communicator;

/// Length of a block in seconds: many calls, and short beside the seconds that temperatures take.
const BLOCK_SECONDS: f64 = 0.5;
/// The contenders that overlap efficiency is made of.
const TURNS: [Contender; 3] = [Contender::Op, Contender::Gemm, Contender::Serial];

/// Runs each contender for `seconds` in blocks sized by `short`'s medians. Collective; every rank
/// gets the same result.
pub(crate) fn sustain(
    contenders: &mut dyn Contenders,
    comm: &Communicator,
    short: &Each<Times>,
    seconds: f64,
) -> anyhow::Result<Sustained> {
    let length = BLOCK_SECONDS.min(seconds);
    // The clock can find that a call took no time.
    let calls =
        TURNS.map(|contender| count(length / (contender.of(short).median * 1e-3).max(1e-6)));
    let mut spans: [Vec<Span>; 3] = Default::default();
    for round in 0..=count(seconds / length) {
        for turn in in_round(&[0, 1, 2], round) {
            let contender = TURNS[turn];
            let span = contenders
                .block(contender, calls[turn])
                .with_context(|| format!("{contender:?}, block {round}"))?;
            if round > 0 {
                spans[turn].push(span);
            }
        }
    }
    let [op, gemm, serial] = [0, 1, 2]
        .map(|turn| Ok::<_, anyhow::Error>(slowest(comm, &spans[turn])?.over(calls[turn] as f64)));
    Ok(Sustained::new(seconds, spans[0].len() as u32, [op?, gemm?, serial?], short))
}

/// The whole number next to it, at least 1.
#[expect(clippy::cast_sign_loss, reason = "it is at least 1")]
fn count(number: f64) -> usize {
    number.round().max(1.0) as usize
}
