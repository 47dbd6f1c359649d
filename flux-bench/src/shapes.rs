//! The shapes that are measured: two models' feed-forward layers.
//!
//! Invariant: a layer's two halves are each other's transpose, so what AllGather-GEMM writes is
//! what GEMM-ReduceScatter reads.

use anyhow::Context;
use flux_core::{DType, OpKind, Problem, WorldSize};
use std::fmt;
use std::str::FromStr;

/// Global `n` and `k` of a model's feed-forward layer, where `m` is the number of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    name: String,
    hidden: usize,
    ffn: usize,
}

/// The models by name: hidden and inner extent of the feed-forward layer.
const MODELS: [(&str, usize, usize); 2] = [("gpt3", 12288, 49152), ("llama70b", 8192, 28672)];

/// What a `--shapes` word can be wrong about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// No such model.
    #[error("no model is named {0:?}: choose from gpt3, llama70b, either one with a divisor as in gpt3/16")]
    Unknown(String),
    /// The divisor is not a number that divides the extents into multiples of 8.
    #[error("{word:?}: {hidden} and {ffn} over the divisor must be multiples of 8")]
    Divisor {
        /// The word.
        word: String,
        /// The model's hidden extent.
        hidden: usize,
        /// The model's inner extent.
        ffn: usize,
    },
}

impl Model {
    /// What reports call it: the name, with the divisor where the extents are a fraction of the
    /// model's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Global `(n, k)`: the op before the activation widens, the one after it narrows.
    pub fn extents(&self, op: OpKind) -> (usize, usize) {
        match op {
            OpKind::AllGatherGemm => (self.ffn, self.hidden),
            OpKind::GemmReduceScatter => (self.hidden, self.ffn),
        }
    }
}

impl FromStr for Model {
    type Err = ShapeError;

    /// `gpt3`, or `gpt3/16` for a sixteenth of both extents.
    fn from_str(word: &str) -> Result<Self, ShapeError> {
        let (name, divisor) = match word.split_once('/') {
            Some((name, divisor)) => (name, divisor.parse().unwrap_or(0)),
            None => (word, 1_usize),
        };
        let model = MODELS.iter().find(|(known, ..)| *known == name);
        let &(_, hidden, ffn) = model.ok_or_else(|| ShapeError::Unknown(word.to_owned()))?;
        if divisor == 0 || hidden % (8 * divisor) != 0 || ffn % (8 * divisor) != 0 {
            return Err(ShapeError::Divisor { word: word.to_owned(), hidden, ffn });
        }
        Ok(Self { name: word.to_owned(), hidden: hidden / divisor, ffn: ffn / divisor })
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// One half of a model's layer at some number of tokens.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Whose it is.
    pub model: Model,
    /// The problem.
    pub problem: Problem,
}

/// Every op of every model at every `m`, on elements of type `dtype`, for `world` ranks; `m`
/// changes fastest.
///
/// # Errors
/// A shape that the world cannot split, with its name.
pub fn layers(models: &[Model], ops: &[OpKind], ms: &[usize], dtype: DType, world: WorldSize) -> anyhow::Result<Vec<Layer>> {
    let mut layers = Vec::new();
    for model in models {
        for &op in ops {
            let (n, k) = model.extents(op);
            for &m in ms {
                let problem = Problem::new(op, m, n, k, dtype, world).with_context(|| format!("{op} of {model} at m = {m}"))?;
                layers.push(Layer { model: model.clone(), problem });
            }
        }
    }
    Ok(layers)
}

/// What `--shapes` and `--ms` say, and where they say nothing whole layers at `on_gpus` rows, or on
/// the host what two cores compute in seconds.
pub(crate) fn or_usual(models: &[Model], ms: &[usize], on_gpus: Option<&[usize]>) -> anyhow::Result<(Vec<Model>, Vec<usize>)> {
    let usual = if on_gpus.is_some() { ["gpt3", "llama70b"] } else { ["gpt3/16", "llama70b/16"] };
    let models = if models.is_empty() { usual.iter().map(|word| word.parse()).collect::<Result<_, _>>()? } else { models.to_vec() };
    let ms = if ms.is_empty() { on_gpus.unwrap_or(&[512]) } else { ms };
    Ok((models, ms.to_vec()))
}

/// The op of a `--ops` word.
pub fn parse_op(word: &str) -> Result<OpKind, String> {
    match word.replace('-', "_").as_str() {
        "ag_gemm" => Ok(OpKind::AllGatherGemm),
        "gemm_rs" => Ok(OpKind::GemmReduceScatter),
        _ => Err(format!("{word:?} is neither ag_gemm nor gemm_rs")),
    }
}

/// The element type of a `--dtype` word: as reports call it, or as Rust does.
pub(crate) fn parse_dtype(word: &str) -> Result<DType, String> {
    match word {
        "bf16" => Ok(DType::Bf16),
        "fp16" | "f16" => Ok(DType::F16),
        _ => Err(format!("{word:?} is neither bf16 nor fp16")),
    }
}

/// The world of a `--tp` word.
///
/// # Errors
/// No world has so many ranks.
pub fn world(tp: u32) -> anyhow::Result<WorldSize> {
    WorldSize::new(tp).with_context(|| format!("--tp {tp} is outside 1 to {}", flux_core::rank::MAX_WORLD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_what_the_machine_can_do() {
        let names = |(models, ms): (Vec<Model>, Vec<usize>)| (models.iter().map(|m| m.name().to_owned()).collect::<Vec<_>>().join(" "), ms);
        assert_eq!(names(or_usual(&[], &[], Some(&[64, 128])).unwrap()), ("gpt3 llama70b".to_owned(), vec![64, 128]));
        assert_eq!(names(or_usual(&[], &[], None).unwrap()), ("gpt3/16 llama70b/16".to_owned(), vec![512]));
        let given = ["gpt3/128".parse().unwrap()];
        assert_eq!(names(or_usual(&given, &[16], None).unwrap()), ("gpt3/128".to_owned(), vec![16]));
    }

    #[test]
    fn models_have_the_extents_of_the_issue() {
        let gpt3: Model = "gpt3".parse().unwrap();
        assert_eq!(gpt3.extents(OpKind::AllGatherGemm), (49152, 12288));
        assert_eq!(gpt3.extents(OpKind::GemmReduceScatter), (12288, 49152));
        let llama: Model = "llama70b/16".parse().unwrap();
        assert_eq!(llama.extents(OpKind::AllGatherGemm), (1792, 512));
        assert_eq!(llama.name(), "llama70b/16");
    }

    #[test]
    fn a_type_has_the_name_that_reports_give_it() {
        for dtype in [DType::Bf16, DType::F16] {
            assert_eq!(parse_dtype(dtype.name()), Ok(dtype));
        }
        assert_eq!(parse_dtype("f16"), Ok(DType::F16));
        assert_eq!(parse_dtype("fp8"), Err("\"fp8\" is neither bf16 nor fp16".to_owned()));
    }

    /// No operand has an element above 1, so no sum of products, of all ranks or of some, is above
    /// `k`: even the worst data leave no row of fp16 infinite. What is drawn has a standard
    /// deviation of at most `sqrt(k) / 3`, 74.
    #[test]
    fn no_sum_of_any_layer_is_more_than_fp16_holds() {
        // Of 16 ranks' partial sums each is rounded, and each sum of them.
        let roundings = (1.0 + DType::F16.unit_roundoff()).powi(32);
        for (name, hidden, ffn) in MODELS {
            let longest = hidden.max(ffn) as f64;
            assert!(longest * roundings < half::f16::MAX.to_f64(), "{name}");
            assert!(
                100.0 * 8.0 * longest.sqrt() / 3.0 < half::f16::MAX.to_f64(),
                "{name}: eight deviations are more than a hundredth of it"
            );
        }
    }

    #[test]
    fn a_word_that_is_no_shape_is_refused() {
        assert_eq!("gpt4".parse::<Model>(), Err(ShapeError::Unknown("gpt4".into())));
        for word in ["gpt3/0", "gpt3/x", "gpt3/7", "llama70b/4096"] {
            assert!(matches!(word.parse::<Model>(), Err(ShapeError::Divisor { .. })), "{word}");
        }
    }
}
