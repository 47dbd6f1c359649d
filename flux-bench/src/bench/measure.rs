//! Interleaved rounds: in each, every contender runs once, so that a machine that slows down slows them all.
//!
//! Invariant: the ranks run the same contenders in the same order, and each sample starts with all ranks lined up.

use crate::report::Measured;
use crate::rest::Rest;
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

/// Times all contenders over so many rounds, each sample after a rest. Collective; every rank gets the same result. `tick` is called after each round, warm-up included.
pub fn measure(lane: &mut dyn Lane, comm: &Communicator, samples: usize, rest: Rest, tick: &dyn Fn()) -> anyhow::Result<Measured> {
    let mut spans: [Vec<Span>; 4] = Default::default();
    for round in 0..WARM_UP + samples {
        for (contender, spans) in Contender::ALL.into_iter().zip(&mut spans) {
            rest.take();
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

/// Rounds in one message: processes take 64 KiB.
const ROUNDS: usize = 2048;

/// The slowest rank's time of each round, from every rank's. Collective; the ranks have measured as many rounds.
pub(super) fn slowest(comm: &Communicator, mine: &[Span]) -> anyhow::Result<Times> {
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); comm.world_size().index()];
    for rounds in mine.chunks(ROUNDS) {
        let flat: Vec<f64> = rounds.iter().flat_map(|s| [s.start, s.end]).collect();
        for (spans, said) in ranks.iter_mut().zip(comm.exchange(bytemuck::cast_slice(&flat))?) {
            let words: Vec<f64> = said.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
            spans.extend(words.as_chunks().0.iter().map(|&[start, end]| Span { start, end }));
        }
    }
    Times::of_slowest(&ranks).context("the ranks measured different numbers of rounds")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks;
    use flux_transport::{Options, Select, World};
    use std::time::{Duration, Instant};

    /// Says when it was asked.
    #[derive(Default)]
    struct Asked(Vec<Instant>);

    impl Lane for Asked {
        fn sample(&mut self, _: Contender, _: usize) -> anyhow::Result<Span> {
            self.0.push(Instant::now());
            Ok(Span { start: 0.0, end: 1.0 })
        }

        fn block(&mut self, _: Contender, _: usize) -> anyhow::Result<Span> {
            anyhow::bail!("rounds have no blocks")
        }
    }

    #[test]
    fn each_sample_comes_after_a_rest() {
        let [world] = &World::local(1).unwrap()[..] else { panic!("not one rank") };
        let comm = Communicator::connect_blocking(world, Options::from(Select::Host)).unwrap();
        let (mut lane, begun) = (Asked::default(), Instant::now());
        measure(&mut lane, &comm, 2, Rest { ms: Some(3) }, &|| ()).unwrap();
        assert_eq!(lane.0.len(), (WARM_UP + 2) * Contender::ALL.len());
        let before = std::iter::once(&begun).chain(&lane.0);
        assert!(before.zip(&lane.0).all(|(before, now)| now.duration_since(*before) >= Duration::from_millis(3)));
    }

    #[test]
    fn all_rounds_of_all_ranks_count_however_many_messages_they_take() {
        let body = |world: &World| {
            let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
            let slow = |round: usize| (round % 2) as u32 == world.rank().get();
            let spans: Vec<Span> = (0..=2 * ROUNDS).map(|r| Span { start: 0.0, end: (r + usize::from(slow(r))) as f64 }).collect();
            slowest(&comm, &spans)
        };
        for times in ranks::on_threads(World::local(2).unwrap(), body).unwrap() {
            assert!((times.median - 2049.0).abs() < 1e-9 && (times.p90 - 3687.4).abs() < 1e-9, "{times:?}, of 1 to 4097");
        }
    }
}
