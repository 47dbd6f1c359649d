//! One rank's part of a tuning, as a thread or as a process.
//!
//! Invariant: every rank takes the same steps; rank 0 says before each layer whether it is begun.

use super::TuneJob;
use crate::shapes::Layer;
use crate::{machine, out, progress};
use flux_core::Problem;
use flux_ops::{OpSpec, Outcome, Timing, TuneError, TuneOptions, Tuned};
use flux_transport::{Communicator, World};
use std::fmt;
use std::fmt::Write as _;
use std::time::Instant;

/// What came of all layers.
#[derive(Clone, Debug, Default)]
pub(super) struct TuneSummary {
    /// Name of rank 0's device.
    pub(super) device: String,
    /// Parts of the time that were gained over the plans before, and over the model's.
    gains: Vec<(f64, f64)>,
    known: usize,
    /// Layers none of whose plans could be timed.
    pub(super) failed: usize,
    /// Layers without a row at the end of the budget.
    left: usize,
}

/// Tunes all layers; collective.
pub(super) fn run(job: &TuneJob<'_>, world: &World) -> anyhow::Result<TuneSummary> {
    let begun = Instant::now();
    let options = machine::options(job.args.transport, world.local_rank(), 1);
    let comm = Communicator::connect_blocking(world, options)?;
    let first = world.rank().get() == 0;
    let bar = progress::bar(job.layers.len() as u64, "rows", first);
    if first {
        out::line(&format_args!(
            "transport {}, TP {}, {}, {}",
            comm.transport(),
            job.world,
            job.numerics,
            comm.device().name()
        ));
    }
    let mut summary =
        TuneSummary { device: comm.device().name().to_owned(), ..TuneSummary::default() };
    for (number, layer) in job.layers.iter().enumerate() {
        let left = job.args.budget.saturating_sub(begun.elapsed());
        if comm.exchange(&[u8::from(left.is_zero())])?.first().is_none_or(|over| over[..] != [0]) {
            summary.left += job.layers.len() - number;
            break;
        }
        bar.set_message(format!("{}, {} s of the budget left", layer.problem, left.as_secs()));
        let options = TuneOptions {
            candidates: job.args.candidates.into(),
            rounds: job.rounds,
            budget: left,
            again: job.args.again,
        };
        let tuned = spec(job, &layer.problem).tune(&comm, &options);
        let words = summary.add(layer, tuned)?;
        if first {
            bar.suspend(|| out::line(&words));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(summary)
}

/// The op as the command line asks for it.
fn spec(job: &TuneJob<'_>, problem: &Problem) -> OpSpec {
    let mut spec = OpSpec::of_problem(problem);
    spec.batch_invariant = job.args.batch_invariant;
    spec.plan_table.clone_from(&job.args.table);
    spec
}

impl TuneSummary {
    /// Counts what came of a layer, and says it.
    ///
    /// # Errors
    /// What ends the tuning of all layers.
    fn add(&mut self, layer: &Layer, tuned: Result<Tuned, TuneError>) -> Result<String, TuneError> {
        let (op, m, name) = (layer.problem.op(), layer.problem.m(), &layer.name);
        let what = match tuned {
            Ok(Tuned::Known { plan, us }) => {
                self.known += 1;
                format!("{us:>10.1} us, known            {plan}")
            }
            Ok(Tuned::Timed(timing)) => {
                let words = timed(&timing);
                match timing.saved {
                    Some(_) => self.gains.push((
                        timing.gain_over(0).unwrap_or(0.0),
                        timing.gain_over(timing.model).unwrap_or(0.0),
                    )),
                    None => self.left += 1,
                }
                words
            }
            Err(error @ TuneError::NoCandidate { .. }) => {
                self.failed += 1;
                error.to_string()
            }
            Err(error) => return Err(error),
        };
        Ok(format!("{op:<8} {name:<16} m = {m:<6} {what}"))
    }
}

/// `12.0 us ->  10.0 us, 16.7 %  PLAN (before: ORIGIN)`, and what failed on lines of their own.
fn timed(timing: &Timing) -> String {
    let before = timing.us(0).map_or_else(|| "         -".to_owned(), |us| format!("{us:>10.1}"));
    let (now, gain) =
        (timing.us(timing.best).unwrap_or(0.0), timing.gain_over(0).unwrap_or(0.0) * 100.0);
    let saved = if timing.saved.is_some() {
        ""
    } else {
        "; not saved: the budget left nothing to compare with"
    };
    let mut words = format!(
        "{before} us -> {now:>8.1} us {gain:>5.1} %  {} (before: {}{saved})",
        timing.plan(),
        timing.before
    );
    for candidate in &timing.candidates {
        if let Outcome::Failed { reason } = &candidate.outcome {
            let _ = write!(words, "\n  skipped {}: {reason}", candidate.plan);
        }
    }
    words
}

impl fmt::Display for TuneSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gains, known, failed, left, .. } = self;
        write!(f, "{} rows tuned, {known} known, {failed} failed, {left} left", gains.len())?;
        if *left > 0 {
            f.write_str(" for another run of this command")?;
        }
        if gains.is_empty() {
            return Ok(());
        }
        let mean = |of: fn(&(f64, f64)) -> f64| {
            gains.iter().map(of).sum::<f64>() / gains.len() as f64 * 100.0
        };
        let most = gains.iter().map(|gain| gain.0).max_by(f64::total_cmp).unwrap_or(0.0) * 100.0;
        write!(
            f,
            "; gained {:.1} % in the mean, {most:.1} % at most, {:.1} % in the mean over the \
             model's choice",
            mean(|g| g.0),
            mean(|g| g.1)
        )
    }
}
