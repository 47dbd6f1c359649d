//! Plans that were measured.
//!
//! Invariant: a table has one row for each key and `m`, and every row's plan parses. Its text is
//! CSV that people can read and edit; a text with any other line is no table.

use super::Plan;
use crate::tile::Generation;
use crate::{Numerics, OpKind, Problem, WorldSize};

/// First line of a table's text: the version of the format.
const HEAD: &str = "# flux plan table 1";
/// Second line: the columns.
const COLUMNS: &str = "device,kernel,driver,transport,world,op,dtype,n,k,m,plan,us";
/// The driver of rows that hold for all of them.
const ANY: &str = "any";
/// What follows the op's name in rows of batch-invariant ops.
const BATCH_INVARIANT: &str = " batch-invariant";
/// A row serves other numbers of rows up to this factor.
const NEIGHBOUR: u32 = 2;

/// Where and for which layer a plan was measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanKey {
    /// The driver's name of the GPU, or `host`.
    pub device: String,
    /// The kernel that ran: a plan of one is no plan of another.
    pub generation: Generation,
    /// The driver's version, or `any`.
    pub driver: String,
    /// The transport's name.
    pub transport: String,
    /// Ranks.
    pub world: WorldSize,
    /// The op.
    pub op: OpKind,
    /// Element types.
    pub numerics: Numerics,
    /// Global output columns.
    pub n: u32,
    /// Global inner extent.
    pub k: u32,
    /// Whether it was measured among plans with one order of sums.
    pub batch_invariant: bool,
}

/// A measured plan. Its text is a line of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRow {
    /// Where, and for which layer.
    pub key: PlanKey,
    /// Global rows.
    pub m: u32,
    /// The fastest plan.
    pub plan: Plan,
    /// Its time on the slowest rank, in microseconds.
    pub us: f64,
}

/// Rows of measured plans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PlanTable {
    rows: Vec<PlanRow>,
}

/// Why a text is no plan table.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanTableError {
    /// The text is of something else, or of another version.
    #[error(
        "the first lines are not {HEAD:?} and {COLUMNS:?}: a table of another version, or another \
         file"
    )]
    Head,
    /// A line is no row.
    #[error("line {line}: {column} is {value:?}")]
    Row {
        /// Number of the line, from 1.
        line: usize,
        /// Name of the column.
        column: &'static str,
        /// What stands there.
        value: String,
    },
}

crate::debug_is_text!(PlanTableError);

impl PlanKey {
    /// The key of a problem on such a device with this kernel.
    pub fn new(
        problem: &Problem,
        device: &str,
        generation: Generation,
        driver: &str,
        transport: &str,
    ) -> Self {
        let (world, op, numerics) = (problem.world(), problem.op(), problem.numerics());
        // Names stand in a comma-separated line that is no comment.
        let [device, driver, transport] =
            [device, driver, transport].map(|name| name.replace([',', '#', '\n', '\r'], " "));
        let (n, k) = (problem.n(), problem.k());
        Self {
            device,
            generation,
            driver,
            transport,
            world,
            op,
            numerics,
            n,
            k,
            batch_invariant: false,
        }
    }

    /// Whether a row with `other` as its key serves this one: bf16 and fp16 have one speed. A row
    /// for one order of sums serves no other op, as a faster plan may have no such order.
    fn is_served_by(&self, other: &Self) -> bool {
        let driver = if other.driver == ANY { other.driver.clone() } else { self.driver.clone() };
        let batch_invariant = self.batch_invariant && other.batch_invariant;
        self.numerics.takes_as_long_as(other.numerics)
            && *other == Self { driver, numerics: other.numerics, batch_invariant, ..self.clone() }
    }
}

impl PlanTable {
    /// The rows that come with this crate: machines that were measured.
    pub fn shipped() -> Self {
        let text = include_str!("shipped.csv");
        Self::parse(text).unwrap_or_default()
    }

    /// The rows.
    pub fn rows(&self) -> &[PlanRow] {
        &self.rows
    }

    /// Sets a row, in place of one with the same key and `m`.
    pub fn set(&mut self, row: PlanRow) {
        match self.rows.iter_mut().find(|known| known.key == row.key && known.m == row.m) {
            Some(known) => *known = row,
            None => self.rows.push(row),
        }
    }

    /// The row for exactly `m` rows of the layer; one for as few orders of sums before others, then
    /// one of the same driver before one for any.
    pub fn get(&self, key: &PlanKey, m: u32) -> Option<&PlanRow> {
        let serving = self.rows.iter().filter(|row| row.m == m && key.is_served_by(&row.key));
        serving.max_by_key(|row| (row.key.batch_invariant, row.key.driver != ANY))
    }

    /// The `m` of the layer's rows, at most `max_m`.
    pub(super) fn measured_m(&self, key: &PlanKey, max_m: u32) -> impl Iterator<Item = u32> {
        self.rows
            .iter()
            .filter(move |row| row.m <= max_m && key.is_served_by(&row.key))
            .map(|row| row.m)
    }

    /// The rows of the layer with the next smaller and the next larger `m`, within a factor of two.
    pub(super) fn neighbours(&self, key: &PlanKey, m: u32) -> impl Iterator<Item = &PlanRow> {
        let near = |row: &&PlanRow| {
            row.m <= m.saturating_mul(NEIGHBOUR) && m <= row.m.saturating_mul(NEIGHBOUR)
        };
        let serving = || self.rows.iter().filter(|row| key.is_served_by(&row.key)).filter(near);
        let below = serving().filter(|row| row.m < m).max_by_key(|row| row.m);
        below.into_iter().chain(serving().filter(|row| row.m > m).min_by_key(|row| row.m))
    }

    /// Reads a table.
    ///
    /// # Errors
    /// [`PlanTableError`] names the line and the column.
    pub fn parse(text: &str) -> Result<Self, PlanTableError> {
        let mut lines = (1..).zip(text.lines());
        for expected in [HEAD, COLUMNS] {
            if lines.next().map(|(_, line)| line) != Some(expected) {
                return Err(PlanTableError::Head);
            }
        }
        let mut table = Self::default();
        for (number, line) in lines.filter(|(_, line)| !is_comment(line)) {
            table.set(row(number, line)?);
        }
        Ok(table)
    }

    /// The text of a table with a row more, or in place of one with the same key and `m`; comments
    /// and other rows stay as they are. An empty text becomes a table.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn with_row(text: &str, new: &PlanRow) -> Result<String, PlanTableError> {
        if text.is_empty() {
            return Ok(format!("{HEAD}\n{COLUMNS}\n{new}\n"));
        }
        Self::parse(text)?;
        let replaced = |line: &&str| {
            !is_comment(line) && row(0, line).is_ok_and(|old| old.key == new.key && old.m == new.m)
        };
        let mut kept: Vec<&str> = text.lines().filter(|line| !replaced(line)).collect();
        let row = new.to_string();
        kept.push(&row);
        Ok(kept.join("\n") + "\n")
    }
}

fn is_comment(line: &str) -> bool {
    line.is_empty() || line.starts_with('#')
}

fn row(line: usize, text: &str) -> Result<PlanRow, PlanTableError> {
    let cells: Vec<&str> = text.split(',').collect();
    let names: Vec<&'static str> = COLUMNS.split(',').collect();
    let cell = |at: usize| cells.get(at).copied().unwrap_or_default();
    let wrong = |at: usize| PlanTableError::Row {
        line,
        column: names.get(at).copied().unwrap_or("end"),
        value: cell(at).to_owned(),
    };
    if cells.len() != names.len() {
        return Err(wrong(names.len().min(cells.len())));
    }
    let number = |at: usize| {
        cell(at).parse::<u32>().ok().filter(|&value| value > 0).ok_or_else(|| wrong(at))
    };
    let generation = Generation::ALL.into_iter().find(|generation| generation.name() == cell(1));
    let (op, batch_invariant) =
        cell(5).strip_suffix(BATCH_INVARIANT).map_or((cell(5), false), |op| (op, true));
    let op = OpKind::ALL.into_iter().find(|kind| kind.name() == op);
    let key = PlanKey {
        device: cell(0).to_owned(),
        generation: generation.ok_or_else(|| wrong(1))?,
        driver: cell(2).to_owned(),
        transport: cell(3).to_owned(),
        world: WorldSize::new(number(4)?).ok_or_else(|| wrong(4))?,
        op: op.ok_or_else(|| wrong(5))?,
        numerics: cell(6).parse().map_err(|_| wrong(6))?,
        n: number(7)?,
        k: number(8)?,
        batch_invariant,
    };
    let us = cell(11)
        .parse::<f64>()
        .ok()
        .filter(|us| us.is_finite() && *us >= 0.0)
        .ok_or_else(|| wrong(11))?;
    Ok(PlanRow { key, m: number(9)?, plan: cell(10).parse().map_err(|_| wrong(10))?, us })
}

impl std::fmt::Display for PlanRow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            key:
                PlanKey {
                    device,
                    generation,
                    driver,
                    transport,
                    world,
                    op,
                    numerics,
                    n,
                    k,
                    batch_invariant,
                },
            m,
            plan,
            us,
        } = self;
        let order = if *batch_invariant { BATCH_INVARIANT } else { "" };
        write!(
            f,
            "{device},{generation},{driver},{transport},{world},{op}{order},{numerics},{n},{k},{m},{plan},{us:.2}"
        )
    }
}

/// The text that [`PlanTable::parse`] reads, in the order of the rows.
impl std::fmt::Display for PlanTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{HEAD}\n{COLUMNS}")?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{row}"))
    }
}
