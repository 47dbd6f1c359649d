//! The choice of a plan.
//!
//! Invariant: a measured row for the problem comes first. Otherwise the model decides, or a
//! neighbour's plan where the model sees no difference.

use super::{Plan, PlanKey, PlanTable, Target};
use crate::Problem;
use std::fmt;

/// A neighbour's plan may be slower by the model by this factor: the model is off by as much in the
/// mean, and the neighbour was measured.
const INDIFFERENT: f64 = 1.02;

/// Owner of a plan table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableKind {
    /// The user's file, which the tuner writes.
    User,
    /// [`PlanTable::shipped`].
    Shipped,
}

impl fmt::Display for TableKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::User => "the user's plan table",
            Self::Shipped => "the shipped plan table",
        })
    }
}

/// Origin of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOrigin {
    /// The caller named it.
    Caller,
    /// A table row for the same `m`.
    Table(TableKind),
    /// A table row for another `m` of the same layer.
    Neighbour {
        /// The table.
        table: TableKind,
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
            Self::Table(table) => write!(f, "from {table}"),
            Self::Neighbour { table, m } => write!(f, "from the row for m = {m} of {table}"),
            Self::Model => f.write_str("by the cost model"),
        }
    }
}

/// The plan for `problem` on `target`: from the first of `tables` with a row that a kernel can
/// execute, or by the model. `None` without a legal candidate.
pub fn choose(
    problem: &Problem,
    target: &Target,
    key: &PlanKey,
    tables: &[(TableKind, &PlanTable)],
) -> Option<(Plan, PlanOrigin)> {
    let exact = tables.iter().find_map(|&(kind, table)| {
        let row = table.get(key, problem.m())?;
        row.plan.is_executable(problem, target).then_some((kind, row.plan))
    });
    if let Some((kind, plan)) = exact {
        return Some((plan.canonical(problem, target), PlanOrigin::Table(kind)));
    }
    let model = *Plan::ranked(problem, target).first()?;
    let limit = model.cost_ns(problem, target) * INDIFFERENT;
    let rows = tables
        .iter()
        .flat_map(|&(kind, table)| table.neighbours(key, problem.m()).map(move |row| (kind, row)));
    let adapted =
        rows.filter(|(_, row)| row.plan.is_executable(problem, target)).map(|(table, row)| {
            let plan = row.plan.canonical(problem, target);
            (plan.cost_ns(problem, target), plan, PlanOrigin::Neighbour { table, m: row.m })
        });
    let near = adapted.filter(|&(cost, ..)| cost <= limit).min_by(|a, b| a.0.total_cmp(&b.0));
    Some(near.map_or((model, PlanOrigin::Model), |(_, plan, origin)| (plan, origin)))
}
