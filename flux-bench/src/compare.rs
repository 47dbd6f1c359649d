//! Two records of one kind, row by row.
//!
//! Invariant: every row of either is a row of the comparison, or is named as one that the other
//! lacks.

use crate::harness::Times;
use crate::record::{self, Figure, Record};
use crate::report::{dashed, markdown_table, ms};
use anyhow::{bail, ensure};
use std::mem::discriminant;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How much slower a row may be, in per cent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound(f64);

impl Bound {
    /// Any row may be as slow as it is.
    pub(crate) const NONE: Self = Self(f64::INFINITY);
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let percent = word.strip_suffix('%').unwrap_or(word).parse::<f64>().ok();
        percent.filter(|p| p.is_finite() && *p >= 0.0).map(Self).ok_or_else(|| {
            format!("{word:?} is no bound: give per cent, from 0 on, as in 2% or 2.5%")
        })
    }
}

/// The same row of both.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pair {
    pub(crate) before: Figure,
    pub(crate) after: Figure,
}

impl Pair {
    /// In per cent of the earlier time; above zero where the later is slower.
    pub(crate) fn change(&self) -> f64 {
        100.0 * (self.after.ms.median / self.before.ms.median - 1.0)
    }

    /// The same of the control.
    pub(crate) fn control(&self) -> Option<f64> {
        Some(100.0 * (self.after.control? / self.before.control? - 1.0))
    }

    /// Whether the ranges from the tenth to the ninetieth percentile have a time in common.
    pub(crate) fn within_noise(&self) -> bool {
        let (a, b) = (&self.before.ms, &self.after.ms);
        a.p10 <= b.p90 && b.p10 <= a.p90
    }

    pub(crate) fn exceeds(&self, Bound(most): Bound) -> bool {
        self.change() > most
    }
}

/// All rows of two records.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) names: [String; 2],
    pub(crate) records: [Record; 2],
    pub(crate) pairs: Vec<Pair>,
    /// Rows that only the first has, and only the second.
    pub(crate) alone: [Vec<String>; 2],
}

/// Compares the records in two files.
///
/// # Errors
/// There are not two, one is no record, or they are of two kinds.
pub(crate) fn files(paths: &[PathBuf]) -> anyhow::Result<Comparison> {
    let [before, after] = paths else {
        bail!("two records are compared, not {}: name the earlier, then the later", paths.len())
    };
    let name = |path: &Path| path.display().to_string();
    Comparison::of([name(before), name(after)], [record::read(before)?, record::read(after)?])
}

impl Comparison {
    fn of(names: [String; 2], records: [Record; 2]) -> anyhow::Result<Self> {
        ensure!(
            discriminant(&records[0]) == discriminant(&records[1]),
            "{} and {} are records of two kinds, whose rows cannot be compared",
            names[0],
            names[1]
        );
        let [before, mut after] = [records[0].figures(), records[1].figures()];
        ensure!(!before.is_empty(), "{} has no times of flux to compare", names[0]);
        let (mut pairs, mut lacking) = (Vec::new(), Vec::new());
        for before in before {
            match after.iter().position(|after| after.row == before.row) {
                Some(at) => pairs.push(Pair { before, after: after.remove(at) }),
                None => lacking.push(before.row),
            }
        }
        let added = after.into_iter().map(|figure| figure.row).collect();
        Ok(Self { names, records, pairs, alone: [lacking, added] })
    }

    /// How many rows are slower than the bound.
    pub(crate) fn slower(&self, bound: Bound) -> usize {
        self.pairs.iter().filter(|pair| pair.exceeds(bound)).count()
    }

    /// What is said above the rows: what ran where, and what one of both lacks.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = ["before", "after"]
            .iter()
            .zip(&self.names)
            .zip(&self.records)
            .map(|((when, name), record)| {
                let origin = record.origin();
                format!(
                    "{when}: {name}, {}, {}commit {}, {}: {}",
                    origin.machine(),
                    record.transport().map_or_else(String::new, |on| format!("{on}, ")),
                    origin.commit,
                    origin.date,
                    origin.command
                )
            })
            .collect();
        let [before, after] = [&self.records[0], &self.records[1]];
        let machines = [before, after].map(|record| record.origin().machine());
        if machines[0] != machines[1] || before.transport() != after.transport() {
            notes.push("They are of two machines or transports.".to_owned());
        }
        for (rows, name) in self.alone.iter().zip([&self.names[1], &self.names[0]]) {
            if !rows.is_empty() {
                notes.push(format!("{name} lacks: {}.", rows.join("; ")));
            }
        }
        notes
    }

    /// The verdict in one sentence.
    pub(crate) fn verdict(&self, bound: Bound) -> String {
        let (slower, all) = (self.slower(bound), self.pairs.len());
        if bound == Bound::NONE {
            return format!("{all} rows are in both.");
        }
        format!("{slower} of {all} rows are more than {} % slower.", bound.0)
    }

    /// As Markdown.
    pub(crate) fn markdown(&self, bound: Bound) -> String {
        let notes = self.notes().join("\n\n");
        let rows = self.pairs.iter().map(|pair| Self::cells(pair, bound));
        let table = markdown_table(&COLUMNS, 1..7, rows);
        format!("{notes}\n\n{table}\n{} {CONTROL}\n", self.verdict(bound))
    }

    /// The cells of a row, in the order of [`COLUMNS`].
    pub(crate) fn cells(pair: &Pair, bound: Bound) -> Vec<String> {
        let range = |times: &Times| format!("{} to {}", ms(times.p10), ms(times.p90));
        let [before, after] = [&pair.before.ms, &pair.after.ms];
        let percent = |value: f64| format!("{value:+.1}");
        let word = match (pair.exceeds(bound), pair.within_noise()) {
            (true, _) => "too slow",
            (false, true) => "within noise",
            (false, false) if pair.change() > 0.0 => "slower",
            (false, false) => "faster",
        };
        vec![
            pair.before.row.clone(),
            ms(before.median),
            range(before),
            ms(after.median),
            range(after),
            percent(pair.change()),
            dashed(pair.control().map(percent)),
            word.to_owned(),
        ]
    }
}

/// What the columns are.
pub(crate) const COLUMNS: [&str; 8] =
    ["row", "before ms", "p10 to p90", "after ms", "p10 to p90", "change %", "control %", ""];

/// What the control says.
pub(crate) const CONTROL: &str = "The control is a time of the same run without flux, such as \
                                  T_serial: it moves with the machine.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Times;
    use std::fs;

    fn figure(median: f64) -> Figure {
        let ms = Times { p10: median * 0.99, median, p90: median * 1.01 };
        Figure { row: "a row".to_owned(), ms, control: Some(2.0 * median) }
    }

    #[test]
    fn a_row_is_too_slow_above_the_bound_and_not_at_it() {
        let pair = Pair { before: figure(1.0), after: figure(1.03) };
        let bound = |word: &str| word.parse::<Bound>().unwrap();
        assert!(pair.exceeds(bound("2%")) && pair.exceeds(bound("2.9")));
        assert!(!pair.exceeds(bound("3.1%")) && !pair.exceeds(Bound::NONE));
        assert!(!pair.within_noise());
        assert!(Pair { before: figure(1.0), after: figure(1.015) }.within_noise());
        assert!((pair.control().unwrap() - 3.0).abs() < 1e-9);
        for word in ["", "x", "-1", "nan%", "inf"] {
            assert!(word.parse::<Bound>().unwrap_err().contains("give per cent"), "{word}");
        }
    }

    #[test]
    fn rows_of_one_record_alone_are_named_and_kinds_do_not_mix() {
        let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
        let [full, layers] =
            ["h200-x4-nvlink.json", "h200-x4-nvlink-layers.json"].map(|name| results.join(name));
        let folder = tempfile::tempdir().unwrap();
        let cut = folder.path().join("cut.json");
        let mut value: serde_json::Value =
            serde_json::from_slice(&fs::read(&full).unwrap()).unwrap();
        value["rows"].as_array_mut().unwrap().remove(0);
        fs::write(&cut, value.to_string()).unwrap();

        let found = files(&[full.clone(), cut]).unwrap();
        assert_eq!(found.alone, [vec!["ag_gemm gpt3 m 64".to_owned()], vec![]]);
        assert_eq!((found.pairs.len(), found.slower("0%".parse().unwrap())), (31, 0));
        let text = found.markdown(Bound::NONE);
        assert!(text.contains("cut.json lacks: ag_gemm gpt3 m 64."), "{text}");
        assert!(text.contains("| +0.0 | +0.0 | within noise |"), "{text}");

        let why = files(&[full.clone(), layers]).unwrap_err().to_string();
        assert!(why.contains("are records of two kinds"), "{why}");
        assert!(files(&[full]).unwrap_err().to_string().contains("two records are compared"));
    }
}
