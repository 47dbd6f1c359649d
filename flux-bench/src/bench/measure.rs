//! Interleaved rounds: every contender runs once a round, so drift hits all of them alike.
//!
//! Invariant: all ranks run the contenders in one order, lined up before each sample, and every
//! call takes the next operand set. Only rounds count in which every host enqueued in time.

use crate::harness::{Defect, Operands, Span, Times, Verdict, of_slowest};
use crate::report::{Each, Late, Measured};
use anyhow::Context;
use flux_transport::Communicator;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    /// The fastest unsplit GEMM of one rank's part.
    Gemm,
    Comm,
    /// The collective and the GEMM, one after the other.
    Serial,
    Op,
}

impl Contender {
    pub(crate) const ALL: [Self; 4] = [Self::Gemm, Self::Comm, Self::Serial, Self::Op];

    /// All, in the order of a round.
    pub(crate) fn in_round(round: usize) -> Vec<Self> {
        in_round(&Self::ALL, round)
    }

    /// What `of` finds of each, in the order of [`Self::ALL`].
    fn each<T>(mut of: impl FnMut(Self) -> anyhow::Result<T>) -> anyhow::Result<Each<T>> {
        let (gemm, comm) = (of(Self::Gemm)?, of(Self::Comm)?);
        Ok(Each { gemm, comm, serial: of(Self::Serial)?, op: of(Self::Op)? })
    }

    pub(crate) const fn of<T: Copy>(self, each: &Each<T>) -> T {
        match self {
            Self::Gemm => each.gemm,
            Self::Comm => each.comm,
            Self::Serial => each.serial,
            Self::Op => each.op,
        }
    }
}

/// Contenders in the order of a round: in as many rounds as there are contenders each follows each
/// other once, or with an odd number of them twice in twice as many.
///
/// Source: Williams, "Experimental designs balanced for the estimation of residual effects of
/// treatments", 1949.
pub(crate) fn in_round<C: Copy>(contenders: &[C], round: usize) -> Vec<C> {
    let count = contenders.len();
    // 0, 1, n - 1, 2, n - 2, ...
    let mut order: Vec<_> =
        (0..count).map(|at| if at % 2 == 1 { at.div_ceil(2) } else { count - at / 2 }).collect();
    if count % 2 == 1 && round / count % 2 == 1 {
        order.reverse();
    }
    order.into_iter().map(|contender| contenders[(contender + round) % count]).collect()
}

/// One rank's sample of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    pub span: Span,
    /// The host's time to enqueue it; `None` where the host computes.
    pub enqueued: Option<Duration>,
    /// Whether the device may have waited for the host to enqueue the call.
    pub late: bool,
}

/// One rank's contenders at one shape.
pub(crate) trait Contenders {
    /// Lines the ranks up and times one call of `contender` on operand set number `call`.
    fn sample(&mut self, contender: Contender, call: usize) -> anyhow::Result<Sample>;

    /// Lines the ranks up and times so many calls of `contender` back to back.
    fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span>;
}

/// Contenders whose operands change from call to call.
pub(crate) trait AnyRows: Contenders {
    /// Makes these the operands of the next calls, with no more rows than the op is built for.
    fn take(&mut self, operands: Operands) -> anyhow::Result<()>;

    /// Fills the output with NaN.
    fn poison(&mut self) -> anyhow::Result<()>;

    /// Checks the op's output at these rows and columns.
    fn verify_at(&mut self, at: &[(u32, u32)], defect: Defect) -> anyhow::Result<Verdict>;
}

/// Rounds that do not count: caches, clocks, and first uses.
pub(crate) const WARM_UP: usize = 5;

/// Times all contenders over so many rounds, and calls `tick` after each, warm-up included.
/// Collective; every rank gets the same result.
pub(super) fn measure(
    contenders: &mut dyn Contenders,
    comm: &Communicator,
    samples: usize,
    tick: &dyn Fn(),
) -> anyhow::Result<Measured> {
    let mut samples_of: [Vec<Sample>; 4] = Default::default();
    let mut calls = 0..;
    for round in 0..WARM_UP + samples {
        for (contender, call) in Contender::in_round(round).into_iter().zip(&mut calls) {
            let sample = contenders
                .sample(contender, call)
                .with_context(|| format!("{contender:?}, round {round}"))?;
            if round >= WARM_UP {
                samples_of[contender as usize].push(sample);
            }
        }
        tick();
    }
    let kept = Contender::each(|contender| in_time(comm, &samples_of[contender as usize]))?;
    let host = Contender::each(|contender| enqueued(comm, &samples_of[contender as usize]))?;
    Ok(Measured {
        times: Contender::each(|contender| Ok(contender.of(&kept).0))?,
        late: Contender::each(|contender| Ok(contender.of(&kept).1))?,
        enqueue: Contender::each(|contender| contender.of(&host).context("the host computes")).ok(),
    })
}

/// Enqueue times of the slowest rank's host; `None` where the host computes. Collective.
fn enqueued(comm: &Communicator, mine: &[Sample]) -> anyhow::Result<Option<Times>> {
    let took =
        |sample: &Sample| Some(Span { start: 0.0, end: sample.enqueued?.as_secs_f64() * 1e3 });
    mine.iter().map(took).collect::<Option<Vec<_>>>().map(|spans| slowest(comm, &spans)).transpose()
}

/// Times of the slowest rank over rounds in which no host was late, and the number of late ones.
/// Where most rounds are late, none is left out. Collective.
fn in_time(comm: &Communicator, mine: &[Sample]) -> anyhow::Result<(Times, u32)> {
    let mut late = vec![false; mine.len()];
    for (late, mine) in late.chunks_mut(ROUNDS).zip(mine.chunks(ROUNDS)) {
        let flags: Vec<u8> = mine.iter().map(|sample| u8::from(sample.late)).collect();
        for said in comm.exchange(&flags)? {
            late.iter_mut().zip(&said).for_each(|(late, &said)| *late |= said != 0);
        }
    }
    let (rounds, count) =
        (u32::try_from(late.len())?, u32::try_from(late.iter().filter(|&&late| late).count())?);
    let all = Late::kept(rounds, count) == rounds;
    let spans: Vec<Span> = mine
        .iter()
        .zip(&late)
        .filter(|&(_, &late)| all || !late)
        .map(|(sample, _)| sample.span)
        .collect();
    Ok((slowest(comm, &spans)?, count))
}

/// Rounds in one message: an exchange takes 64 KiB.
const ROUNDS: usize = 2048;

/// Times of the slowest rank, from every rank's rounds. Collective.
pub(super) fn slowest(comm: &Communicator, mine: &[Span]) -> anyhow::Result<Times> {
    Times::of(&lasts(comm, mine)?).context("nothing was measured")
}

/// How long each round lasted on the slowest rank, in milliseconds. Collective.
pub(super) fn lasts(comm: &Communicator, mine: &[Span]) -> anyhow::Result<Vec<f64>> {
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); comm.world_size().index()];
    for rounds in mine.chunks(ROUNDS) {
        let flat: Vec<f64> = rounds.iter().flat_map(|s| [s.start, s.end]).collect();
        for (spans, said) in ranks.iter_mut().zip(comm.exchange(bytemuck::cast_slice(&flat))?) {
            let words: Vec<f64> = said.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
            spans.extend(words.as_chunks().0.iter().map(|&[start, end]| Span { start, end }));
        }
    }
    of_slowest(&ranks).context("the ranks measured different numbers of rounds")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::gpu_contenders::SETS;
    use crate::harness::ranks;
    use flux_transport::{Options, Select, World};

    /// Records the requests. A contender's time is its number, and much more in warm-up rounds.
    #[derive(Default)]
    struct Asked(Vec<(Contender, usize)>);

    impl Contenders for Asked {
        fn sample(&mut self, contender: Contender, call: usize) -> anyhow::Result<Sample> {
            let warm_up = if self.0.len() < WARM_UP * Contender::ALL.len() { 100.0 } else { 0.0 };
            self.0.push((contender, call));
            Ok(Sample {
                span: Span { start: 0.0, end: warm_up + f64::from(contender as u8) },
                enqueued: None,
                late: false,
            })
        }

        fn block(&mut self, _: Contender, _: usize) -> anyhow::Result<Span> {
            anyhow::bail!("rounds have no blocks")
        }
    }

    /// What was asked for in so many rounds, and what came of it.
    fn asked(samples: usize) -> (Asked, Measured) {
        let [world] = &World::local(1).unwrap()[..] else { panic!("not one rank") };
        let comm = Communicator::connect_blocking(world, Options::from(Select::Host)).unwrap();
        let mut contenders = Asked::default();
        let measured = measure(&mut contenders, &comm, samples, &|| ()).unwrap();
        (contenders, measured)
    }

    #[test]
    fn every_call_takes_another_operand_set_and_none_always_follows_the_same_other() {
        let samples = 12 * SETS - WARM_UP;
        let (contenders, measured) = asked(samples);
        let mut follows = [[0; 4]; 4];
        for (before, now) in contenders.0.iter().zip(&contenders.0[1..]) {
            assert_ne!(before.1 % SETS, now.1 % SETS, "{:?} after {:?}", now.0, before.0);
            follows[now.0 as usize][before.0 as usize] += 1;
        }
        for (round, calls) in contenders.0.chunks(4).enumerate() {
            assert!(
                Contender::ALL.iter().all(|of| calls.iter().any(|(c, _)| c == of)),
                "round {round}: {calls:?}"
            );
        }
        for contender in Contender::ALL {
            let mut taken = [0; SETS];
            contenders
                .0
                .iter()
                .filter(|(c, _)| *c == contender)
                .for_each(|(_, call)| taken[call % SETS] += 1);
            assert_eq!(taken, [12; SETS], "{contender:?} on each set");
            let (follows, own) = (follows[contender as usize], contender as usize);
            assert!(
                follows.iter().enumerate().all(|(other, &times)| if other == own {
                    times == 0
                } else {
                    times >= 9
                }),
                "{contender:?}: {follows:?}"
            );
            let only = f64::from(contender as u8);
            assert_eq!(
                contender.of(&measured.times),
                Times { p10: only, median: only, p90: only },
                "its own rounds, without warm-up"
            );
        }
    }

    /// A contender's call takes a time of its own, back to back and alone.
    struct Steady;

    impl Steady {
        fn ms(contender: Contender) -> f64 {
            1.0 + 2.0 * f64::from(contender as u8)
        }
    }

    impl Contenders for Steady {
        fn sample(&mut self, contender: Contender, _: usize) -> anyhow::Result<Sample> {
            Ok(Sample {
                span: Span { start: 0.0, end: Self::ms(contender) },
                enqueued: None,
                late: false,
            })
        }

        fn block(&mut self, contender: Contender, calls: usize) -> anyhow::Result<Span> {
            Ok(Span { start: 0.0, end: Self::ms(contender) * calls as f64 })
        }
    }

    #[test]
    fn what_is_called_back_to_back_is_divided_by_its_own_calls() {
        let [world] = &World::local(1).unwrap()[..] else { panic!("not one rank") };
        let comm = Communicator::connect_blocking(world, Options::from(Select::Host)).unwrap();
        let short = measure(&mut Steady, &comm, 3, &|| ()).unwrap();
        let sustained = crate::bench::sustain(&mut Steady, &comm, &short.times, 0.2).unwrap();
        let found = [sustained.t_op_ms, sustained.t_gemm_ms, sustained.t_serial_ms]
            .map(|times| times.median);
        let expected = [Contender::Op, Contender::Gemm, Contender::Serial].map(Steady::ms);
        assert!(
            found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9),
            "{found:?}"
        );
    }

    #[test]
    fn all_rounds_of_all_ranks_count_however_many_messages_they_take() {
        let body = |world: &World| {
            let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
            let slow = |round: usize| (round % 2) as u32 == world.rank().get();
            let spans: Vec<Span> = (0..=2 * ROUNDS)
                .map(|r| Span { start: 0.0, end: (r + usize::from(slow(r))) as f64 })
                .collect();
            slowest(&comm, &spans)
        };
        for times in ranks::on_threads(World::local(2).unwrap(), body).unwrap() {
            assert!(
                (times.median - 2049.0).abs() < 1e-9 && (times.p90 - 3687.4).abs() < 1e-9,
                "{times:?}, of 1 to 4097"
            );
        }
    }

    #[test]
    fn the_slowest_host_counts_and_none_where_hosts_do_the_work_themselves() {
        let body = |world: &World| {
            let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
            let sample = |us: Option<u64>| Sample {
                span: Span { start: 0.0, end: 1.0 },
                enqueued: us.map(Duration::from_micros),
                late: false,
            };
            let rank = u64::from(world.rank().get());
            let taken = [10, 20, 30].map(|us| sample(Some(us + 5 * rank)));
            Ok((enqueued(&comm, &taken)?, enqueued(&comm, &[sample(None), taken[0]])?))
        };
        for (times, none) in ranks::on_threads(World::local(2).unwrap(), body).unwrap() {
            assert!((times.unwrap().median - 0.025).abs() < 1e-12 && none.is_none());
        }
    }

    /// Rank 1's host is late in one round of three, and takes a second in it; or in two of three.
    #[test]
    fn rounds_in_which_a_rank_was_late_are_left_out_and_counted_unless_they_are_most() {
        let rounds = |late: fn(usize) -> bool| {
            let body = move |world: &World| {
                let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
                let sample = |round: usize| {
                    let late = world.rank().get() == 1 && late(round);
                    Sample {
                        span: Span { start: 0.0, end: if late { 1000.0 } else { 1.0 } },
                        enqueued: None,
                        late,
                    }
                };
                in_time(&comm, &(0..ROUNDS + 4).map(sample).collect::<Vec<_>>())
            };
            ranks::on_threads(World::local(2).unwrap(), body).unwrap()
        };
        for (times, late) in rounds(|round| round % 3 == 0) {
            assert_eq!((times.p90, late), (1.0, 684));
        }
        for (times, late) in rounds(|round| round % 3 > 0) {
            assert_eq!((times.median, late), (1000.0, 1368), "that is how long it takes");
        }
    }
}
