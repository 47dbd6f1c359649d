//! Calls back to back, for as long as it takes until clocks and temperatures are those of a machine at work.
//!
//! Invariant: op, GEMM and serial path take turns in blocks of equal length, each as long as the others in all, so that all three run at the
//! clocks that their mixture settles at, and a ratio of them is that of the same machine. The first block of each is thrown away.

use super::measure::{Contender, Lane, slowest};
use crate::report::{Measured, Sustained};
use crate::stats::{Span, Times};
use anyhow::Context;
use flux_transport::Communicator;

/// Length of a block, in seconds: many calls, and short beside the seconds in which temperatures follow.
const BLOCK_SECONDS: f64 = 0.5;
/// The contenders that overlap efficiency is made of.
const TURNS: [Contender; 3] = [Contender::Op, Contender::Gemm, Contender::Serial];

/// The seconds of a `--sustained` word.
pub(super) fn seconds(word: &str) -> Result<f64, String> {
    match word.parse() {
        Ok(seconds) if 0.0 < seconds && seconds <= 3600.0 => Ok(seconds),
        _ => Err(format!("{word:?} is no number of seconds above 0 and up to 3600")),
    }
}

/// Runs each contender for `seconds` in all, in blocks of calls as many as fill it by `short`'s medians. Collective; every rank gets the same result.
pub fn sustain(lane: &mut dyn Lane, comm: &Communicator, short: &Measured, seconds: f64) -> anyhow::Result<Sustained> {
    let block = BLOCK_SECONDS.min(seconds);
    let blocks = count(seconds / block);
    // The clock can find that a call took no time.
    let calls = |contender: Contender| count(block / (contender.of(short).median * 1e-3).max(1e-6));
    let mut spans: [Vec<Span>; 3] = Default::default();
    for round in 0..=blocks {
        for (contender, spans) in TURNS.into_iter().zip(&mut spans) {
            let calls = calls(contender);
            let Span { start, end } = lane.block(contender, calls).with_context(|| format!("{contender:?}, block {round}"))?;
            if round > 0 {
                spans.push(Span { start, end });
            }
        }
    }
    let of_a_call = |index: usize| -> anyhow::Result<Times> { Ok(slowest(comm, &spans[index])?.over(calls(TURNS[index]) as f64)) };
    Ok(Sustained::new(seconds, blocks as u32, [of_a_call(0)?, of_a_call(1)?, of_a_call(2)?], short))
}

/// The whole number next to it, at least 1.
#[expect(clippy::cast_sign_loss, reason = "it is at least 1")]
fn count(number: f64) -> usize {
    number.round().max(1.0) as usize
}
