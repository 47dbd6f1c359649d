//! The rows of each call, as a serving engine's steps have them.
//!
//! Invariant: all ranks get the same rows from the same words.

use super::super::SEED;
use crate::harness::data;
use std::fs;
use std::path::Path;

/// Most rows of a call.
const MOST: u32 = 1 << 20;
/// Rows of a prefill chunk of the mix.
const PREFILL: u32 = 8192;
/// Rows of prefill and decode in one step.
const MIXED: [u32; 2] = [300, 2000];
/// Rows of a decode step: one for each sequence.
const DECODE: [u32; 2] = [1, 512];
/// Of so many calls of the mix one is of prefill and three are mixed.
const TURN: u64 = 16;
/// The generator's number beside those of operands and delays.
const STREAM: u32 = 40;

/// What `--trace-m` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Mix,
    File { name: String, rows: Vec<u32> },
}

/// The rows of all calls.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    pub(super) name: String,
    pub(super) rows: Vec<u32>,
}

/// The source that a word of the command line names.
pub(crate) fn rows(word: &str) -> Result<Source, String> {
    if word == "mix" {
        return Ok(Source::Mix);
    }
    let text = fs::read_to_string(word)
        .map_err(|error| format!("{word}: {error}; `mix` needs no file"))?;
    let rows = parse(&text).map_err(|why| format!("{word}: {why}"))?;
    // Nothing of this machine's folders gets into a record.
    let name = Path::new(word)
        .file_name()
        .map_or_else(|| word.to_owned(), |name| name.to_string_lossy().into_owned());
    Ok(Source::File { name, rows })
}

fn parse(text: &str) -> Result<Vec<u32>, String> {
    let rows = (1..).zip(text.lines()).filter_map(|(number, line)| {
        let value = line.split('#').next()?.trim();
        let known = value.parse().ok().filter(|m| (1..=MOST).contains(m));
        let wrong = || format!("line {number}: {value:?} is no number of rows from 1 to {MOST}");
        (!value.is_empty()).then(|| known.ok_or_else(wrong))
    });
    let rows = rows.collect::<Result<Vec<u32>, _>>()?;
    if rows.is_empty() { Err("it has no line with a number of rows".to_owned()) } else { Ok(rows) }
}

impl Source {
    /// So many calls; a file begins again at its end.
    pub(in super::super) fn trace(&self, calls: u64) -> Trace {
        match self {
            Self::Mix => Trace { name: "mix".to_owned(), rows: mix(calls) },
            Self::File { name, rows } => Trace {
                name: name.clone(),
                rows: rows.iter().copied().cycle().take(calls as usize).collect(),
            },
        }
    }
}

/// Prefill chunks, mixed steps and decode steps in an order of the seed; no call has as many rows
/// as the one before.
fn mix(calls: u64) -> Vec<u32> {
    let mut rows: Vec<u32> = Vec::with_capacity(calls as usize);
    for draw in 0.. {
        if rows.len() as u64 == calls {
            break;
        }
        let random = data::seed(SEED, STREAM, draw);
        let within =
            |[least, most]: [u32; 2]| least + (random / TURN % u64::from(most - least + 1)) as u32;
        let m = match random % TURN {
            0 => PREFILL,
            1..=3 => within(MIXED),
            _ => within(DECODE),
        };
        if rows.last() != Some(&m) {
            rows.push(m);
        }
    }
    rows
}

impl Trace {
    pub(in super::super) fn calls(&self) -> usize {
        self.rows.len()
    }

    pub(in super::super) fn most(&self) -> usize {
        self.rows.iter().copied().max().unwrap_or(0) as usize
    }

    /// How many calls with the most rows have as many rows together.
    pub(in super::super) fn calls_of_the_most(&self) -> f64 {
        self.rows.iter().map(|&m| f64::from(m)).sum::<f64>() / self.most().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_number_a_line_and_comments_and_begins_again() {
        let rows = parse("# steps\n8192\n\n 7 # decode\n512\n").unwrap();
        assert_eq!(rows, [8192, 7, 512]);
        let trace = Source::File { name: "steps".to_owned(), rows }.trace(5);
        assert_eq!((&trace.rows[..], trace.most()), (&[8192, 7, 512, 8192, 7][..], 8192));
        assert!((trace.calls_of_the_most() - 16910.0 / 8192.0).abs() < 1e-12);
    }

    #[test]
    fn what_is_no_number_of_rows_is_named_with_its_line() {
        for (text, why) in [
            ("16\n0\n", "line 2: \"0\" is no number of rows from 1 to 1048576"),
            ("# none\n16 17", "line 2: \"16 17\" is no number"),
            ("-1", "line 1: \"-1\" is no number"),
            ("1048577", "line 1: \"1048577\" is no number"),
            ("8k", "line 1: \"8k\" is no number"),
            ("\n# nothing\n", "it has no line with a number of rows"),
        ] {
            let refused = parse(text).unwrap_err();
            assert!(refused.starts_with(why), "{text:?}: {refused}");
        }
        let missing = rows("/no/such/file").unwrap_err();
        assert!(
            missing.starts_with("/no/such/file: ") && missing.ends_with("`mix` needs no file"),
            "{missing}"
        );
    }

    #[test]
    fn the_mix_has_all_steps_and_other_rows_in_each_call_and_is_always_the_same() {
        let trace = Source::Mix.trace(20_000);
        assert_eq!(trace.rows, Source::Mix.trace(20_000).rows);
        assert_eq!(trace.calls(), 20_000);
        assert!(trace.rows.windows(2).all(|pair| pair[0] != pair[1]));
        let share =
            |of: fn(u32) -> bool| trace.rows.iter().filter(|&&m| of(m)).count() as f64 / 20_000.0;
        assert!((0.05..0.07).contains(&share(|m| m == PREFILL)), "{}", share(|m| m == PREFILL));
        assert!((0.72..0.82).contains(&share(|m| m <= 512)), "{}", share(|m| m <= 512));
        assert!(trace.rows.iter().all(|&m| m == PREFILL || (1..=2000).contains(&m)));
        assert!(
            trace.rows.contains(&1)
                && trace.rows.contains(&512)
                && trace.rows.iter().any(|m| (1990..=2000).contains(m))
        );
    }
}
