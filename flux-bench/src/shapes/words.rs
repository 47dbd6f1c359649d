//! The words of `--shapes`.
//!
//! Invariant: a shape that is displayed parses to itself.

use super::models::named;
use super::{Gemm, parse_op};
use flux_core::{OpKind, SumsTo};
use std::fmt;
use std::str::FromStr;

/// GEMMs under one name, at most one for each op; GEMM-ReduceScatter also stands for
/// GEMM-AllReduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    name: String,
    gemms: Vec<Gemm>,
}

/// A list of shapes, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shapes(pub(super) Vec<Shape>);

/// Why a text is no list of shapes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    #[error(
        "{word:?} is no shape: give HIDDENxFFN as in 4096x14336, OP:n=N,k=K as in \
         gemm_rs:n=8192,k=28672, or one of {}",
        names()
    )]
    Unknown { word: String },
    /// The divisor is no number that divides the extents.
    #[error(
        "{word:?}: the divisor must divide {}",
        extents.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ")
    )]
    Divisor { word: String, extents: Vec<usize> },
}

/// A list of global rows: numbers, and ranges of powers of two as in `64..8192`, both ends
/// included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rows(pub(super) Vec<usize>);

impl FromStr for Rows {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Vec::new();
        for word in text.split(',') {
            let wrong = || {
                format!(
                    "{word:?} is neither a number of rows nor a range of powers of two as in \
                     64..8192"
                )
            };
            match word.split_once("..") {
                None => all.push(extent(word).ok_or_else(wrong)?),
                Some((first, last)) => {
                    let ends = extent(first).zip(extent(last)).ok_or_else(wrong)?;
                    if ends.0 > ends.1 || !ends.0.is_power_of_two() || !ends.1.is_power_of_two() {
                        return Err(wrong());
                    }
                    all.extend((ends.0.ilog2()..=ends.1.ilog2()).map(|bits| 1_usize << bits));
                }
            }
        }
        Ok(Self(all))
    }
}

/// All names, for an error.
fn names() -> String {
    let names: Vec<String> = named().map(|(name, _)| name).collect();
    format!("{}, or a fraction of one as in gpt3/16", names.join(", "))
}

impl Shape {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Global `(n, k)` of an op, where the shape has that op. A row-parallel layer has both sums.
    pub(crate) fn extents(&self, op: OpKind) -> Option<(usize, usize)> {
        let has = |gemm: &&Gemm| {
            gemm.op == op || op.sums_to() == SumsTo::All && gemm.op.sums_to() == SumsTo::Rows
        };
        self.gemms.iter().find(has).map(|gemm| (gemm.n, gemm.k))
    }

    /// `4096x14336`: both layers of an MLP.
    fn mlp(word: &str) -> Option<Self> {
        let (hidden, ffn) = word.split_once('x')?;
        let (hidden, ffn) = (extent(hidden)?, extent(ffn)?);
        let gemms = vec![
            Gemm { op: OpKind::AllGatherGemm, n: ffn, k: hidden },
            Gemm { op: OpKind::GemmReduceScatter, n: hidden, k: ffn },
        ];
        Some(Self { name: format!("{hidden}x{ffn}"), gemms })
    }

    /// `gemm_rs:n=8192,k=28672`.
    fn gemm(word: &str) -> Option<Self> {
        let (op, extents) = word.split_once(':')?;
        let (n, k) = extents.split_once(',')?;
        let (op, n, k) =
            (parse_op(op).ok()?, extent(n.strip_prefix("n=")?)?, extent(k.strip_prefix("k=")?)?);
        Some(Self { name: format!("{}:n={n},k={k}", op.name()), gemms: vec![Gemm { op, n, k }] })
    }

    /// `gpt3`, or `gpt3/16` for a sixteenth of both extents.
    fn layer(word: &str) -> Result<Self, ShapeError> {
        let (name, divisor) = word
            .split_once('/')
            .map_or((word, 1), |(name, divisor)| (name, divisor.parse().unwrap_or(0)));
        let unknown = || ShapeError::Unknown { word: word.to_owned() };
        let (_, gemms) = named().find(|(known, _)| known == name).ok_or_else(unknown)?;
        let mut extents = Vec::new();
        for extent in gemms.iter().flat_map(|gemm| [gemm.n, gemm.k]) {
            if !extents.contains(&extent) {
                extents.push(extent);
            }
        }
        if extents.iter().any(|extent| !extent.is_multiple_of(divisor)) {
            return Err(ShapeError::Divisor { word: word.to_owned(), extents });
        }
        let gemms = gemms
            .into_iter()
            .map(|Gemm { op, n, k }| Gemm { op, n: n / divisor, k: k / divisor })
            .collect();
        Ok(Self { name: word.to_owned(), gemms })
    }
}

fn extent(word: &str) -> Option<usize> {
    word.parse().ok().filter(|&extent| extent > 0)
}

impl FromStr for Shape {
    type Err = ShapeError;

    fn from_str(word: &str) -> Result<Self, ShapeError> {
        Self::mlp(word).or_else(|| Self::gemm(word)).map_or_else(|| Self::layer(word), Ok)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl FromStr for Shapes {
    type Err = ShapeError;

    fn from_str(text: &str) -> Result<Self, ShapeError> {
        // The comma before `k=` is inside of a shape.
        let mut words: Vec<String> = Vec::new();
        for part in text.split(',') {
            match words.last_mut() {
                Some(word) if part.starts_with("k=") => *word = format!("{word},{part}"),
                _ => words.push(part.to_owned()),
            }
        }
        Ok(Self(words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for Shapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<&str> = self.0.iter().map(Shape::name).collect();
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn word() -> impl Strategy<Value = String> {
        let extent = 1..1_usize << 24;
        let op = prop_oneof![Just("ag_gemm"), Just("gemm_rs"), Just("gemm_ar")];
        let known: Vec<String> = named().map(|(name, _)| name).collect();
        prop_oneof![
            (extent.clone(), extent.clone()).prop_map(|(hidden, ffn)| format!("{hidden}x{ffn}")),
            (op, extent.clone(), extent).prop_map(|(op, n, k)| format!("{op}:n={n},k={k}")),
            (prop::sample::select(known), prop::sample::select(vec!["", "/2", "/8"]))
                .prop_map(|(name, part)| name + part),
        ]
    }

    proptest! {
        #[test]
        fn a_displayed_list_parses_to_itself(words in prop::collection::vec(word(), 1..5)) {
            let text = words.join(",");
            let shapes: Shapes = text.parse().unwrap();
            prop_assert_eq!(shapes.0.len(), words.len());
            prop_assert_eq!(shapes.to_string(), text);
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = text.parse::<Shapes>();
        }
    }

    #[test]
    fn rows_are_numbers_and_ranges_of_powers_of_two() {
        let rows = |text: &str| text.parse::<Rows>().map(|rows| rows.0);
        assert_eq!(rows("24").unwrap(), [24]);
        assert_eq!(rows("64..512,100,1..1").unwrap(), [64, 128, 256, 512, 100, 1]);
        for text in ["", "0", "64..", "..64", "64..100", "128..64", "64,,128", "a", "64..128..256"]
        {
            assert!(rows(text).unwrap_err().contains("powers of two"), "{text}");
        }
    }

    #[test]
    fn a_word_gives_its_extents() {
        let extents = |word: &str| {
            let shape: Shape = word.parse().unwrap();
            [OpKind::AllGatherGemm, OpKind::GemmReduceScatter].map(|op| shape.extents(op))
        };
        let all_reduce = |word: &str| word.parse::<Shape>().unwrap().extents(OpKind::GemmAllReduce);
        assert_eq!(["gpt3", "llama3-8b.qkv"].map(all_reduce), [Some((12288, 49152)), None]);
        assert_eq!(
            (all_reduce("gemm_ar:n=8,k=16"), extents("gemm_ar:n=8,k=16")),
            (Some((8, 16)), [None; 2])
        );
        for (word, expected) in [
            ("gpt3", [Some((49152, 12288)), Some((12288, 49152))]),
            ("llama70b/16", [Some((1792, 512)), Some((512, 1792))]),
            ("4096x14336", [Some((14336, 4096)), Some((4096, 14336))]),
            ("gemm-rs:n=8192,k=28672", [None, Some((8192, 28672))]),
            ("ag_gemm:n=8,k=16", [Some((8, 16)), None]),
            ("llama3-8b", [Some((28672, 4096)), Some((4096, 14336))]),
            ("llama3-8b.qkv", [Some((6144, 4096)), None]),
            ("llama3-8b.o", [None, Some((4096, 4096))]),
            ("llama3-70b.qkv", [Some((10240, 8192)), None]),
            ("qwen3-32b", [Some((51200, 5120)), Some((5120, 25600))]),
            ("qwen3-32b.o", [None, Some((5120, 8192))]),
            ("deepseek-v3", [Some((36864, 7168)), Some((7168, 18432))]),
            ("deepseek-v3.q_b", [Some((24576, 1536)), None]),
            ("deepseek-v3.o", [None, Some((7168, 16384))]),
        ] {
            assert_eq!(extents(word), expected, "{word}");
        }
    }

    #[test]
    fn a_word_that_is_no_shape_is_refused_with_the_names_that_there_are() {
        for word in [
            "gpt4",
            "",
            "0x8",
            "8x",
            "gemm_rs:n=8",
            "gemm:n=8,k=8",
            "gemm_rs:k=8,n=8",
            "4096x14336/2",
        ] {
            let error = word.parse::<Shapes>().unwrap_err().to_string();
            assert!(
                error.contains("is no shape: give HIDDENxFFN")
                    && error.contains("llama3-8b.qkv, llama3-8b.o"),
                "{word}: {error}"
            );
        }
        for word in ["gpt3/0", "gpt3/x", "gpt3/7", "llama70b/3"] {
            assert!(matches!(word.parse::<Shape>(), Err(ShapeError::Divisor { .. })), "{word}");
        }
        assert_eq!(
            "gpt3/7".parse::<Shape>().unwrap_err().to_string(),
            "\"gpt3/7\": the divisor must divide 49152 and 12288"
        );
        assert_eq!(
            "qwen3-32b/2048".parse::<Shape>().unwrap_err().to_string(),
            "\"qwen3-32b/2048\": the divisor must divide 51200 and 5120 and 25600"
        );
    }
}
