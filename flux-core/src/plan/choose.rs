//! The plan of a caller who names none.
//!
//! Invariant: a measured row for the problem comes first; without one, the model decides, and a
//! neighbour's plan decides where the model sees no difference.

use super::{Plan, PlanKey, PlanTable, Target};
use crate::Problem;
use std::fmt;

/// A neighbour's plan may be slower by the model by this factor: the model is off by as much in the
/// mean, and the neighbour was measured.
const INDIFFERENT: f64 = 1.02;

/// Whose table a row is of.
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

/// Where a plan came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOrigin {
    /// The caller named it.
    Caller,
    /// A row of a table, for exactly these rows.
    Table(TableKind),
    /// A row of a table for other rows of the same layer.
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

/// The plan for `problem` on `target`: from the first of `tables` that has it, or by the model. Rows
/// whose plan no kernel executes are passed over. `None` where no candidate is legal.
pub fn choose(problem: &Problem, target: &Target, key: &PlanKey, tables: &[(TableKind, &PlanTable)]) -> Option<(Plan, PlanOrigin)> {
    let exact = tables.iter().find_map(|&(kind, table)| Some((kind, table.get(key, problem.m())?)));
    if let Some((kind, row)) = exact.filter(|(_, row)| row.plan.is_executable(problem)) {
        return Some((row.plan.canonical(problem, target), PlanOrigin::Table(kind)));
    }
    let model = *Plan::ranked(problem, target).first()?;
    let limit = model.cost_ns(problem, target) * INDIFFERENT;
    let rows = tables.iter().flat_map(|&(kind, table)| table.neighbours(key, problem.m()).map(move |row| (kind, row)));
    let adapted = rows.filter(|(_, row)| row.plan.is_executable(problem)).map(|(table, row)| {
        let plan = row.plan.canonical(problem, target);
        (plan.cost_ns(problem, target), plan, PlanOrigin::Neighbour { table, m: row.m })
    });
    let near = adapted.filter(|&(cost, ..)| cost <= limit).min_by(|a, b| a.0.total_cmp(&b.0));
    Some(near.map_or((model, PlanOrigin::Model), |(_, plan, origin)| (plan, origin)))
}
