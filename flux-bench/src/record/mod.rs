//! Records: what the commands of this program, and `python -m flux_tp.bench`, write with `--json`.
//!
//! Invariant: pages, tables, pictures and comparisons are functions of a [`Record`], and a record is
//! read only where all of its rows were verified and its times can be compared.

mod check;
mod figures;
mod layers;
mod simulated;
#[cfg(test)]
mod tests;

pub(crate) use figures::Figure;
pub use layers::{LayerRow, LayersReport};
pub(crate) use simulated::{SimulatedFile, SimulatedReport, SimulatedRow};

use crate::lab::{CORE_SCHEMA, CoreReport, FIRST_CALL_SCHEMA, FirstCallReport};
use crate::report::{
    Origin, PEERS_SCHEMA, PeersReport, Report, SCHEMA, SERVING_SCHEMA, ServingReport,
};
use anyhow::{Context, bail, ensure};
use layers::LAYERS_SCHEMA;
use serde::de::DeserializeOwned;
use serde_json::Value;
use simulated::SIMULATED_SCHEMA;
use std::fs;
use std::path::Path;

/// A record of any kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Record {
    Ops(Report),
    Peers(PeersReport),
    Serving(ServingReport),
    Core(CoreReport),
    FirstCall(FirstCallReport),
    Layers(LayersReport),
    Simulated(SimulatedReport),
}

/// What a file holds, by the fields that no other kind has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ops,
    Peers,
    Serving,
    Core,
    FirstCall,
    /// By a command of `flux_tp.bench`.
    Layers(&'static str),
    Simulated,
    /// Simulated times beside measured ones.
    Against,
}

impl Kind {
    fn of(value: &Value) -> Option<Self> {
        if let Some(kind) = value.get("kind").and_then(Value::as_str) {
            let known = ["layers", "megatron", "models", "vllm"].into_iter();
            return known.filter(|known| *known == kind).map(Self::Layers).next();
        }
        let has = |field: &str| value.get(field).is_some();
        let row_has = |field: &str| value["rows"][0].get(field).is_some();
        let marks = [
            (has("against"), Self::Against),
            (has("simulated"), Self::Simulated),
            (has("serving"), Self::Serving),
            (has("torch"), Self::Peers),
            (row_has("t_core_ms"), Self::Core),
            (row_has("first_call_ms"), Self::FirstCall),
            (has("transport") && has("rows"), Self::Ops),
        ];
        marks.into_iter().find(|(is, _)| *is).map(|(_, kind)| kind)
    }

    /// The command that writes it.
    fn writer(self) -> String {
        let command = match self {
            Self::Layers(what) => return format!("python -m flux_tp.bench {what} --json"),
            Self::Ops => "bench",
            Self::Peers => "lab peers",
            Self::Serving => "bench --trace-m",
            Self::Core => "lab core",
            Self::FirstCall => "lab first-call",
            Self::Simulated => "simulate",
            Self::Against => "simulate --against FILE.json",
        };
        format!("flux-bench {command} --json")
    }

    /// What takes it.
    const fn remedy(self) -> &'static str {
        match self {
            Self::Ops => "show it as FILE.json",
            Self::Peers => {
                "name it with --peers, beside a file that `flux-bench bench --json` has written"
            }
            Self::Serving | Self::Core | Self::FirstCall | Self::Simulated => {
                "`flux-bench report` shows it"
            }
            Self::Layers(_) => "show it with `python -m flux_tp.bench show`",
            Self::Against => "no command shows it",
        }
    }

    /// The oldest schema that is read, and the newest.
    const fn schemas(self) -> (u32, u32) {
        match self {
            Self::Ops => (1, SCHEMA),
            Self::Peers => (PEERS_SCHEMA, PEERS_SCHEMA),
            Self::Serving => (SERVING_SCHEMA, SERVING_SCHEMA),
            Self::FirstCall => (2, FIRST_CALL_SCHEMA),
            Self::Core => (CORE_SCHEMA, CORE_SCHEMA),
            Self::Layers(_) => (LAYERS_SCHEMA, LAYERS_SCHEMA),
            Self::Simulated | Self::Against => (SIMULATED_SCHEMA, SIMULATED_SCHEMA),
        }
    }
}

/// The record in `path`.
///
/// # Errors
/// The file is no record of a known schema, has no rows, or has a row that is unverified or whose
/// times cannot be.
pub(crate) fn read(path: &Path) -> anyhow::Result<Record> {
    let name = path.display().to_string();
    let value = json(path)?;
    let Some(kind) = Kind::of(&value) else {
        bail!("{name} is no record of `flux-bench` or `python -m flux_tp.bench`")
    };
    ensure_schema(&name, &value, kind)?;
    Ok(match kind {
        Kind::Ops => Record::Ops(checked(&name, &value, kind, check::ops)?),
        Kind::Peers => Record::Peers(checked(&name, &value, kind, check::peers)?),
        Kind::Serving => Record::Serving(checked(&name, &value, kind, check::serving)?),
        Kind::Core => Record::Core(checked(&name, &value, kind, check::core)?),
        Kind::FirstCall => Record::FirstCall(checked(&name, &value, kind, check::first_call)?),
        Kind::Layers(_) => Record::Layers(checked(&name, &value, kind, check::layers)?),
        Kind::Simulated => Record::Simulated(checked(&name, &value, kind, check::simulated)?),
        Kind::Against => bail!("{name} is what `{}` writes: {}", kind.writer(), kind.remedy()),
    })
}

/// The report of ops in `path`.
///
/// # Errors
/// As `read`; and the file is of another kind.
pub fn read_ops(path: &Path) -> anyhow::Result<Report> {
    of_kind(path, Kind::Ops, check::ops)
}

/// What peers took, in `path`, to be shown beside `report`.
///
/// # Errors
/// As [`read`]; and the file is of another kind or machine, or has no rows of `report`'s.
pub(crate) fn read_peers(path: &Path, report: &Report) -> anyhow::Result<PeersReport> {
    let name = path.display();
    let peers = of_kind(path, Kind::Peers, check::peers)?;
    let [theirs, ours] = [&peers.origin, &report.origin].map(Origin::machine);
    ensure!(theirs == ours, "{name} was measured on {theirs}, and the ops on {ours}");
    ensure!(
        report.rows.iter().any(|row| peers.of(row).is_some()),
        "{name} has none of the shapes that it is to be shown beside"
    );
    Ok(peers)
}

type Check<T> = fn(&str, &T) -> anyhow::Result<()>;

fn of_kind<T: DeserializeOwned>(path: &Path, wanted: Kind, check: Check<T>) -> anyhow::Result<T> {
    let name = path.display().to_string();
    let value = json(path)?;
    match Kind::of(&value) {
        Some(kind) if kind != wanted => bail!(
            "{name} is what `{}` writes, not `{}`: {}",
            kind.writer(),
            wanted.writer(),
            kind.remedy()
        ),
        _ => {
            ensure_schema(&name, &value, wanted)?;
            checked(&name, &value, wanted, check)
        }
    }
}

fn checked<T: DeserializeOwned>(
    name: &str,
    value: &Value,
    kind: Kind,
    check: Check<T>,
) -> anyhow::Result<T> {
    let record = T::deserialize(value)
        .with_context(|| format!("{name} is not what `{}` writes", kind.writer()))?;
    check(name, &record)?;
    Ok(record)
}

fn ensure_schema(name: &str, value: &Value, kind: Kind) -> anyhow::Result<()> {
    let Some(schema) = value.get("schema").and_then(Value::as_u64) else {
        bail!("{name} is not what `{}` writes", kind.writer())
    };
    let (oldest, newest) = kind.schemas();
    ensure!(
        (u64::from(oldest)..=u64::from(newest)).contains(&schema),
        "{name} has schema {schema}: this program reads {oldest} to {newest}"
    );
    Ok(())
}

/// The JSON in `path`, none of whose texts would do anything to a terminal, a table or a picture.
fn json(path: &Path) -> anyhow::Result<Value> {
    let name = path.display();
    let text = fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| {
        let text = String::from_utf8_lossy(&text);
        // Python's `json` writes them, and no JSON has them.
        match ["NaN", "Infinity"].into_iter().find(|word| text.contains(word)) {
            Some(word) => anyhow::anyhow!("{name} has {word} where a number belongs: {error}"),
            None => anyhow::Error::new(error).context(format!("{name} is no JSON")),
        }
    })?;
    ensure!(
        is_plain(&value),
        "{name} has texts with control characters, or a model with `|`, which would not be shown \
         as they are"
    );
    Ok(value)
}

fn is_plain(value: &Value) -> bool {
    match value {
        Value::String(text) => !text.contains(char::is_control),
        Value::Array(values) => values.iter().all(is_plain),
        // The one text of a table's cell that is nowhere else checked.
        Value::Object(fields) => fields.iter().all(|(name, value)| {
            is_plain(value)
                && !(name == "model" && value.as_str().is_some_and(|model| model.contains('|')))
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
    }
}

impl Record {
    /// Where it was measured; of a simulation, where it was computed.
    pub(crate) const fn origin(&self) -> &Origin {
        match self {
            Self::Ops(report) => &report.origin,
            Self::Peers(report) => &report.origin,
            Self::Serving(report) => &report.origin,
            Self::Core(report) => &report.origin,
            Self::FirstCall(report) => &report.origin,
            Self::Layers(report) => &report.origin,
            Self::Simulated(report) => &report.origin,
        }
    }

    /// The transport that carried flux's ops, where one did.
    pub(crate) fn transport(&self) -> Option<&str> {
        match self {
            Self::Ops(Report { transport, .. })
            | Self::Serving(ServingReport { transport, .. })
            | Self::Layers(LayersReport { transport, .. }) => Some(transport),
            Self::Peers(_) | Self::Core(_) | Self::FirstCall(_) | Self::Simulated(_) => None,
        }
    }

    /// Versions of the libraries beside it, with their names.
    pub(crate) fn versions(&self) -> Vec<(&'static str, &str)> {
        let origin = self.origin();
        let (nccl, torch) = match self {
            Self::Ops(report) => (report.nccl.as_deref(), None),
            Self::Serving(report) => (report.nccl.as_deref(), None),
            Self::Peers(report) => (Some(&*report.nccl), Some(&*report.torch)),
            Self::Layers(report) => (report.nccl.as_deref(), Some(&*report.torch)),
            Self::Core(_) | Self::FirstCall(_) | Self::Simulated(_) => (None, None),
        };
        let all = [
            ("driver", origin.driver.as_deref()),
            ("CUDA", origin.cuda.as_deref()),
            ("cuBLASLt", origin.cublaslt.as_deref()),
            ("NCCL", nccl),
            ("PyTorch", torch),
        ];
        all.into_iter().filter_map(|(name, version)| Some((name, version?))).collect()
    }

    /// How many rows it has.
    pub(crate) const fn rows(&self) -> usize {
        match self {
            Self::Ops(report) => report.rows.len(),
            Self::Peers(report) => report.rows.len(),
            Self::Serving(report) => report.serving.len(),
            Self::Core(report) => report.rows.len(),
            Self::FirstCall(report) => report.rows.len(),
            Self::Layers(report) => report.rows.len(),
            Self::Simulated(report) => report.rows.len(),
        }
    }
}
