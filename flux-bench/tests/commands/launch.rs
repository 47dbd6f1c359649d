//! `flux-bench launch`: ranks as processes, their output and their exit status.

use crate::program::{flux_bench, text};
use std::process::Command;

#[test]
fn a_launch_does_with_a_folder_of_temporary_files_that_is_not_told_as_a_whole() {
    for temporary in ["", "relative"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command.args(
            "bench --processes --transport host --tp 2 --shapes gpt3/64 --ms 64 --samples 1 --ops \
             ag_gemm"
                .split(' '),
        );
        let done = command.env("TMPDIR", temporary).env_remove("XDG_RUNTIME_DIR").output().unwrap();
        assert!(done.status.success(), "{temporary:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
}

#[test]
fn a_launch_gives_each_rank_its_number_and_reports_a_failure() {
    let done = flux_bench(&[
        "launch",
        "--ranks",
        "3",
        "--",
        "sh",
        "-c",
        "echo rank $FLUX_RANK of $FLUX_WORLD_SIZE, NVLS $NCCL_NVLS_ENABLE",
    ]);
    assert!(done.status.success(), "{}", text(&done));
    for rank in 0..3 {
        assert!(text(&done).contains(&format!("rank {rank} of 3, NVLS 0\n")), "{}", text(&done));
    }
    let failed =
        flux_bench(&["launch", "--ranks", "2", "--", "sh", "-c", "exit $((FLUX_RANK * 7))"]);
    assert_eq!(failed.status.code(), Some(7), "{}", text(&failed));
    let missing = flux_bench(&["launch", "--ranks", "1", "--", "/no/such/program"]);
    assert_eq!(missing.status.code(), Some(1), "{}", text(&missing));
    assert!(
        text(&missing).ends_with(
            "cannot start \"/no/such/program\" as rank 0: No such file or directory (os error 2)\n"
        ),
        "{}",
        text(&missing)
    );
}

#[test]
fn a_failed_rank_is_named_and_the_others_end_or_go_on() {
    let killed = "if [ $FLUX_RANK = 1 ]; then kill -9 $$; fi; read line < \"$0\"";
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    // Nobody writes: rank 0 ends only as it is told to.
    let done =
        flux_bench(&["launch", "--ranks", "2", "--", "sh", "-c", killed, pipe.to_str().unwrap()]);
    assert_eq!(done.status.code(), Some(128 + 9), "{}", text(&done));
    assert_eq!(text(&done), "flux-bench: rank 1 was killed by signal 9; ending the others\n");
    // Rank 2 ends the wait of rank 0 when rank 1 has failed and the launcher has seen it: a process
    // is there until it is reaped.
    let pid = folder.path().join("pid");
    let goes_on = "case $FLUX_RANK in 0) read line < \"$0\"; echo $line;; 1) echo $$ > \"$1\"; \
                   exit 7;; 2) until [ -s \"$1\" ]; do sleep 0.01; done; while kill -0 $(cat \
                   \"$1\") 2>&-; do sleep 0.01; done; echo went on > \"$0\";; esac";
    let paths = [&pipe, &pid].map(|path| path.to_str().unwrap());
    let words = ["launch", "--keep-going", "--ranks", "3", "--", "sh", "-c", goes_on];
    let done = flux_bench(&[words.as_slice(), &paths].concat());
    assert_eq!(done.status.code(), Some(7), "{}", text(&done));
    assert_eq!(text(&done), "went on\nflux-bench: rank 1 ended with status 7\n");
}

#[test]
fn the_rank_that_was_killed_or_panicked_is_named_though_its_peers_end_first() {
    for (end, code, said) in [
        ("kill -9 $$", 128 + 9, "rank 1 was killed by signal 9"),
        ("exit 101", 101, "rank 1 panicked (status 101)"),
        ("exit 4", 3, "rank 0 ended with status 3"),
    ] {
        let script =
            format!("case $FLUX_RANK in 0) exit 3;; 1) sleep 0.1; {end};; 2) exec sleep 60;; esac");
        let done = flux_bench(&["launch", "--ranks", "3", "--", "sh", "-c", &script]);
        assert_eq!(done.status.code(), Some(code), "{}", text(&done));
        assert_eq!(text(&done), format!("flux-bench: {said}; ending the others\n"));
    }
}

#[test]
fn lines_of_ranks_have_their_prefix_and_their_logs() {
    let folder = tempfile::tempdir().unwrap();
    let logs = folder.path().join("a/b");
    let script = "echo out $FLUX_RANK; printf 'err %s' $FLUX_RANK >&2";
    let launched = |options: &[&str]| {
        let words = [&["launch", "--ranks", "2"], options, &["--", "sh", "-c", script]].concat();
        let done = flux_bench(&words);
        assert!(done.status.success(), "{}", text(&done));
        let mut lines: Vec<String> = text(&done).lines().map(str::to_owned).collect();
        lines.sort_unstable();
        lines
    };
    let prefixed = ["[0] err 0", "[0] out 0", "[1] err 1", "[1] out 1"];
    assert_eq!(launched(&["--prefix"]), prefixed);
    let of_rank = |rank: u32| {
        let text = std::fs::read_to_string(logs.join(format!("rank-{rank}.log"))).unwrap();
        let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        words.sort_unstable();
        words
    };
    for options in [&["--logs"][..], &["--prefix", "--logs"]] {
        let options = [options, &[logs.to_str().unwrap()]].concat();
        let lines = launched(&options);
        assert_eq!(lines.is_empty(), options.len() == 2, "{lines:?}");
        for rank in 0..2 {
            assert_eq!(of_rank(rank), [&rank.to_string()[..], &rank.to_string(), "err", "out"]);
        }
    }
}

#[test]
fn what_a_launch_would_do_several_times_or_not_at_all_is_refused() {
    let program = env!("CARGO_BIN_EXE_flux-bench");
    let launched = |words: &str| {
        let words: Vec<&str> =
            ["launch", "--ranks", "2", "--", program].into_iter().chain(words.split(' ')).collect();
        flux_bench(&words)
    };
    let makes_ranks =
        "makes its ranks itself, and each of the 2 processes of this launch would do all of it";
    for (words, says) in [
        (
            "lab soak --transport host --quick --only least --tp 3",
            "--tp 3 is asked for in a launch of 2 ranks",
        ),
        ("run ag-gemm --transport host --input a --output b", makes_ranks),
        ("lab first-call --transport host --ms 16 --shapes gpt3/128", makes_ranks),
        ("lab faults --transport host --ranks 2", makes_ranks),
    ] {
        let done = launched(words);
        assert!(
            done.status.code() == Some(1) && text(&done).contains(says),
            "{words}: {}",
            text(&done)
        );
    }
    for (words, says) in [
        (
            "lab faults --transport host --kills 0 --stops 0 --missing 0",
            "there is nothing to inject",
        ),
        ("lab faults --transport mixed --ranks 4", "--transport mixed takes --nodes too"),
        (
            "simulate --machine h100-pair-by-host --ms 512",
            "no rate is known of 8 that share it: take --tp 2",
        ),
    ] {
        let done = flux_bench(&words.split(' ').collect::<Vec<_>>());
        assert!(
            done.status.code() == Some(1) && text(&done).contains(says),
            "{words}: {}",
            text(&done)
        );
    }
}
