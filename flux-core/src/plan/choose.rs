//! The choice of a plan.
//!
//! Invariant: a measured row for the problem comes first. Otherwise the model decides, or a
//! neighbour's plan where the model sees no difference.

use super::{Plan, PlanKey, PlanTable, Target};
use crate::Problem;
use std::fmt;

/// Largest ratio of modelled times at which a neighbour's measured plan is taken: the model's own
/// mean error.
const INDIFFERENT: f64 = 1.02;

/// Origin of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOrigin {
    /// The caller named it.
    Caller,
    /// A table row for the same `m`.
    Table,
    /// A table row for another `m` of the same layer.
    Neighbour {
        /// The row's `m`.
        m: u32,
    },
    /// The cost model.
    Model,
}

impl fmt::Display for PlanOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Caller => f.write_str("named by the caller"),
            Self::Table => f.write_str("from the plan table"),
            Self::Neighbour { m } => write!(f, "from the plan table's row for m = {m}"),
            Self::Model => f.write_str("by the cost model"),
        }
    }
}

/// The plan for `problem` on `target`: from the first of `tables` with a row, or by the model.
/// `None` without a legal candidate.
pub fn choose(problem: &Problem, target: &Target, key: &PlanKey, tables: &[&PlanTable]) -> Option<(Plan, PlanOrigin)> {
    if let Some(row) = tables.iter().find_map(|table| table.exact(key, problem.m())) {
        return Some((row.plan.canonical(problem, target), PlanOrigin::Table));
    }
    let model = *Plan::ranked(problem, target).first()?;
    let limit = model.cost_ns(problem, target) * INDIFFERENT;
    let rows = tables.iter().flat_map(|table| table.neighbours(key, problem.m()));
    let adapted = rows.map(|row| (row.plan.canonical(problem, target), row.m));
    let costed = adapted.map(|(plan, m)| (plan.cost_ns(problem, target), plan, m));
    let near = costed.filter(|&(cost, ..)| cost <= limit).min_by(|a, b| a.0.total_cmp(&b.0));
    Some(near.map_or((model, PlanOrigin::Model), |(_, plan, m)| (plan, PlanOrigin::Neighbour { m })))
}
