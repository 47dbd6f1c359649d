//! Calls back to back, for as long as it takes until clocks and temperatures are those of a machine
//! at work.
//!
//! Invariant: op, GEMM and serial path take turns in blocks of equal length, each as long as the
//! others in all, so that all three run at the clocks that their mixture settles at, and a ratio of
//! them is that of the same machine. The first block of each is thrown away.

use super::measure::{Contender, Contenders, slowest};
use crate::harness::{Span, Times};
use crate::report::{Measured, Sustained};
use anyhow::Context;
use flux_transport::Communicator;
use std::fmt::Debug;

/// Length of a block, in seconds: many calls, and short beside the seconds in which temperatures
/// follow.
const BLOCK_SECONDS: f64 = 0.5;
/// The contenders that overlap efficiency is made of.
const TURNS: [Contender; 3] = [Contender::Op, Contender::Gemm, Contender::Serial];

/// The seconds of a `--sustained` word.
pub(crate) fn seconds(word: &str) -> Result<f64, String> {
    match word.parse() {
        Ok(seconds) if 0.0 < seconds && seconds <= 3600.0 => Ok(seconds),
        _ => Err(format!("{word:?} is no number of seconds above 0 and up to 3600")),
    }
}

/// Runs each contender for `seconds` in all, in blocks of calls as many as fill it by `short`'s
/// medians. Collective; every rank gets the same result.
pub(crate) fn sustain(contenders: &mut dyn Contenders, comm: &Communicator, short: &Measured, seconds: f64) -> anyhow::Result<Sustained> {
    let turns = TURNS.map(|contender| (contender, contender.of(short).median));
    let blocks = Blocks::run(turns, seconds, |contender, calls| contenders.block(contender, calls))?;
    let [op, gemm, serial] = [0, 1, 2].map(|turn| blocks.of_a_call(turn, |spans| slowest(comm, spans)));
    Ok(Sustained::new(seconds, blocks.count() as u32, [op?, gemm?, serial?], short))
}

/// What blocks by turns took.
pub(crate) struct Blocks<const N: usize> {
    calls: [usize; N],
    spans: [Vec<Span>; N],
}

impl<const N: usize> Blocks<N> {
    /// Runs blocks of each contender by turns, of as many calls as fill a block where one takes the
    /// milliseconds beside it, until each has run for `seconds`.
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

    /// Blocks of each contender.
    pub(crate) fn count(&self) -> usize {
        self.spans[0].len()
    }

    /// What a call of a contender took, as a mean over each block, from what `times` says of its
    /// blocks.
    pub(crate) fn of_a_call(&self, turn: usize, times: impl FnOnce(&[Span]) -> anyhow::Result<Times>) -> anyhow::Result<Times> {
        Ok(times(&self.spans[turn])?.over(self.calls[turn] as f64))
    }
}

/// The whole number next to it, at least 1.
#[expect(clippy::cast_sign_loss, reason = "it is at least 1")]
fn count(number: f64) -> usize {
    number.round().max(1.0) as usize
}
