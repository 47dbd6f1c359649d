//! Calls back to back, until clocks and temperatures are those of a machine at work.
//!
//! Invariant: the contenders alternate in blocks of equal length, so all run at the same clocks.
//! The first block of each does not count.

use super::measure::{Contender, Contenders, slowest};
use crate::harness::{Span, Times};
use crate::report::{Measured, Sustained};
use anyhow::Context;
use flux_transport::Communicator;
use std::fmt::Debug;

/// Length of a block in seconds: many calls, and short beside the seconds that temperatures take.
const BLOCK_SECONDS: f64 = 0.5;
/// The contenders that overlap efficiency is made of.
const TURNS: [Contender; 3] = [Contender::Op, Contender::Gemm, Contender::Serial];

pub(crate) fn seconds(word: &str) -> Result<f64, String> {
    match word.parse() {
        Ok(seconds) if 0.0 < seconds && seconds <= 3600.0 => Ok(seconds),
        _ => Err(format!("{word:?} is no number of seconds above 0 and up to 3600")),
    }
}

/// Runs each contender for `seconds` in blocks sized by `short`'s medians. Collective; every rank
/// gets the same result.
pub(crate) fn sustain(contenders: &mut dyn Contenders, comm: &Communicator, short: &Measured, seconds: f64) -> anyhow::Result<Sustained> {
    let turns = TURNS.map(|contender| (contender, contender.of(short).median));
    let blocks = Blocks::run(turns, seconds, |contender, calls| contenders.block(contender, calls))?;
    let [op, gemm, serial] = [0, 1, 2].map(|turn| blocks.of_a_call(turn, |spans| slowest(comm, spans)));
    Ok(Sustained::new(seconds, blocks.count() as u32, [op?, gemm?, serial?], short))
}

/// Times of alternating blocks.
pub(crate) struct Blocks<const N: usize> {
    calls: [usize; N],
    spans: [Vec<Span>; N],
}

impl<const N: usize> Blocks<N> {
    /// Runs alternating blocks, of as many calls as fill one at the given milliseconds a call,
    /// until each contender has run for `seconds`.
    pub(crate) fn run<C: Copy + Debug>(
        turns: [(C, f64); N],
        seconds: f64,
        mut block: impl FnMut(C, usize) -> anyhow::Result<Span>,
    ) -> anyhow::Result<Self> {
        let length = BLOCK_SECONDS.min(seconds);
        // The clock can find that a call took no time.
        let calls = turns.map(|(_, ms)| count(length / (ms * 1e-3).max(1e-6)));
        let mut spans = [const { Vec::new() }; N];
        for round in 0..=count(seconds / length) {
            for (turn, (contender, _)) in turns.into_iter().enumerate() {
                let span = block(contender, calls[turn]).with_context(|| format!("{contender:?}, block {round}"))?;
                if round > 0 {
                    spans[turn].push(span);
                }
            }
        }
        Ok(Self { calls, spans })
    }

    pub(crate) fn count(&self) -> usize {
        self.spans[0].len()
    }

    /// Times of one call of a contender, as means over its blocks.
    pub(crate) fn of_a_call(&self, turn: usize, times: impl FnOnce(&[Span]) -> anyhow::Result<Times>) -> anyhow::Result<Times> {
        Ok(times(&self.spans[turn])?.over(self.calls[turn] as f64))
    }
}

/// The whole number next to it, at least 1.
#[expect(clippy::cast_sign_loss, reason = "it is at least 1")]
fn count(number: f64) -> usize {
    number.round().max(1.0) as usize
}
