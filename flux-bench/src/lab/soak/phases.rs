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
    let mut rank = RankCase { ctx, op: &op, run, soaked: SoakResult::default() };
    rank.apart(&mut sets[0]).context("calls apart")?;
    rank.in_a_row(&mut sets).context("calls in a row")?;
    rank.again(&mut sets[0]).context("equal calls")?;
    drop(sets);
    rank.rows::<X, Y>().context("calls with changing rows")?;
    Ok(rank.soaked)
}

struct RankCase<'a> {
    ctx: &'a RankContext,
    op: &'a FusedLinear,
    run: &'a SoakRun,
    soaked: SoakResult,
}

/// Longest delay of a rank: longer than any of these calls takes on a GPU.
const LONGEST_NS: u64 = 3_000_000;

impl RankCase<'_> {
    fn operands(&self, call: u64, fill: Fill) -> Operands {
        let problem = *self.op.largest();
        Operands::new(problem, self.run.seed, call, fill).with_epilogue(self.run.epilogue)
    }

    /// Calls the op, after a delay of this rank in its turn: turns of 4 calls, half of them
    /// delayed, in an order by the seed.
    fn call<X: Element, Y: Element>(
        &mut self,
        set: &mut OperandSet<X, Y>,
        (call, pattern): (u64, u32),
    ) -> anyhow::Result<()> {
        let seed = self.run.seed;
        let turn = (call / 4).wrapping_add(seed) % u64::from(self.op.largest().world().get());
        let random = data::seed(seed, pattern, call);
        if turn == u64::from(self.ctx.rank().get()) && random.is_multiple_of(2) {
            self.ctx.delay(Duration::from_nanos(random / 2 % LONGEST_NS))?;
        }
        self.soaked.calls += 1;
        self.ctx.forward(self.op, set)
    }

    /// Fills a set with these operands, and its outputs with NaN.
    fn fill<X: Element, Y: Element>(
        &self,
        set: &mut OperandSet<X, Y>,
        operands: Operands,
    ) -> anyhow::Result<()> {
        self.ctx.fill(set, operands)?;
        self.ctx.poison_results(set)
    }

    fn verify<X: Element, Y: Element>(&mut self, set: &mut OperandSet<X, Y>) -> anyhow::Result<()> {
        self.run.defect.apply(self.ctx, set)?;
        let problem = set.holds.map_or(*self.op.largest(), |held| held.problem);
        self.soaked.add(self.ctx.verify(set, &self.op.plan(problem.m() as usize)?)?);
        Ok(())
    }

    fn apart<X: Element, Y: Element>(&mut self, set: &mut OperandSet<X, Y>) -> anyhow::Result<()> {
        for call in 0..self.run.apart {
            self.fill(set, self.operands(call, Fill::SmallInts))?;
            // SAFETY: the ranks met after the last call, and meet below before the next.
            unsafe { self.ctx.poison_workspace()? };
            self.ctx.sync(self.op)?;
            self.ctx.comm().barrier()?;
            self.call(set, (call, 10))?;
            self.ctx.sync(self.op)?;
            self.verify(set)?;
            self.ctx.comm().barrier()?;
        }
        Ok(())
    }

    fn in_a_row<X: Element, Y: Element>(
        &mut self,
        sets: &mut [OperandSet<X, Y>; 2],
    ) -> anyhow::Result<()> {
        let (calls, rank) = (self.run.in_a_row, u64::from(self.ctx.rank().get()));
        for call in 0..calls {
            let set = &mut sets[(call % 2) as usize];
            self.fill(set, self.operands(1000 + call, Fill::SmallInts))?;
            self.call(set, (call, 11))?;
            // Ranks check different calls, so that checking does not bring them back into step.
            if (call + rank) % 8 == 0 || call + 2 >= calls {
                self.verify(set)?;
            }
        }
        self.ctx.sync(self.op)
    }

    /// Calls in a row, each with other rows than the one before: at least one of each number.
    fn rows<X: Element, Y: Element>(&mut self) -> anyhow::Result<()> {
        let largest = *self.op.largest();
        let most = largest.m();
        let mut rows = vec![1, most.div_ceil(7), most / 2 + 1, most - most / 3, most];
        rows.sort_unstable();
        rows.dedup();
        let set = |m| {
            let problem = largest.with_m(m)?;
            Ok((problem, self.ctx.operand_set_with::<X, Y>(&problem, self.run.epilogue)?))
        };
        let mut sets = rows.into_iter().map(set).collect::<anyhow::Result<Vec<_>>>()?;
        // To free and to allocate may wait for all kernels of a device that ranks share, and these
        // for the ranks that free.
        self.ctx.comm().barrier()?;
        let (count, rank) = (sets.len() as u64, u64::from(self.ctx.rank().get()));
        let calls = (self.run.in_a_row / 2).clamp(count, 4 * count);
        for call in 0..calls {
            // Every order of neighbours.
            let (problem, set) = &mut sets[((call * (1 + call / count)) % count) as usize];
            let of_all = self.operands(2000 + call, Fill::SmallInts);
            self.fill(set, Operands { problem: *problem, ..of_all })?;
            self.call(set, (call, 20))?;
            if (call + rank) % 3 == 0 || call + 2 >= calls {
                self.verify(set)?;
            }
        }
        self.ctx.sync(self.op)
    }

    fn again<X: Element, Y: Element>(&mut self, set: &mut OperandSet<X, Y>) -> anyhow::Result<()> {
        let mut bits: Option<Vec<Y>> = None;
        for run in 0..4 {
            self.fill(set, self.operands(1 << 40, Fill::Uniform))?;
            // Calls of a turn, so that in each run another rank is late.
            self.call(set, (4 * u64::from(run), 12 + run))?;
            self.ctx.sync(self.op)?;
            let now = set
                .weights
                .iter()
                .map(|weight| self.ctx.download(&weight.y))
                .collect::<anyhow::Result<Vec<_>>>()?
                .concat();
            match &bits {
                None => self.verify(set)?,
                Some(before) => {
                    self.soaked.differing += u64::from(bytes(before) != bytes(&now));
                }
            }
            bits = Some(now);
        }
        Ok(())
    }
}

fn bytes<T: Element>(bits: &[T]) -> &[u8] {
    bytemuck::cast_slice(bits)
}
