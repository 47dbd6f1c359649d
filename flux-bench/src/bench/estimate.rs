//! What a run on the host takes, before it begins.
//!
//! Invariant: a run that is expected to take more than [`LIMIT`] begins only with `--yes`.

use super::{BenchJob, SEED, WARM_UP};
use crate::harness::{Fill, Operands, RankContext, build};
use crate::machine;
use crate::plan::Overrides;
use anyhow::{Context, ensure};
use flux_core::{Numerics, OpKind, Problem, SumsTo, WorldSize};
use flux_kernels::{Element, with_elements};
use flux_transport::{Select, World};
use indicatif::HumanDuration;
use std::time::{Duration, Instant};

/// More than this has to be asked for.
const LIMIT: Duration = Duration::from_hours(1);
/// Calls of a GEMM in a round: the GEMM, the serial path and the op.
const GEMMS: f64 = 3.0;
/// The same in a call of a trace: the serial path and the op.
const SERVING: f64 = 2.0;
/// Calls whose whole output is verified: the op's with integers and random data, before and after,
/// and the serial path's.
const CHECKS: f64 = 5.0;

/// Refuses a run on the host that takes longer than [`LIMIT`], unless `yes`.
pub(super) fn allow(job: &BenchJob<'_>, yes: bool) -> anyhow::Result<()> {
    if job.on_gpus || yes {
        return Ok(());
    }
    let rates = with_elements!(job.numerics, X, Y, Rates::measure::<X, Y>(job.numerics));
    within(rates?.expected(job, machine::cores()))
}

fn within(expected: Duration) -> anyhow::Result<()> {
    ensure!(
        expected <= LIMIT,
        "on {} processors this takes about {}, more than {}: give --yes to start it all the same, \
         or fewer of --ms, --samples or --shapes, as in gpt3/16",
        machine::cores(),
        HumanDuration(expected),
        HumanDuration(LIMIT),
    );
    Ok(())
}

/// Floating-point operations a second of one thread.
#[derive(Clone, Copy, Debug)]
struct Rates {
    call: f64,
    check: f64,
}

impl Rates {
    /// Of this processor and build, from one small call.
    fn measure<X: Element, Y: Element>(numerics: Numerics) -> anyhow::Result<Self> {
        let alone = WorldSize::new(1).context("a world of one")?;
        let problem = Problem::new(OpKind::AllGatherGemm, 64, 128, 1024, numerics, alone)?;
        let ctx = RankContext::connect(&World::single(), Select::Host)?;
        let op = build(&problem, ctx.comm(), Overrides::with_workers(1))?;
        let mut set = ctx.operand_set::<X, Y>(&problem)?;
        ctx.fill(&mut set, Operands::new(problem, SEED, 0, Fill::Uniform))?;
        // The first call pays for pages.
        ctx.forward(&op, &mut set)?;
        let begun = Instant::now();
        ctx.forward(&op, &mut set)?;
        let called = begun.elapsed();
        let begun = Instant::now();
        ctx.verify(&set, &op.plan(op.max_m())?)?;
        let checked = begun.elapsed();
        let rate = |took: Duration| work(&problem) / took.as_secs_f64();
        Ok(Self { call: rate(called), check: rate(checked) })
    }

    /// Of a whole run, with nothing else on the machine.
    fn expected(self, job: &BenchJob<'_>, cores: u32) -> Duration {
        let seconds = job.cases.iter().map(|case| {
            let (work, ranks) = (work(&case.problem), case.problem.world().get());
            let rounds = match &job.rows {
                Some(rows) => rows.calls_of_the_most() * SERVING * work,
                None => (WARM_UP + job.samples as usize) as f64 * GEMMS * work,
            } / (self.call * f64::from(cores));
            if job.rows.is_some() {
                return rounds;
            }
            // Every rank of a GEMM-AllReduce has the whole output.
            let outputs =
                if case.problem.op().sums_to() == SumsTo::All { f64::from(ranks) } else { 1.0 };
            let checks = CHECKS * outputs * work / (self.check * f64::from(cores.min(ranks)));
            rounds + checks + GEMMS * case.sustained.unwrap_or(0.0)
        });
        Duration::try_from_secs_f64(seconds.sum()).unwrap_or(Duration::MAX)
    }
}

/// Floating-point operations of all ranks' GEMMs.
fn work(problem: &Problem) -> f64 {
    2.0 * f64::from(problem.m()) * f64::from(problem.n()) * f64::from(problem.k())
}

#[cfg(test)]
mod tests {
    use super::super::{Args, BenchCase};
    use super::*;
    use crate::harness::EpilogueSpec;
    use flux_core::DType;
    use half::bf16;
    use std::sync::LazyLock;

    /// What a command line without options asks for.
    static ARGS: LazyLock<Args> = LazyLock::new(|| {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        <Line as clap::Parser>::parse_from(["bench"]).args
    });

    fn job(samples: u32, problems: &[Problem], sustained: Option<f64>) -> BenchJob<'static> {
        let cases = problems
            .iter()
            .map(|&problem| BenchCase {
                model: String::new(),
                problem,
                epilogue: EpilogueSpec::default(),
                sustained,
            })
            .collect();
        let world = WorldSize::new(2).unwrap();
        BenchJob {
            on_gpus: false,
            world,
            numerics: DType::Bf16.into(),
            cases,
            samples,
            rows: None,
            args: &ARGS,
        }
    }

    fn problem(op: OpKind) -> Problem {
        Problem::new(op, 1024, 1024, 1024, DType::Bf16, WorldSize::new(2).unwrap()).unwrap()
    }

    #[test]
    fn the_expected_time_is_that_of_rounds_and_checks() {
        let rates = Rates { call: 1e9, check: 1e8 };
        let seconds = |cores, job: &BenchJob<'_>| rates.expected(job, cores).as_secs_f64();
        let call = 2.0 * 1024.0_f64.powi(3) / 1e9;
        let close = |a: f64, b: f64| (a - b).abs() < 1e-6 * b;
        let one = job(10, &[problem(OpKind::AllGatherGemm)], None);
        assert!(close(seconds(1, &one), call * (15.0 * 3.0 + 5.0 * 10.0)));
        // A rank verifies on one thread.
        assert!(close(seconds(4, &one), call * (15.0 * 3.0 / 4.0 + 5.0 * 10.0 / 2.0)));
        let both = job(
            10,
            &[problem(OpKind::GemmReduceScatter), problem(OpKind::GemmAllReduce)],
            Some(7.0),
        );
        assert!(close(
            seconds(1, &both),
            call * (2.0 * 15.0 * 3.0 + 3.0 * 5.0 * 10.0) + 2.0 * 3.0 * 7.0
        ));
        assert!(
            seconds(1, &job(100_000, &[problem(OpKind::AllGatherGemm)], None))
                > 1000.0 * seconds(1, &one)
        );
    }

    #[test]
    fn the_limit_is_named_with_the_time_and_the_way_out() {
        assert!(within(LIMIT).is_ok());
        let refused = within(Duration::from_hours(5)).unwrap_err().to_string();
        assert!(
            ["about 5 hours", "more than 60 minutes", "--yes"]
                .iter()
                .all(|part| refused.contains(part)),
            "{refused}"
        );
    }

    #[test]
    fn a_processor_has_rates() {
        let rates = Rates::measure::<bf16, bf16>(DType::Bf16.into()).unwrap();
        assert!(
            rates.call.is_finite()
                && rates.call > 1e5
                && rates.check.is_finite()
                && rates.check > 1e5,
            "{rates:?}"
        );
    }
}
