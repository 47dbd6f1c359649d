//! What the repository says of its results is what its results say.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_bench::{CoreReport, FirstCallReport, PeersReport, Report, render};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn the_readme_and_the_pictures_match_the_committed_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for file in render(root).unwrap() {
        let committed = fs::read_to_string(&file.path).unwrap_or_default();
        assert!(committed == file.content, "{} does not match results/: run `cargo xtask results`", file.path.display());
    }
}

/// The rows of a file as a report of type `R` writes them again, with their text, and as they are
/// in the file.
fn rows<R: Serialize + DeserializeOwned>(text: &str) -> (Vec<Value>, String, Vec<Value>) {
    let report: R = serde_json::from_str(text).unwrap();
    let of = |report: Value| report["rows"].as_array().unwrap().clone();
    let (again, read) = (of(serde_json::to_value(&report).unwrap()), of(serde_json::from_str(text).unwrap()));
    (again, serde_json::to_string(&report).unwrap(), read)
}

#[test]
fn every_committed_row_is_read_and_would_be_written_as_it_is() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results");
    let mut seen = BTreeMap::<&str, usize>::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        // The name's last word, but for the ranks.
        let words = name.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches("-tp");
        let kind =
            ["core", "first-call", "peers", "nvlink", "pcie", "nccl", "mixed", "sustained"].into_iter().find(|kind| words.ends_with(kind));
        let kind = kind.filter(|_| path.extension().is_some_and(|extension| extension == "json"));
        let Some(kind) = kind else { continue };
        let text = fs::read_to_string(&path).unwrap();
        let (mut again, written, read) = match kind {
            "core" => rows::<CoreReport>(&text),
            "first-call" => rows::<FirstCallReport>(&text),
            "peers" => rows::<PeersReport>(&text),
            _ => rows::<Report>(&text),
        };
        for (again, read) in again.iter_mut().zip(&read) {
            let dtype = again["dtype"].clone();
            if kind == "first-call" && read.get("dtype").is_none() {
                again.as_object_mut().unwrap().remove("dtype");
            }
            let [op, model, m, n, k, tp] = ["op", "model", "m", "n", "k", "tp"].map(|field| &read[field]);
            let head = format!(r#"{{"op":{op},"model":{model},"m":{m},"n":{n},"k":{k},"tp":{tp},"dtype":{dtype},"#);
            assert!(written.contains(&head), "{name}: {head}");
        }
        assert!(again == read && !read.is_empty(), "{name}");
        *seen.entry(kind).or_default() += 1;
    }
    assert!(["core", "first-call", "peers", "nvlink", "sustained"].iter().all(|kind| seen.contains_key(kind)), "{seen:?}");
}
