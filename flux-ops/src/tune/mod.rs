//! Measures the model's best few plans and keeps the fastest in the user's table.
//!
//! Invariant: all ranks take the same steps: rank 0 lists the plans, says before each whether it is
//! begun, and decides. Every wait for a peer has the communicator's deadline.

mod oracle;
mod rank;

use crate::agreement;
use crate::error::{BuildError, CallError};
use crate::op::{Builder, FusedLinear};
use crate::planning::{self, Buckets, Choice, UserTable};
use crate::spec::{EpilogueSpec, LaunchOptions, OpSpec};
use crate::table_file::TableFileError;
use flux_core::plan::{PLAN_BYTES, Plan, PlanOrigin, PlanRow};
use flux_core::{Problem, Rank};
use flux_kernels::{Element, WeightLayout, with_elements};
use flux_transport::internal::control::shortened;
use flux_transport::{Communicator, TransportError};
use rank::TuneRank;
use std::mem::discriminant;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Rounds that do not count: caches, clocks, and what is loaded at the first use.
const WARM_UP: usize = 3;
/// Rounds that are timed even beyond the budget.
const LEAST_ROUNDS: usize = 3;
/// Most rounds, whose times a rank sends in one message.
const MOST_ROUNDS: usize = 4096;

/// How much a tuning tries. Rank 0's options count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TuneOptions {
    /// Plans by the model that are timed beside the present one.
    pub candidates: usize,
    /// Timed calls of each.
    pub rounds: usize,
    /// Time after which no further plan is begun.
    pub budget: Duration,
    /// Whether a problem is timed that the user's table has a row for.
    pub again: bool,
}

impl Default for TuneOptions {
    /// Four candidates, 20 rounds and a minute; what is known is not timed again.
    fn default() -> Self {
        Self { candidates: 4, rounds: 20, budget: Duration::from_mins(1), again: false }
    }
}

/// What a tuning has found; the same on every rank but for `saved`.
#[derive(Clone, Debug, PartialEq)]
pub enum Tuned {
    /// The user's table has a row for this problem, device and driver: nothing was timed.
    Known {
        /// The row's plan.
        plan: Plan,
        /// Its time when it was measured, in microseconds.
        us: f64,
    },
    /// Plans were timed.
    Timed(Timing),
}

/// Plans that were timed beside each other.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// The problem.
    pub problem: Problem,
    /// Where the plan came from that an op had before: the first candidate's.
    pub before: PlanOrigin,
    /// The present plan, then the model's, its best first.
    pub candidates: Vec<Candidate>,
    /// Number of the fastest candidate.
    pub best: usize,
    /// Number of the model's first choice.
    pub model: usize,
    /// The file that the fastest stands in; none where the budget left nothing to compare.
    pub saved: Option<PathBuf>,
}

/// A plan that was to be timed.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The plan, canonical.
    pub plan: Plan,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a candidate.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It is right, and takes so long.
    Timed {
        /// Median time of the slowest rank, in microseconds.
        us: f64,
    },
    /// It could not be built, or its result was wrong.
    Failed {
        /// The first rank that found it, and why.
        reason: String,
    },
    /// The budget was spent.
    NotBegun,
}

impl Timing {
    /// The fastest plan.
    pub fn plan(&self) -> Plan {
        self.candidates[self.best].plan
    }

    /// Time of candidate `number`, in microseconds, where it was timed.
    pub fn us(&self, number: usize) -> Option<f64> {
        match self.candidates.get(number)?.outcome {
            Outcome::Timed { us } => Some(us),
            _ => None,
        }
    }

    /// Part of the time of candidate `number` that the fastest saves: 0 for the present plan where
    /// that stays. `None` where it was not timed.
    pub fn gain_over(&self, number: usize) -> Option<f64> {
        Some(1.0 - self.us(self.best)? / self.us(number)?)
    }
}

/// Why a tuning ended. Rows of earlier tunings are kept.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum TuneError {
    /// The op cannot be built on this communicator, whatever its plan.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// A call was refused or failed; the communicator is broken.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The ranks could not talk, or a fault has broken the communicator.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The table's file cannot take the row.
    #[error(transparent)]
    Table(#[from] TableFileError),
    /// No plan could be timed.
    #[error("no plan of {problem} could be timed; {plan} failed: {reason}")]
    NoCandidate {
        /// The problem.
        problem: Problem,
        /// The first plan.
        plan: Plan,
        /// What became of it.
        reason: String,
    },
    /// Another rank could not go on.
    #[error("rank {rank} could not tune: {reason}")]
    Peer {
        /// The first rank.
        rank: Rank,
        /// Its error.
        reason: String,
    },
    /// There is no memory for operands, or the device refuses them.
    #[error("the operands to time with: {reason}")]
    Operands {
        /// What the system or the driver says.
        reason: String,
    },
}

flux_core::debug_is_text!(TuneError);

impl<Op> Builder<Op> {
    /// Times the model's best few plans for `m = max_m` beside the present one, verifies each, and
    /// adds the fastest to the user's plan table for later builds. The epilogue is left out, and
    /// weights are `[n, k]`. Collective, as `build`; before graphs are captured.
    ///
    /// # Errors
    /// [`TuneError`], on every rank if on one. A plan that cannot be built or is wrong is no error,
    /// but an outcome.
    pub fn tune(&self, comm: &Communicator, options: &TuneOptions) -> Result<Tuned, TuneError> {
        self.spec().tune(comm, options)
    }
}

impl OpSpec {
    /// As [`Builder::tune`].
    ///
    /// # Errors
    /// As [`Builder::tune`].
    pub fn tune(&self, comm: &Communicator, options: &TuneOptions) -> Result<Tuned, TuneError> {
        let spec = Self {
            epilogue: EpilogueSpec::default(),
            weights: WeightLayout::default(),
            columns: None,
            launch: LaunchOptions { trace: false, ..self.launch },
            ..self.clone()
        };
        with_elements!(spec.numerics, X, Y, run::<X, Y>(&spec, comm, options))
    }
}

/// Times plans for a spec without epilogue and time line, and with one weight; collective.
fn run<X: Element, Y: Element>(
    spec: &OpSpec,
    comm: &Communicator,
    options: &TuneOptions,
) -> Result<Tuned, TuneError> {
    let begun = Instant::now();
    let own = spec.choice(comm);
    let present = own.as_ref().ok().map(|&choice| Buckets::one(u32::MAX, choice));
    let of_rank_0 = agreement::same_request(
        comm,
        &spec.name(),
        &format!("tune {}", spec.agreement()),
        present.as_ref(),
    )?;
    let user = UserTable::at(spec.plan_table.as_deref(), false);
    let list = own
        .map_err(TuneError::from)
        .and_then(|own| Ok((own, list(comm, spec, options, own, &user)?)));
    let (own, list) = agreed(comm, list)?;
    let (problem, present) =
        (spec.largest(comm.world_size())?, of_rank_0.map_or(own, |plans| *plans.get(1)));
    let (us, model, plans) = listed(&list);
    if let (Some(us), [plan]) = (us, &plans[..]) {
        return Ok(Tuned::Known { plan: *plan, us });
    }
    let (mut rank, _) =
        agreed(comm, TuneRank::<X, Y>::new(comm, &problem).map(|rank| (rank, Vec::new())))?;
    let in_budget = || begun.elapsed() < options.budget;
    let mut candidates: Vec<_> =
        plans.iter().map(|&plan| Candidate { plan, outcome: Outcome::NotBegun }).collect();
    let mut ops = Vec::new();
    for (number, candidate) in candidates.iter_mut().enumerate() {
        if !goes_on(comm, number == 0 || in_budget())? {
            break;
        }
        let of_plan = OpSpec { plan: Some(candidate.plan), ..spec.clone() };
        match built(of_plan, comm, &mut rank)? {
            Ok(op) => ops.push((number, op)),
            Err(reason) => candidate.outcome = Outcome::Failed { reason },
        }
    }
    let times = times(&ops, comm, &mut rank, options.rounds, in_budget)?;
    let Some(best) = (0..ops.len()).min_by(|&a, &b| times[a].total_cmp(&times[b])) else {
        let Candidate { plan, outcome } = candidates.swap_remove(0);
        let reason = if let Outcome::Failed { reason } = outcome { reason } else { String::new() };
        return Err(TuneError::NoCandidate { problem, plan, reason });
    };
    for ((number, _), &us) in ops.iter().zip(&times) {
        candidates[*number].outcome = Outcome::Timed { us };
    }
    let mut timing = Timing {
        problem,
        before: present.origin,
        candidates,
        best: ops[best].0,
        model,
        saved: None,
    };
    if ops.len() > 1
        || timing.candidates.iter().all(|candidate| candidate.outcome != Outcome::NotBegun)
    {
        let row = PlanRow {
            key: planning::key(comm, &problem, spec.batch_invariant),
            m: problem.m(),
            plan: timing.plan(),
            us: times[best],
        };
        let added = if comm.rank().get() == 0 { user.add(&row) } else { Ok(()) };
        agreed(comm, added.map(|()| ((), Vec::new())).map_err(TuneError::from))?;
        timing.saved.clone_from(&UserTable::at(spec.plan_table.as_deref(), true).path);
    }
    Ok(Tuned::Timed(timing))
}

/// What rank 0 tells the others: the known row, or the plans to time and which is the model's
/// first.
fn list(
    comm: &Communicator,
    spec: &OpSpec,
    options: &TuneOptions,
    own: Choice,
    user: &UserTable,
) -> Result<Vec<u8>, TuneError> {
    let problem = spec.largest(comm.world_size())?;
    if comm.rank().get() > 0 {
        return Ok(Vec::new());
    }
    let known = user.rows().get(&planning::key(comm, &problem, spec.batch_invariant), problem.m());
    // Of a batch-invariant op only rows that were measured for one.
    if let Some(row) =
        known.filter(|row| !options.again && row.key.batch_invariant == spec.batch_invariant)
    {
        return Ok([&row.us.to_le_bytes()[..], &[0], &row.plan.to_bytes()].concat());
    }
    user.check()?;
    let target = planning::target(comm, spec)?;
    let present = own.plan.canonical(&problem, &target);
    let ranked = Plan::ranked(&problem, &target);
    let mut plans: Vec<Plan> = ranked.iter().copied().take(options.candidates.max(1)).collect();
    // The best of each communication mode besides: the model is least sure between modes.
    for &plan in &ranked {
        if plans.iter().all(|known| discriminant(&known.comm) != discriminant(&plan.comm)) {
            plans.push(plan);
        }
    }
    let model = u8::from(plans.first() != Some(&present));
    plans.retain(|plan| *plan != present);
    plans.insert(0, present);
    let plans: Vec<u8> = plans.iter().flat_map(|plan| plan.to_bytes()).collect();
    Ok([&f64::NAN.to_le_bytes()[..], &[model], &plans].concat())
}

/// The time of a known row, the number of the model's first plan, and the plans.
fn listed(bytes: &[u8]) -> (Option<f64>, usize, Vec<Plan>) {
    let Some((us, [model, plans @ ..])) =
        bytes.split_first_chunk().map(|(us, rest)| (f64::from_le_bytes(*us), rest))
    else {
        return (None, 0, Vec::new());
    };
    let plans = plans
        .as_chunks::<PLAN_BYTES>()
        .0
        .iter()
        .filter_map(|plan| Plan::from_bytes(plan).ok())
        .collect();
    ((!us.is_nan()).then_some(us), (*model).into(), plans)
}

/// Goes on where every rank can, with this rank's value and rank 0's bytes; collective.
fn agreed<V>(
    comm: &Communicator,
    mine: Result<(V, Vec<u8>), TuneError>,
) -> Result<(V, Vec<u8>), TuneError> {
    let payload = match &mine {
        Ok((_, bytes)) => [&[1], &bytes[..]].concat(),
        Err(error) => [&[0], shortened(error.to_string()).as_bytes()].concat(),
    };
    let said = comm.exchange(&payload);
    let (value, _) = mine?;
    let said = said?;
    match (0..).map(Rank::new).zip(&said).find(|(_, said)| said.first() != Some(&1)) {
        Some((rank, said)) => Err(TuneError::Peer {
            rank,
            reason: String::from_utf8_lossy(said.get(1..).unwrap_or_default()).into_owned(),
        }),
        None => Ok((value, said.first().map_or_else(Vec::new, |said| said[1..].to_vec()))),
    }
}

/// What rank 0 answers, whose budget and rounds count; collective.
fn goes_on(comm: &Communicator, mine: bool) -> Result<bool, TuneError> {
    Ok(agreed(comm, Ok(((), vec![u8::from(mine)])))?.1 == [1])
}

/// Builds a candidate and checks a result of it; why it is out, the same on every rank. Collective.
fn built<X: Element, Y: Element>(
    spec: OpSpec,
    comm: &Communicator,
    rank: &mut TuneRank<X, Y>,
) -> Result<Result<FusedLinear, String>, TuneError> {
    let op = match FusedLinear::build(spec, comm) {
        Err(error @ (BuildError::Disagreement { .. } | BuildError::Transport { .. })) => {
            return Err(error.into());
        }
        // All ranks have left the build.
        Err(error) => Err(error.to_string()),
        Ok(op) => rank.verify(&op)?.map(|()| op),
    };
    let said = comm.exchange(
        op.as_ref().err().map_or_else(String::new, |reason| shortened(reason.clone())).as_bytes(),
    )?;
    Ok(match (0..).map(Rank::new).zip(said).find(|(_, reason)| !reason.is_empty()) {
        Some((rank, reason)) => Err(format!("rank {rank}: {}", String::from_utf8_lossy(&reason))),
        None => op,
    })
}

/// Median time of each op on its slowest rank, of rounds in which each op is timed once;
/// collective.
fn times<X: Element, Y: Element>(
    ops: &[(usize, FusedLinear)],
    comm: &Communicator,
    rank: &mut TuneRank<X, Y>,
    rounds: usize,
    in_budget: impl Fn() -> bool,
) -> Result<Vec<f64>, TuneError> {
    let mut mine = vec![Vec::new(); ops.len()];
    for round in 0.. {
        let more = round < WARM_UP + rounds.min(MOST_ROUNDS) && in_budget();
        if !goes_on(comm, round < WARM_UP + LEAST_ROUNDS || more)? {
            break;
        }
        // Another op goes first in each round, so that none always follows the same other.
        for turn in 0..ops.len() {
            let at = (turn + round) % ops.len();
            let us = rank.sample(&ops[at].1, round * ops.len() + turn)?;
            if round >= WARM_UP {
                mine[at].push(us);
            }
        }
    }
    let slowest = |mine: &Vec<f64>| {
        let all = comm.exchange(bytemuck::cast_slice(mine))?;
        let of = |rank: &[u8], round: usize| {
            rank.as_chunks().0.get(round).map_or(0.0, |us| f64::from_le_bytes(*us))
        };
        let last = |round: usize| {
            all.iter().map(|rank| of(rank, round)).max_by(f64::total_cmp).unwrap_or(0.0)
        };
        let mut slowest: Vec<f64> = (0..mine.len()).map(last).collect();
        slowest.sort_by(f64::total_cmp);
        Ok(slowest[slowest.len() / 2])
    };
    mine.iter().map(slowest).collect()
}
