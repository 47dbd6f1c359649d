//! Whole layers, training steps and engines' answers: the records of `python -m flux_tp.bench`.

use crate::report::Origin;
use flux_core::DType;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Version of the format: `SCHEMA` of `flux_tp.bench.record`.
pub(super) const LAYERS_SCHEMA: u32 = 1;

/// What `python -m flux_tp.bench` writes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LayersReport {
    /// `layers`, `megatron`, `models` or `vllm`.
    pub kind: String,
    /// Where it was measured, and how it is repeated: `device` to `command`.
    #[serde(flatten)]
    pub(crate) origin: Origin,
    /// Version of PyTorch.
    pub torch: String,
    /// Version of the NCCL that PyTorch uses; absent on the host.
    pub nccl: Option<String>,
    /// Transport that carried flux's ops.
    pub transport: String,
    /// How it was run, where the command does not say it.
    pub note: Option<String>,
    /// One per model, phase and number of rows.
    pub rows: Vec<LayerRow>,
}

/// One measurement: milliseconds of a layer, a step or an answer, by mode.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct LayerRow {
    /// Of which a layer was measured.
    pub model: String,
    /// `prefill`, `decode`, `train`, `megatron`, `vllm`, or of whole models `steps`, `prompt` or
    /// `generate`.
    pub phase: String,
    /// Rows of a call; an engine's answers have requests instead.
    pub m: Option<u32>,
    /// Element type, where it is not bf16.
    pub dtype: Option<String>,
    /// What an engine did.
    pub case: Option<String>,
    /// Requests.
    pub batch: Option<u32>,
    /// Tokens that each has.
    pub input: Option<u32>,
    /// Tokens that each asks for.
    pub output: Option<u32>,
    /// Ranks.
    pub tp: u32,
    /// Medians, by mode.
    pub ms: BTreeMap<String, f64>,
    /// Tenth and ninetieth percentile, by mode.
    #[serde(default)]
    pub spread: BTreeMap<String, [f64; 2]>,
    /// Milliseconds of a decoded token, by mode.
    #[serde(default)]
    pub step_ms: BTreeMap<String, f64>,
    /// Why a mode did not run.
    #[serde(default)]
    pub why: BTreeMap<String, String>,
    /// Absent where answers are compared over the whole record.
    #[serde(default = "yes")]
    pub verified: bool,
}

const fn yes() -> bool {
    true
}

/// Modes in the order in which they are shown, and what they are called.
const MODES: [(&str, &str); 16] = [
    ("none", "no collectives"),
    ("ar", "NCCL AllReduce"),
    ("one_shot", "one-shot AR"),
    ("two_shot", "two-shot AR"),
    ("sp", "NCCL AG, RS"),
    ("async_tp", "async-TP"),
    ("torch", "PyTorch's styles"),
    ("torch_compiled", "PyTorch's styles, compiled"),
    ("megatron", "Megatron-Core"),
    ("default", "vLLM"),
    ("flux", "flux"),
    ("flux_ar", "flux, AR"),
    ("flux_sp", "flux, AG and RS"),
    ("flux_kept", "flux, kept x"),
    ("flux_bf16", "flux in bf16"),
    ("flux_compiled", "flux, compiled"),
];

impl LayersReport {
    /// Whether a mode is one of flux's.
    pub fn is_flux(mode: &str) -> bool {
        mode == "flux" || mode.starts_with("flux_")
    }

    /// A mode in words.
    pub(crate) fn title(mode: &str) -> &str {
        MODES.iter().find(|(name, _)| *name == mode).map_or(mode, |(_, title)| title)
    }
}

impl LayerRow {
    /// The element type of its operands.
    pub(crate) fn dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or(DType::Bf16.name())
    }

    /// The fastest way of flux, and how many times as long the base takes.
    pub(crate) fn gain(&self) -> Option<(&str, f64)> {
        let ways = self.modes().into_iter().filter(|(mode, _)| LayersReport::is_flux(mode));
        let gains = ways.filter_map(|(mode, _)| Some((mode, self.speed_up(mode)?)));
        gains.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// What it is of, in words.
    pub fn label(&self) -> String {
        let mut words = format!("{} {}", self.model, self.phase);
        if let Some(dtype) = &self.dtype {
            let _ = write!(words, " {dtype}");
        }
        if let Some(case) = &self.case {
            let _ = write!(words, " {case}");
        }
        if let Some(m) = self.m {
            let _ = write!(words, " m {m}");
        }
        if let Some(batch) = self.batch {
            let _ = write!(words, " batch {batch}");
        }
        words
    }

    /// Modes with their times: the bound, the others, then flux's.
    pub(crate) fn modes(&self) -> Vec<(&str, f64)> {
        let known = MODES.iter().map(|(mode, _)| *mode);
        let others =
            self.ms.keys().map(String::as_str).filter(|mode| MODES.iter().all(|m| m.0 != *mode));
        known.chain(others).filter_map(|mode| Some((mode, *self.ms.get(mode)?))).collect()
    }

    /// The mode that flux is compared with: what vLLM does, and in training what Megatron-LM does;
    /// of whole models PyTorch's fastest.
    pub fn base(&self) -> Option<(&str, f64)> {
        let mode = match self.phase.as_str() {
            "prefill" | "decode" => "ar",
            "train" => "sp",
            "megatron" => "megatron",
            "vllm" => "default",
            "steps" | "prompt" | "generate" => return self.best_other(),
            _ => self
                .modes()
                .into_iter()
                .map(|(mode, _)| mode)
                .find(|mode| *mode != "none" && !LayersReport::is_flux(mode))?,
        };
        Some((mode, *self.ms.get(mode)?))
    }

    /// How many times as long the base takes as a mode of flux.
    pub fn speed_up(&self, mode: &str) -> Option<f64> {
        Some(self.base()?.1 / self.ms.get(mode)?)
    }

    /// The fastest way without flux.
    pub fn best_other(&self) -> Option<(&str, f64)> {
        let others = self.modes().into_iter();
        others
            .filter(|(mode, _)| *mode != "none" && !LayersReport::is_flux(mode))
            .min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The share of what collectives add to the base that a mode of flux hides; elementwise work
    /// that flux fuses counts as hidden, too.
    pub fn hidden(&self, mode: &str) -> Option<f64> {
        let (none, base) = (*self.ms.get("none")?, self.base()?.1);
        (base > none).then_some((base - self.ms.get(mode)?) / (base - none))
    }
}
