//! Interleaved rounds: in each, every contender runs once, so that a machine that slows down slows them all.
//!
//! Invariant: the ranks run the same contenders in the same order, and each sample starts with all ranks lined up.

use crate::report::Measured;
use crate::stats::{Span, Times};
use anyhow::Context;
use flux_transport::Communicator;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// The fastest unsplit GEMM of one rank's part.
    Gemm,
    /// The collective alone.
    Comm,
    /// The collective and the GEMM, one after the other.
    Serial,
    /// The fused op.
    Op,
}

impl Contender {
    /// All, in the order of a round.
    pub const ALL: [Self; 4] = [Self::Gemm, Self::Comm, Self::Serial, Self::Op];

    /// Its times.
    pub const fn of(self, measured: &Measured) -> Times {
        match self {
            Self::Gemm => measured.gemm,
            Self::Comm => measured.comm,
            Self::Serial => measured.serial,
            Self::Op => measured.op,
        }
    }
}

/// One rank's contenders at one shape.
pub trait Lane {
    /// Lines the ranks up, runs `contender` once on this rank's operand set number `round` of its rotation, and says how long that took.
    fn sample(&mut self, contender: Contender, round: usize) -> anyhow::Result<Span>;

    /// Lines the ranks up once, runs `contender` so many times back to back on all operand sets in turn, and says how long that took in all.
    fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span>;
}

/// Rounds whose times are thrown away: caches, clocks, and whatever is loaded at the first use.
pub const WARM_UP: usize = 5;

/// Times all contenders over `samples` rounds. Collective; every rank gets the same result. `tick` is called after each round, warm-up included.
pub fn measure(lane: &mut dyn Lane, comm: &Communicator, samples: usize, tick: &dyn Fn()) -> anyhow::Result<Measured> {
    let mut spans: [Vec<Span>; 4] = Default::default();
    for round in 0..WARM_UP + samples {
        for (contender, spans) in Contender::ALL.into_iter().zip(&mut spans) {
            let span = lane.sample(contender, round).with_context(|| format!("{contender:?}, round {round}"))?;
            if round >= WARM_UP {
                spans.push(span);
            }
        }
        tick();
    }
    let times = |contender: Contender| slowest(comm, &spans[contender as usize]);
    Ok(Measured {
        gemm: times(Contender::Gemm)?,
        comm: times(Contender::Comm)?,
        serial: times(Contender::Serial)?,
        op: times(Contender::Op)?,
    })
}

/// The slowest rank's time of each round, from every rank's.
pub(super) fn slowest(comm: &Communicator, mine: &[Span]) -> anyhow::Result<Times> {
    let flat: Vec<f64> = mine.iter().flat_map(|s| [s.start, s.end]).collect();
    let all = comm.exchange(bytemuck::cast_slice(&flat))?;
    let spans = |bytes: &Vec<u8>| -> Vec<Span> {
        let words = bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<f64>);
        words.clone().step_by(2).zip(words.skip(1).step_by(2)).map(|(start, end)| Span { start, end }).collect()
    };
    Times::of_slowest(&all.iter().map(spans).collect::<Vec<_>>()).context("the ranks measured different numbers of rounds")
}
