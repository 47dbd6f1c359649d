//! Committed records, and files that are none.

use super::*;
use flux_core::machine::Machine;
use std::path::PathBuf;

fn results() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../results")
}

/// What is said of a file with this text.
fn refused(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    fs::write(&path, text).unwrap();
    format!("{:#}", read(&path).unwrap_err())
}

/// A committed record, changed.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let text = fs::read(results().join(name)).unwrap();
    let mut value: Value = serde_json::from_slice(&text).unwrap();
    change(&mut value);
    refused(&value.to_string())
}

#[test]
fn every_committed_record_is_read_and_its_rows_have_figures() {
    let mut kinds = std::collections::BTreeSet::new();
    for entry in fs::read_dir(results()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let record = read(&path).unwrap();
            let figures = record.figures().len();
            assert!(matches!(record, Record::Peers(_)) || figures >= record.rows(), "{path:?}");
            kinds.insert(format!("{record:?}").split('(').next().unwrap().to_owned());
        }
    }
    assert!(kinds.len() >= 6, "{kinds:?}");
}

#[test]
fn what_is_no_record_is_refused_with_the_reason() {
    assert!(refused("{").contains("a.json is no JSON"));
    assert!(refused("{}").ends_with("is no record of `flux-bench` or `python -m flux_tp.bench`"));
    assert!(refused("{\"ms\": NaN}").contains("has NaN where a number belongs"));
    let layers = "h200-x4-nvlink-layers.json";
    let schema = changed(layers, |v| v["schema"] = 7.into());
    assert!(schema.ends_with("has schema 7: this program reads 1 to 1"), "{schema}");
    let unverified = changed(layers, |v| v["rows"][0]["verified"] = false.into());
    assert!(unverified.contains("prefill m 2048: the result was not verified"), "{unverified}");
    let without = changed(layers, |v| v["rows"][0]["ms"] = serde_json::json!({ "ar": 1.0 }));
    assert!(without.contains("has no time of flux, only of [\"ar\"]"), "{without}");
    let zero = changed("h200-x4-peers.json", |v| v["rows"][0]["serial_ms"]["median"] = 0.into());
    assert!(zero.contains("cannot be compared"), "{zero}");
    let none = changed("h200-x1-core-tp8.json", |v| v["rows"][0]["t_core_ms"] = Value::Null);
    assert!(none.contains("is not what `flux-bench lab core --json` writes"), "{none}");
}

#[test]
fn a_simulation_is_read_as_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let row = r#"{"op":"ag_gemm","model":"gpt3","m":512,"n":49152,"k":12288,"tp":8,"dtype":"bf16",
        "plan":"-","t_op_ms":2.0,"t_gemm_ms":1.0,"t_serial_ms":3.0,"on_links_ms":0.5,"kernel":true}"#;
    let head = r#""schema":1,"simulated":true,"machine":"H200","commit":"0","command":"c""#;
    fs::write(&path, format!("{{{head},\"rows\":[{row}]}}")).unwrap();
    let Record::Simulated(report) = read(&path).unwrap() else { panic!("not a simulation") };
    assert_eq!((report.origin.device.as_str(), report.rows[0].t_op_ms), ("H200", 2.0));
}

#[test]
fn a_simulation_beside_measured_times_is_refused_as_what_it_is() {
    let path = Path::new("results/b.json");
    let file = SimulatedFile::new(&Machine::H200, Some(path), vec![0]);
    let reason = refused(&serde_json::to_string(&file).unwrap());
    let writer = "is what `flux-bench simulate --against FILE.json --json` writes";
    assert!(reason.ends_with(&format!("{writer}: no command shows it")), "{reason}");
}

#[test]
fn whole_models_are_compared_with_the_fastest_of_pytorchs_ways() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let text = fs::read(results().join("h200-x4-megatron.json")).unwrap();
    let mut value: Value = serde_json::from_slice(&text).unwrap();
    value["kind"] = "models".into();
    let ms =
        serde_json::json!({ "torch": 4.0, "async_tp": 3.0, "flux": 2.0, "flux_compiled": 1.0 });
    value["rows"] = serde_json::json!([
        { "model": "llama3-8b", "phase": "steps", "m": 2048, "tp": 2, "ms": ms, "verified": true },
        { "model": "llama3-8b", "phase": "prompt", "m": 2048, "tp": 2, "ms": ms, "verified": true },
        { "model": "llama3-8b", "phase": "generate", "batch": 16, "tp": 2, "ms": ms, "verified": true },
    ]);
    fs::write(&path, value.to_string()).unwrap();
    let Record::Layers(report) = read(&path).unwrap() else { panic!("of another kind") };
    let [steps, prompt, generate] = &report.rows[..] else { panic!("three rows") };
    for row in [steps, prompt] {
        assert_eq!((row.base(), row.speed_up("flux")), (Some(("async_tp", 3.0)), Some(1.5)));
    }
    assert_eq!(generate.label(), "llama3-8b generate batch 16");
}

#[test]
fn layers_of_other_element_types_are_other_rows() {
    let text = fs::read(results().join("h200-x4-nvlink-layers.json")).unwrap();
    let mut value: Value = serde_json::from_slice(&text).unwrap();
    let mut row = value["rows"][0].clone();
    row["dtype"] = "e4m3.row:bf16".into();
    row["ms"]["flux_bf16"] = 9.0.into();
    value["rows"] = vec![value["rows"][0].clone(), row].into();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    fs::write(&path, value.to_string()).unwrap();
    let figures: Vec<String> = read(&path).unwrap().figures().into_iter().map(|f| f.row).collect();
    let head = "llama3-70b prefill";
    let narrow = format!("{head} e4m3.row:bf16 m 2048, flux in bf16");
    assert!(
        figures.contains(&format!("{head} m 2048, flux")) && figures.contains(&narrow),
        "{figures:?}"
    );
}
