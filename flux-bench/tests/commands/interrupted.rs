//! A signal from outside: nothing of what a command has begun stays.

use crate::lateness::AMPLE;
use crate::processes::{gone_within, runs};
use rustix::process::{Pid, Signal, kill_process};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_run_of_first_calls_that_a_signal_ends_leaves_no_folder_and_no_process() {
    for signal in [Signal::INT, Signal::TERM] {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        // Minutes, on a host.
        program.args([
            "lab",
            "first-call",
            "--transport",
            "host",
            "--tp",
            "2",
            "--ms",
            "65536",
            "--shapes",
            "gpt3/4",
            "--ops",
            "ag-gemm",
        ]);
        let run = program
            .env("TMPDIR", folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let children = || {
            let listed =
                std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.id())).unwrap();
            listed
                .split_ascii_whitespace()
                .map(|child| child.parse().unwrap())
                .collect::<Vec<i32>>()
        };
        let began = Instant::now();
        while children().is_empty() {
            assert!(began.elapsed() < AMPLE, "it has started none");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(300));
        let started = children();
        assert!(
            std::fs::read_dir(&folder).unwrap().next().is_some() && runs(started[0]),
            "nothing to leave behind"
        );
        kill_process(Pid::from_raw(run.id().cast_signed()).unwrap(), signal).unwrap();
        let done = run.wait_with_output().unwrap();
        assert_eq!(
            (done.status.signal(), done.stderr.is_empty()),
            (Some(signal.as_raw()), true),
            "{done:?}"
        );
        assert!(
            std::fs::read_dir(&folder).unwrap().next().is_none(),
            "{:?}",
            std::fs::read_dir(&folder).unwrap().next()
        );
        assert!(gone_within(&started, Duration::from_secs(5)), "{started:?}");
    }
}

/// Writes `x` and `w` of ones, whose product has `rows` rows and columns.
fn operands(path: &Path, rows: usize) {
    let bytes = half::bf16::ONE.to_le_bytes().repeat(rows * 16);
    let tensor = || TensorView::new(Dtype::BF16, vec![rows, 16], &bytes).unwrap();
    std::fs::write(path, safetensors::serialize([("x", tensor()), ("w", tensor())], None).unwrap())
        .unwrap();
}

/// Whether a process has a file below `folder` open of which some MiB are written.
fn writes(process: u32, folder: &Path) -> bool {
    let open = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    open.map(|entry| entry.path()).any(|entry| {
        std::fs::read_link(&entry).is_ok_and(|file| file.starts_with(folder))
            && std::fs::metadata(&entry).is_ok_and(|file| file.len() > 4 << 20)
    })
}

#[test]
fn a_run_that_is_ended_while_it_writes_leaves_no_part_of_its_output() {
    let rows = 4096;
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let folder = tempfile::tempdir().unwrap();
        // As the kernel names it.
        let path = folder.path().canonicalize().unwrap();
        operands(&path.join("in.st"), rows);
        let mut program = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        program.args([
            "run",
            "ag-gemm",
            "--ranks",
            "1",
            "--transport",
            "host",
            "--input",
            "in.st",
            "--output",
            "out.st",
        ]);
        let mut run =
            program.current_dir(&path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while !writes(run.id(), &path) && run.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        // It may have ended meanwhile: then its output is whole.
        let _ = kill_process(Pid::from_child(&run), signal);
        let status = run.wait().unwrap();
        let mut names: Vec<_> =
            std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        if names != ["in.st"] {
            assert_eq!(names, ["in.st", "out.st"], "{signal:?}: {status}");
            assert!(
                std::fs::metadata(path.join("out.st")).unwrap().len() > (rows * rows * 2) as u64,
                "{signal:?}: {status}"
            );
        }
    }
}
