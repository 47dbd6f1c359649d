//! Time lines of the host transport.

use serde_json::Value;
use std::collections::BTreeMap;
use std::process::Command;

#[test]
fn a_call_on_the_host_is_told_in_words_as_events_as_a_page_and_as_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, html, svg) = (path("a.json"), path("a.html"), path("a.svg"));
    let words = "trace --transport host --ops gemm_rs --shapes gpt3/128 --ms 64 --tp 2 --workers 2 \
                 --calls 6 --summary --simulated --output";
    let out = Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .args(words.split_whitespace())
        .args([&json, "--html", &html, "--svg", &svg])
        .output()
        .unwrap();
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{said}{}", String::from_utf8_lossy(&out.stderr));
    assert!(said.contains("rank 1: 2 workers, ") && said.contains("by the host's clock"), "{said}");

    let trace: Value = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
    let mut threads: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X") {
        let [pid, tid] = ["pid", "tid"].map(|key| event[key].as_u64().unwrap());
        let [ts, dur] = ["ts", "dur"].map(|key| event[key].as_f64().unwrap());
        threads.entry((pid, tid)).or_default().push((ts, ts + dur));
    }
    assert_eq!(threads.len(), 4, "a thread for each worker");
    for spans in threads.values() {
        // The first is the worker's life; its phases follow one another.
        let inside =
            spans[1..].iter().all(|s| s.0 >= spans[0].0 - 1e-6 && s.1 <= spans[0].1 + 1e-6);
        assert!(inside && spans.len() > 3, "{spans:?}");
        assert!(spans[1..].windows(2).all(|pair| pair[1].0 >= pair[0].1 - 1e-6), "{spans:?}");
    }

    for file in [html, svg] {
        let picture = std::fs::read_to_string(file).unwrap();
        let mut calls = picture.split("SIMULATED gemm_rs");
        let measured = calls.next().unwrap();
        assert_eq!(measured.matches("<g transform=\"translate(0 ").count(), 4);
        assert!(measured.contains("exposed wait ") && calls.next().is_some());
    }
}
