//! The phases of a case, on one rank.

use crate::harness::{
    Defect, EpilogueSpec, Fill, OperandSet, Operands, RankContext, Verdict, Violation, build_with,
    data,
};
use crate::plan::Overrides;
use anyhow::Context;
use flux_core::Problem;
use flux_kernels::Element;
use flux_ops::FusedLinear;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

/// What a case has shown, on one rank or on all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct SoakResult {
    calls: u64,
    checked: u64,
    violations: u64,
    first: Option<Violation>,
    max_rel_err: f64,
    differing: u64,
}

impl SoakResult {
    pub(super) fn passed(&self) -> bool {
        self.violations == 0 && self.differing == 0 && self.checked > 0
    }

    /// Both; calls are collective, so they are counted once.
    pub(super) fn merge(self, other: Self) -> Self {
        Self {
            calls: self.calls.max(other.calls),
            checked: self.checked + other.checked,
            violations: self.violations + other.violations,
            first: self.first.or(other.first),
            max_rel_err: self.max_rel_err.max(other.max_rel_err),
            differing: self.differing + other.differing,
        }
    }

    /// Both, of one case after the other.
    pub(super) fn then(self, next: Self) -> Self {
        Self { calls: self.calls + next.calls, ..Self { calls: 0, ..self }.merge(next) }
    }

    fn add(&mut self, verdict: Verdict) {
        self.checked += 1;
        self.violations += verdict.violations;
        self.first = self.first.or(verdict.first);
        self.max_rel_err = self.max_rel_err.max(verdict.max_rel_err());
    }
}

impl fmt::Display for SoakResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { calls, checked, violations, first, max_rel_err, differing } = self;
        write!(f, "{calls} calls, {checked} outputs checked, max_rel_err {max_rel_err:.1e}")?;
        if let Some(first) = first {
            write!(f, ", {violations} wrong elements, the first at {first}")?;
        }
        if *differing > 0 {
            write!(f, ", {differing} outputs differ between equal runs")?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SoakRun {
    pub(super) execution: Overrides,
    pub(super) epilogue: EpilogueSpec,
    /// Calls apart, and in a row.
    pub(super) apart: u64,
    pub(super) in_a_row: u64,
    pub(super) seed: u64,
    pub(super) defect: Defect,
}

/// Runs a problem's phases on this rank; collective.
pub(super) fn soak<X: Element, Y: Element>(
    ctx: &RankContext,
    problem: &Problem,
    run: &SoakRun,
) -> anyhow::Result<SoakResult> {
    let op = build_with(problem, ctx.comm(), run.execution, run.epilogue)?;
    let mut sets = [
        ctx.operand_set_with::<X, Y>(op.largest(), run.epilogue)?,
        ctx.operand_set_with(op.largest(), run.epilogue)?,
    ];
    let mut soaked = SoakResult::default();
    let rank = RankCase { ctx, op: &op, run };
    rank.apart(&mut sets[0], run.apart, &mut soaked).context("calls apart")?;
    rank.in_a_row(&mut sets, run.in_a_row, &mut soaked).context("calls in a row")?;
    rank.again(&mut sets[0], &mut soaked).context("equal calls")?;
    drop(sets);
    rank.rows::<X, Y>(run.in_a_row / 2, &mut soaked).context("calls with changing rows")?;
    Ok(soaked)
}

struct RankCase<'a> {
    ctx: &'a RankContext,
    op: &'a FusedLinear,
    run: &'a SoakRun,
}

/// Longest delay of a rank: longer than any of these calls takes on a GPU.
const LONGEST_NS: u64 = 3_000_000;

impl RankCase<'_> {
    fn operands(&self, call: u64, fill: Fill) -> Operands {
        Operands::new(*self.op.largest(), self.run.seed, call, fill)
            .with_epilogue(self.run.epilogue)
    }

    /// Delays this rank in its turn: turns of 4 calls, half of them delayed, in an order by the
    /// seed.
    fn delay(&self, call: u64, pattern: u32) -> anyhow::Result<()> {
        let turn =
            (call / 4).wrapping_add(self.run.seed) % u64::from(self.op.largest().world().get());
        let random = data::seed(self.run.seed, pattern, call);
        if turn == u64::from(self.ctx.rank().get()) && random.is_multiple_of(2) {
            self.ctx.delay(Duration::from_nanos(random / 2 % LONGEST_NS))?;
        }
        Ok(())
    }

    fn verify<X: Element, Y: Element>(
        &self,
        set: &mut OperandSet<X, Y>,
    ) -> anyhow::Result<Verdict> {
        self.run.defect.apply(self.ctx, set)?;
        let problem = set.holds.map_or(*self.op.largest(), |held| held.problem);
        self.ctx.verify(set, &self.op.plan(problem.m() as usize)?)
    }

    fn apart<X: Element, Y: Element>(
        &self,
        set: &mut OperandSet<X, Y>,
        calls: u64,
        soaked: &mut SoakResult,
    ) -> anyhow::Result<()> {
        for call in 0..calls {
            self.ctx.fill(set, self.operands(call, Fill::SmallInts))?;
            self.ctx.poison_results(set)?;
            // SAFETY: the ranks met after the last call, and meet below before the next.
            unsafe { self.ctx.poison_workspace()? };
            self.ctx.sync(self.op)?;
            self.ctx.comm().barrier()?;
            self.delay(call, 10)?;
            self.ctx.forward(self.op, set)?;
            self.ctx.sync(self.op)?;
            soaked.calls += 1;
            soaked.add(self.verify(set)?);
            self.ctx.comm().barrier()?;
        }
        Ok(())
    }

    fn in_a_row<X: Element, Y: Element>(
        &self,
        sets: &mut [OperandSet<X, Y>; 2],
        calls: u64,
        soaked: &mut SoakResult,
    ) -> anyhow::Result<()> {
        for call in 0..calls {
            let set = &mut sets[(call % 2) as usize];
            self.ctx.fill(set, self.operands(1000 + call, Fill::SmallInts))?;
            self.ctx.poison_results(set)?;
            self.delay(call, 11)?;
            self.ctx.forward(self.op, set)?;
            soaked.calls += 1;
            // Ranks check different calls, so that checking does not bring them back into step.
            if (call + u64::from(self.ctx.rank().get())) % 8 == 0 || call + 2 >= calls {
                soaked.add(self.verify(set)?);
            }
        }
        self.ctx.sync(self.op)
    }

    /// Calls in a row, each with other rows than the one before: at least one of each number.
    fn rows<X: Element, Y: Element>(
        &self,
        calls: u64,
        soaked: &mut SoakResult,
    ) -> anyhow::Result<()> {
        let largest = *self.op.largest();
        let most = largest.m();
        let mut rows = vec![1, most.div_ceil(7), most / 2 + 1, most - most / 3, most];
        rows.sort_unstable();
        rows.dedup();
        let problems =
            rows.into_iter().map(|m| largest.with_m(m)).collect::<Result<Vec<_>, _>>()?;
        let set = |problem| {
            Ok((problem, self.ctx.operand_set_with::<X, Y>(&problem, self.run.epilogue)?))
        };
        let mut sets = problems.into_iter().map(set).collect::<anyhow::Result<Vec<_>>>()?;
        // To free and to allocate may wait for all kernels of a device that ranks share, and these
        // for the ranks that free.
        self.ctx.comm().barrier()?;
        let (count, rank) = (sets.len() as u64, u64::from(self.ctx.rank().get()));
        let calls = calls.clamp(count, 4 * count);
        for call in 0..calls {
            // Every order of neighbours.
            let (problem, set) = &mut sets[((call * (1 + call / count)) % count) as usize];
            let operands = Operands::new(*problem, self.run.seed, 2000 + call, Fill::SmallInts)
                .with_epilogue(self.run.epilogue);
            self.ctx.fill(set, operands)?;
            self.ctx.poison_results(set)?;
            self.delay(call, 20)?;
            self.ctx.forward(self.op, set)?;
            soaked.calls += 1;
            if (call + rank) % 3 == 0 || call + 2 >= calls {
                soaked.add(self.verify(set)?);
            }
        }
        self.ctx.sync(self.op)
    }

    fn again<X: Element, Y: Element>(
        &self,
        set: &mut OperandSet<X, Y>,
        soaked: &mut SoakResult,
    ) -> anyhow::Result<()> {
        let mut bits: Option<Vec<Y>> = None;
        for run in 0..4 {
            self.ctx.fill(set, self.operands(1 << 40, Fill::Uniform))?;
            self.ctx.poison_results(set)?;
            // Calls of a turn, so that in each run another rank is late.
            self.delay(4 * u64::from(run), 12 + run)?;
            self.ctx.forward(self.op, set)?;
            self.ctx.sync(self.op)?;
            soaked.calls += 1;
            let now = set
                .weights
                .iter()
                .map(|weight| self.ctx.download(&weight.y))
                .collect::<anyhow::Result<Vec<_>>>()?
                .concat();
            match &bits {
                None => soaked.add(self.verify(set)?),
                Some(before) => soaked.differing += u64::from(bytes(before) != bytes(&now)),
            }
            bits = Some(now);
        }
        Ok(())
    }
}

fn bytes<T: Element>(bits: &[T]) -> &[u8] {
    bytemuck::cast_slice(bits)
}
