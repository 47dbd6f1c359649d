//! The text of a plan: `key=value` words of command lines, records and plan tables.
//!
//! Invariant: parsing a displayed plan gives the same plan.

use super::{Chunk, CommMode, KSplit, Mover, Plan, RowMapping};
use crate::TileShape;
use std::fmt;
use std::str::FromStr;

/// Why a text does not parse.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParsePlanError {
    /// The word is not of the form `key=value`.
    #[error("{word:?} is not of the form key=value; a plan reads like `{EXAMPLE}`")]
    Word {
        /// The word.
        word: String,
    },
    /// The key is unknown.
    #[error("a plan has no {key:?}: its keys are tile, rows, k, chunk, k-slices and comm")]
    Key {
        /// The key.
        key: String,
    },
    /// The key occurs twice.
    #[error("{key} is given twice")]
    Twice {
        /// The key.
        key: String,
    },
    /// The value does not fit the key.
    #[error("{key}={value}: {expected}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// Values of the key.
        expected: &'static str,
    },
    /// The tile is missing.
    #[error("a plan names its tile, as in tile=128x256x64")]
    NoTile,
}

crate::debug_is_text!(ParsePlanError);

const EXAMPLE: &str =
    "tile=256x192x64 rows=per-shard:2 k=stream-k chunk=1 k-slices=4 comm=fused:kernel";

/// Keys with their values.
const KEYS: [(&str, &str); 6] = [
    ("tile", "expected rows x columns x step along k, as in 128x256x64"),
    (
        "rows",
        "expected flattened, flattened:2 for two exchanges, or per-shard:G with G shards side by \
         side",
    ),
    ("k", "expected whole, stream-k, or split-k:N with N of at least 2"),
    ("chunk", "expected shard, or the tiles that one signal announces"),
    ("k-slices", "expected a number of at least 1"),
    (
        "comm",
        "expected fused:kernel, fused:copy-engine, overlapped:N with N peers at once, or \
         sequential",
    ),
];

impl FromStr for Plan {
    type Err = ParsePlanError;

    /// Reads `key=value` words in any order. `tile` is required; other keys default to
    /// [`Plan::of`].
    fn from_str(text: &str) -> Result<Self, ParsePlanError> {
        let mut seen = Vec::new();
        let mut plan = Self::of(TileShape::new(0, 0, 0));
        for word in text.split_whitespace() {
            let (key, value) = word
                .split_once('=')
                .ok_or_else(|| ParsePlanError::Word { word: word.to_owned() })?;
            let no_key = || ParsePlanError::Key { key: key.to_owned() };
            let &(key, expected) = KEYS.iter().find(|known| known.0 == key).ok_or_else(no_key)?;
            if seen.contains(&key) {
                return Err(ParsePlanError::Twice { key: key.to_owned() });
            }
            seen.push(key);
            let no_value =
                || ParsePlanError::Value { key: key.to_owned(), value: value.to_owned(), expected };
            plan.set(key, value).ok_or_else(no_value)?;
        }
        if seen.contains(&"tile") { Ok(plan) } else { Err(ParsePlanError::NoTile) }
    }
}

impl Plan {
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let (word, number) =
            value.split_once(':').map_or((value, None), |(word, number)| (word, Some(number)));
        match (key, word) {
            ("tile", _) => self.tile = tile(value)?,
            ("rows", "flattened") if number.is_none() => self.rows = RowMapping::Flattened,
            ("rows", "flattened") if number == Some("2") => {
                self.rows = RowMapping::FlattenedTwoExchanges;
            }
            ("rows", "per-shard") => {
                self.rows = RowMapping::PerShard { group: at_least(1, number?)? }
            }
            ("k", "whole") if number.is_none() => self.k = KSplit::Whole,
            ("k", "stream-k") if number.is_none() => self.k = KSplit::StreamK,
            ("k", "split-k") => self.k = KSplit::SplitK(at_least(2, number?)?),
            ("chunk", "shard") if number.is_none() => self.chunk = Chunk::Shard,
            ("chunk", _) => self.chunk = Chunk::Tiles(at_least(1, value)?),
            ("k-slices", _) => self.k_slices = at_least(1, value)?,
            ("comm", "fused") => self.comm = CommMode::Fused { mover: mover(number?)? },
            ("comm", "overlapped") => {
                self.comm = CommMode::Overlapped { peers: at_least(1, number?)? }
            }
            ("comm", "sequential") if number.is_none() => self.comm = CommMode::Sequential,
            _ => return None,
        }
        Some(())
    }
}

fn at_least(least: u32, text: &str) -> Option<u32> {
    text.parse().ok().filter(|&value| value >= least)
}

fn tile(text: &str) -> Option<TileShape> {
    let mut extents = text.split('x').map(|extent| at_least(1, extent));
    let tile = TileShape::new(extents.next()??, extents.next()??, extents.next()??);
    if extents.next().is_none() { Some(tile) } else { None }
}

fn mover(text: &str) -> Option<Mover> {
    match text {
        "kernel" => Some(Mover::Kernel),
        "copy-engine" => Some(Mover::CopyEngine),
        _ => None,
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tile, rows, k, chunk, k_slices, comm } = self;
        write!(f, "tile={tile} rows={rows} k={k} chunk=")?;
        match chunk {
            Chunk::Shard => f.write_str("shard")?,
            Chunk::Tiles(tiles) => write!(f, "{tiles}")?,
        }
        write!(f, " k-slices={k_slices} comm={comm}")
    }
}

impl fmt::Display for RowMapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PerShard { group } => write!(f, "per-shard:{group}"),
            Self::Flattened => f.write_str("flattened"),
            Self::FlattenedTwoExchanges => f.write_str("flattened:2"),
        }
    }
}

impl fmt::Display for KSplit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::SplitK(workers) => write!(f, "split-k:{workers}"),
            Self::StreamK => f.write_str("stream-k"),
        }
    }
}

impl fmt::Display for CommMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fused { mover: Mover::Kernel } => f.write_str("fused:kernel"),
            Self::Fused { mover: Mover::CopyEngine } => f.write_str("fused:copy-engine"),
            Self::Overlapped { peers } => write!(f, "overlapped:{peers}"),
            Self::Sequential => f.write_str("sequential"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Plans of every kind, legal or not.
    pub(in crate::plan) fn plans() -> impl Strategy<Value = Plan> {
        let rows = prop_oneof![
            Just(RowMapping::Flattened),
            Just(RowMapping::FlattenedTwoExchanges),
            (1..=u32::MAX).prop_map(|group| RowMapping::PerShard { group })
        ];
        let k = prop_oneof![
            Just(KSplit::Whole),
            Just(KSplit::StreamK),
            (2..=u32::MAX).prop_map(KSplit::SplitK)
        ];
        let chunk = prop_oneof![Just(Chunk::Shard), (1..=u32::MAX).prop_map(Chunk::Tiles)];
        let comm = prop_oneof![
            Just(CommMode::Sequential),
            Just(CommMode::Fused { mover: Mover::Kernel }),
            Just(CommMode::Fused { mover: Mover::CopyEngine }),
            (1_u32..16).prop_map(|peers| CommMode::Overlapped { peers }),
        ];
        let tile =
            (1_u32..300, 1_u32..300, 1_u32..100).prop_map(|(m, n, k)| TileShape::new(m, n, k));
        (tile, rows, k, chunk, 1..=u32::MAX, comm).prop_map(
            |(tile, rows, k, chunk, k_slices, comm)| Plan { tile, rows, k, chunk, k_slices, comm },
        )
    }

    proptest! {
        #[test]
        fn a_displayed_plan_parses_to_itself(plan in plans()) {
            prop_assert_eq!(plan.to_string().parse::<Plan>(), Ok(plan));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,60}") {
            let _ = text.parse::<Plan>();
        }
    }

    #[test]
    fn what_is_left_out_is_the_simplest() {
        assert_eq!("tile=128x256x64".parse(), Ok(Plan::of(TileShape::new(128, 256, 64))));
        assert_eq!(EXAMPLE.parse::<Plan>().unwrap().to_string(), EXAMPLE);
    }

    #[test]
    fn errors_name_the_word_and_what_would_do() {
        let error = |text: &str| text.parse::<Plan>().unwrap_err().to_string();
        assert_eq!(error("k=whole"), "a plan names its tile, as in tile=128x256x64");
        assert_eq!(
            error("tile=128x256"),
            "tile=128x256: expected rows x columns x step along k, as in 128x256x64"
        );
        assert_eq!(
            error("tile=1x1x1 k=split-k:1"),
            "k=split-k:1: expected whole, stream-k, or split-k:N with N of at least 2"
        );
        assert_eq!(error("tile=1x1x1 tile=1x1x1"), "tile is given twice");
        assert!(error("band=2").starts_with("a plan has no \"band\": its keys are tile, rows,"));
        assert!(
            error("plain")
                .starts_with("\"plain\" is not of the form key=value; a plan reads like `tile=")
        );
        for text in [
            "rows=per-shard",
            "rows=flattened:1",
            "chunk=0",
            "k-slices=0",
            "comm=fused",
            "comm=fused:thread",
            "comm=overlapped:0",
        ] {
            assert!(error(text).starts_with(&format!("{text}: expected ")), "{text}");
        }
    }
}
