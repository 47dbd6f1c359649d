//! What becomes of a command whose standard output is closed, or full.

use flux_bench::Report;
use std::fs::OpenOptions;
use std::process::{Command, Output, Stdio};

const BENCH: [&str; 10] = [
    "bench",
    "--transport",
    "host",
    "--tp",
    "2",
    "--ms",
    "16",
    "--shapes",
    "gpt3/128",
    "--samples",
];

fn flux_bench(words: &[&str], out: Stdio) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .args(words)
        .stdout(out)
        .stderr(Stdio::piped())
        .output()
        .unwrap()
}

/// The end of a pipe that nobody reads.
fn closed() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

/// A device that is always full.
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

#[test]
fn what_was_measured_is_written_whatever_becomes_of_the_table() {
    for (out, code, says) in [
        (closed(), 0, ""),
        (
            full(),
            1,
            "flux-bench: the standard output cannot be written: No space left on device (os error \
             28)\n",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keep.json");
        let done =
            flux_bench(&[BENCH.as_slice(), &["1", "--json", path.to_str().unwrap()]].concat(), out);
        assert_eq!(
            (done.status.code(), &*String::from_utf8_lossy(&done.stderr)),
            (Some(code), says)
        );
        let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert!(report.rows.len() == 2 && report.verified());
    }
}

#[test]
fn a_reader_that_has_gone_ends_no_command_in_a_panic() {
    for words in [
        "simulate --ms 512 --tp 2",
        "lab soak --transport host --tp 2 --quick --only least",
        "lab faults --transport host --ranks 2 --kills 1 --stops 0 --missing 0",
    ] {
        let done = flux_bench(&words.split(' ').collect::<Vec<_>>(), closed());
        assert_eq!(
            (done.status.code(), &*String::from_utf8_lossy(&done.stderr)),
            (Some(0), ""),
            "{words}"
        );
    }
    // Whether a transport works decides about its status.
    let done = flux_bench(&["doctor"], closed());
    assert!(done.status.code() != Some(101) && done.stderr.is_empty(), "{done:?}");
}
