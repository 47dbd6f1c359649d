//! `flux-bench lab faults` on the host, with few faults: the whole count is a step of its own
//! (`cargo xtask faults`).

use crate::lateness::AMPLE;
use crate::processes::{gone_within, runs};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What a run on the host said, and how it ended.
struct Run {
    code: Option<i32>,
    out: String,
    /// Its standard error, where ranks speak for themselves.
    own: String,
    /// Both.
    text: String,
}

fn faults(words: &str) -> Run {
    faults_by(Command::new(env!("CARGO_BIN_EXE_flux-bench")), words)
}

fn faults_by(mut program: Command, words: &str) -> Run {
    let done = program
        .args(["lab", "faults", "--transport", "host"])
        .args(words.split_ascii_whitespace())
        .output()
        .unwrap();
    let [out, own] =
        [&done.stdout, &done.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    let text = format!("{out}{own}");
    Run { code: done.status.code(), out, own, text }
}

/// A run that passes, after as many faults and rebuilds as `counted` says.
fn pass(words: &str, counted: &str) {
    let Run { code, text, .. } = faults(words);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains(counted), "{text}");
    assert!(
        text.contains("\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, 0 residue, 0 broken\n"),
        "{text}"
    );
}

#[test]
fn a_descriptor_that_is_kept_at_each_rebuild_is_found_and_named() {
    let Run { code, text, .. } = faults("--ranks 3 --kills 6 --stops 0 --missing 0 --leak");
    assert_eq!(code, Some(1), "{text}");
    let residue: Vec<_> = text.lines().filter(|line| line.starts_with("Residue: ")).collect();
    assert!(
        !residue.is_empty()
            && residue.iter().all(|line| line.contains("descriptor of /dev/null: ")),
        "{text}"
    );
    assert!(text.contains("\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, "), "{text}");
}

#[test]
fn a_file_that_ranks_leave_is_found_whatever_it_is_called() {
    let Run { code, text, .. } = faults("--ranks 2 --kills 0 --stops 0 --missing 1 --litter");
    assert_eq!(code, Some(1), "{text}");
    // Of both ranks and of the one that came for one of them.
    let files = text
        .lines()
        .filter(|line| line.starts_with("Residue: ") && line.contains("/temporary/left-"))
        .count();
    assert!(
        files == 3
            && text.contains(
                "\n0 hangs, 0 wrong results, 0 misnamed, 0 mistimed, 3 residue, 0 broken\n"
            ),
        "{text}"
    );
}

#[test]
fn ranks_that_are_killed_stopped_or_missing_are_named_and_the_group_is_rebuilt() {
    let counted = "6 kills, 2 short and 2 long stops, 2 missing; 5 rebuilds with survivors, 10 \
                   with replacements";
    pass("--ranks 4 --kills 6 --stops 4 --missing 2", counted);
}

#[test]
fn ranks_are_heard_of_by_a_program_that_was_started_with_sigchld_ignored() {
    let mut program = Command::new("env");
    program.args(["--ignore-signal=CHLD", env!("CARGO_BIN_EXE_flux-bench")]);
    let Run { code, text, .. } = faults_by(program, "--ranks 2 --kills 2 --stops 0 --missing 0");
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn a_rank_that_does_not_answer_is_shown_by_its_threads_and_in_its_own_words() {
    let Run { code, out, own, text } =
        faults("--ranks 2 --kills 0 --stops 0 --missing 1 --patience 2 --deadline-ms 500 --stall");
    assert_eq!(code, Some(1), "{text}");
    assert!(out.contains("Hang: rank 1 does not answer\n"), "{text}");
    for thread in ["flux-control", "progress"] {
        let shown = |rank| {
            out.lines().any(|line| {
                line.starts_with(&format!("  rank {rank}: thread "))
                    && line.contains(&format!(" {thread}, state "))
            })
        };
        assert!(shown(0) && shown(1), "{text}");
    }
    let said = own
        .lines()
        .find(|line| line.starts_with("flux-bench: rank 1: stalls, for "))
        .unwrap_or_else(|| panic!("{text}"));
    assert!(said.contains("; call 6 (") && said.contains(": Done, begun at "), "{text}");
    assert!(own.lines().any(|line| line.starts_with("flux-bench: rank 0: ")), "{text}");
}

/// The processes that a process has started, as the system says it.
fn children(pid: u32) -> Vec<i32> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    listed.split_ascii_whitespace().map(|child| child.parse().unwrap()).collect()
}

#[test]
fn a_run_that_a_signal_ends_leaves_no_folder_and_no_rank() {
    // One that waits for a report of a rank that says nothing, and one amid faults.
    for (signal, words) in
        [(Signal::INT, "--stall --patience 3600"), (Signal::TERM, "--kills 1000")]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        program
            .args(["lab", "faults", "--transport", "host", "--ranks", "3"])
            .args(words.split(' '))
            .env("TMPDIR", folder.path());
        let run = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let began = Instant::now();
        while children(run.id()).len() < 3 {
            assert!(began.elapsed() < AMPLE, "no ranks");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_secs(1));
        let ranks = children(run.id());
        assert!(
            std::fs::read_dir(&folder).unwrap().count() == 1
                && ranks.iter().any(|&rank| runs(rank)),
            "nothing to leave behind"
        );
        // A terminal's comes to the ranks too.
        for &process in
            ranks.iter().filter(|_| signal == Signal::INT).chain([&run.id().cast_signed()])
        {
            let _ended = kill_process(Pid::from_raw(process).unwrap(), signal);
        }
        let done = run.wait_with_output().unwrap();
        assert_eq!(done.status.signal(), Some(signal.as_raw()), "{done:?}");
        assert!(
            std::fs::read_dir(&folder).unwrap().next().is_none(),
            "{:?}",
            std::fs::read_dir(&folder).unwrap().next()
        );
        assert!(gone_within(&ranks, Duration::from_secs(5)), "{ranks:?}");
    }
}
