//! `flux-bench bench` on the host: what it prints and writes, and its exit status.

use crate::program::{flux_bench, text};
use crate::soak::least_cases;
use flux_bench::Report;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

#[test]
fn the_host_bench_verifies_both_ops_and_writes_what_it_prints() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let json = path.to_str().unwrap();
    let done = flux_bench(&[
        "bench",
        "--transport",
        "host",
        "--tp",
        "4",
        "--ms",
        "16",
        "--shapes",
        "gpt3/128",
        "--samples",
        "3",
        "--json",
        json,
    ]);
    assert!(done.status.success(), "{}", text(&done));
    let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(
        (report.schema, report.origin.gpus, report.transport.as_str(), report.rows.len()),
        (2, 0, "host", 2)
    );
    assert!(
        report.origin.device.starts_with("host (4 ranks as threads on "),
        "{}",
        report.origin.device
    );
    for row in &report.rows {
        assert!(row.verified && row.max_rel_err > 0.0, "{row:?}");
        assert_eq!((row.head.m, row.head.tp, row.samples), (16, 4, 3));
        for times in [row.t_op_ms, row.t_gemm_ms, row.t_comm_ms, row.t_serial_ms] {
            assert!(
                0.0 < times.p10 && times.p10 <= times.median && times.median <= times.p90,
                "{times:?}"
            );
        }
        assert!(text(&done).contains(&row.head.op), "{}", text(&done));
    }
    assert!(
        text(&done).contains("this shows that results are right, not what fusion gains on GPUs"),
        "{}",
        text(&done)
    );
}

#[test]
fn fp16_is_measured_and_rounded_as_fp16_whatever_the_ranks_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let words = [
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
        "1",
        "--json",
    ];
    let report = |more: &[&str], dtype: &str| -> Report {
        let done = flux_bench(&[words.as_slice(), &[path.to_str().unwrap()], more].concat());
        assert!(
            done.status.success()
                && text(&done).contains(&format!("transport host, TP 2, {dtype}")),
            "{}",
            text(&done)
        );
        let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(report.rows.len(), 2);
        assert!(
            report.rows.iter().all(|row| row.verified && row.head.dtype == dtype),
            "{report:?}"
        );
        report
    };
    let bf16 = report(&[], "bf16");
    for more in [["--dtype", "fp16"].as_slice(), &["--dtype", "fp16", "--processes"]] {
        let fp16 = report(more, "fp16");
        for (narrow, wide) in fp16.rows.iter().zip(&bf16.rows) {
            // Three bits more, on data that are the same before they are rounded.
            let finer = wide.max_rel_err / narrow.max_rel_err;
            assert!((4.0..16.0).contains(&finer), "{narrow:?} {wide:?}");
            assert!(!narrow.head.same_problem(&wide.head));
        }
    }
}

#[test]
fn a_sustained_bench_says_what_calls_back_to_back_take() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "2",
        "--ms",
        "16,32",
        "--shapes",
        "gpt3/128",
        "--ops",
        "gemm_rs",
        "--samples",
        "3",
    ];
    let done = flux_bench(
        &[words.as_slice(), &["--sustained", "0.1", "--json", path.to_str().unwrap()]].concat(),
    );
    assert!(done.status.success(), "{}", text(&done));
    let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(report.rows.len(), 2);
    for row in &report.rows {
        let sustained = row.sustained.unwrap();
        assert_eq!((sustained.seconds, sustained.blocks), (0.1, 1));
        for times in [sustained.t_op_ms, sustained.t_gemm_ms, sustained.t_serial_ms] {
            assert!(times.median > 0.0, "{sustained:?}");
        }
    }
    assert!(text(&done).contains("back to back, 0.1 s each"), "{}", text(&done));
}

#[test]
fn a_shape_that_no_world_can_split_is_refused() {
    let words = "bench --transport host --tp 5 --ms 16 --shapes 16x32";
    let done = flux_bench(&words.split(' ').collect::<Vec<_>>());
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done).contains("32 is too small for 5 ranks"), "{}", text(&done));
}

/// Rows of a run on three ranks of the host.
fn measured(words: &str) -> (Output, Report) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let json = ["--samples", "1", "--json", path.to_str().unwrap()];
    let words = "bench --transport host --tp 3 ".to_owned() + words;
    let done = flux_bench(&words.split(' ').chain(json).collect::<Vec<_>>());
    assert!(done.status.success(), "{words}: {}", text(&done));
    let report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    (done, report)
}

#[test]
fn rows_of_any_number_are_measured_and_those_that_the_serial_path_adds_are_told() {
    let ops = "ag_gemm,gemm_rs,gemm_ar";
    let (done, report) = measured(&format!("--shapes 48x96 --ops {ops} --ms 1,33,34"));
    let padded = |op: &str| -> Vec<_> {
        report.rows.iter().filter(|row| row.head.op == op).map(|row| row.serial_m).collect()
    };
    assert_eq!(padded("ag_gemm"), [Some(3), None, Some(36)]);
    assert_eq!((padded("gemm_rs"), padded("gemm_ar")), (padded("ag_gemm"), vec![None; 3]));
    assert!(report.rows.iter().all(|row| row.verified), "{report:?}");
    let told = text(&done).lines().filter(|line| line.ends_with("serial pads m to 36")).count();
    assert_eq!(told, 2, "{}", text(&done));
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    let tune = format!(
        "tune --transport host --tp 2 --shapes 48x96 --ms 1,33 --samples 3 --candidates 1 --table {}",
        table.display()
    );
    for words in ["simulate --tp 2 --shapes gpt3/16 --ms 1,33", &tune] {
        let done = flux_bench(&words.split(' ').collect::<Vec<_>>());
        assert!(done.status.success(), "{words}: {}", text(&done));
    }
}

#[test]
fn what_an_op_does_to_its_sums_is_measured_beside_a_serial_path_that_does_it_too() {
    let all = "--shapes 96x192 --ops ag_gemm,gemm_rs,gemm_ar --ms 20 --bias --residual --norm 1e-6";
    for (words, gathers) in [
        ("--gates swiglu", "96x192+bias+swiglu"),
        ("--activation geglu_interleaved --dtype fp16", "96x192+bias+geglu_interleaved"),
        ("--activation relu --processes", "96x192+bias+relu"),
    ] {
        let (_, report) = measured(&format!("{all} {words}"));
        let models: Vec<&str> = report.rows.iter().map(|row| row.head.model.as_str()).collect();
        let sums = "96x192+bias+residual+norm";
        assert_eq!(models, [gathers, sums, sums]);
        assert!(report.rows.iter().all(|row| row.verified), "{report:?}");
    }
    for (words, says) in [
        ("--ops ag_gemm --residual", "--residual is of gemm_rs and gemm_ar: name it with --ops"),
        ("--ops ag_gemm --norm 0", "--norm is of gemm_rs and gemm_ar: name it with --ops"),
        ("--ops gemm_rs --gates swiglu", "--activation is of ag_gemm: name it with --ops"),
        ("--norm nan", "\"nan\" is no number of 0 and more"),
    ] {
        let words = "bench --transport host --tp 2 --shapes 96x192 --ms 16 ".to_owned() + words;
        let done = flux_bench(&words.split(' ').collect::<Vec<_>>());
        assert!(!done.status.success() && text(&done).contains(says), "{words}: {}", text(&done));
    }
}

#[test]
fn a_row_is_printed_when_it_is_measured() {
    // The second row takes minutes.
    let words = "bench --transport host --tp 2 --ops ag_gemm --shapes 16x32,gpt3/8 --ms 64 --yes";
    let mut bench = Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .args(words.split(' '))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(bench.stdout.take().unwrap()).lines().map(Result::unwrap);
    let row = lines.find(|line| line.starts_with("ag_gemm")).unwrap();
    let ended = bench.try_wait().unwrap();
    bench.kill().unwrap();
    bench.wait().unwrap();
    assert!(row.contains("16x32") && ended.is_none(), "{row}, {ended:?}");
}

#[test]
fn json_goes_to_a_pipe_and_alone_to_the_standard_output() {
    let words = "bench --transport host --tp 2 --shapes 16x32 --ms 16 --samples 1 --ops gemm_rs";
    let bench =
        |json: &str| flux_bench(&words.split(' ').chain(["--json", json]).collect::<Vec<_>>());
    for json in ["-", "/dev/stdout"] {
        let done = bench(json);
        let report: Report = serde_json::from_slice(&done.stdout).unwrap();
        assert_eq!(report.rows.len(), 1);
        let table = String::from_utf8_lossy(&done.stderr);
        assert!(table.lines().any(|line| line.starts_with("gemm_rs ")), "{json}: {table}");
    }
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let path = pipe.clone();
    let reader = std::thread::spawn(move || std::fs::read(path).unwrap());
    let done = bench(pipe.to_str().unwrap());
    assert!(done.status.success(), "{}", text(&done));
    let report: Report = serde_json::from_slice(&reader.join().unwrap()).unwrap();
    assert_eq!(report.rows.len(), 1);
    assert!(String::from_utf8_lossy(&done.stdout).contains("gemm_rs "), "{}", text(&done));
}

#[test]
fn over_pcie_the_serial_path_has_no_peer_access_either() {
    let bench = |disable: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command.args("bench --transport pcie --tp 2".split(' ')).env("CUDA_VISIBLE_DEVICES", "");
        match disable {
            Some(value) => command.env("NCCL_P2P_DISABLE", value),
            None => command.env_remove("NCCL_P2P_DISABLE"),
        };
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let said = "flux-bench: NCCL_P2P_DISABLE=1 is set: over pcie";
    assert!(bench(None).starts_with(said), "{}", bench(None));
    assert!(!bench(Some("0")).contains(said) && !bench(Some("1")).contains(said));
}

#[test]
fn a_picture_does_not_replace_what_it_shows() {
    let folder = tempfile::tempdir().unwrap();
    let record = folder.path().join("record.json");
    std::fs::copy(concat!(env!("CARGO_MANIFEST_DIR"), "/../results/h100-x2-pcie.json"), &record)
        .unwrap();
    let before = std::fs::read(&record).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .arg("show")
        .arg(&record)
        .arg("--svg")
        .arg(&record)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&done.stderr);
    assert!(
        done.status.code() == Some(1)
            && error.contains("is a file that is shown, which it would replace: name another"),
        "{error}"
    );
    assert_eq!(std::fs::read(&record).unwrap(), before);
}

#[test]
fn what_there_is_not_is_refused() {
    for (words, says) in [
        (
            "lab soak --transport host --tp 2 --quick --only least --ranks-per-gpu 2",
            "--ranks-per-gpu is for GPUs, and changes nothing on the host",
        ),
        ("simulate --ms 512 --candidate 99999", "--candidate 99999: ag_gemm m=512"),
        (
            "bench --transport host --tp 2 --ms 16 --shapes gpt3/128 --samples 1 --candidate 9999",
            "--candidate 9999: ag_gemm m=16",
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

#[test]
fn a_record_says_what_an_option_comes_to() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let words = "bench --transport host --tp 2 --ms 16 --shapes gpt3/128 --samples 1 --json";
    let asked = "tile=8x16x64 rows=per-shard:9 k=split-k:999 chunk=1 k-slices=9";
    let done = flux_bench(
        &words
            .split(' ')
            .chain([path.to_str().unwrap(), "--plan", asked, "--workers", "3"])
            .collect::<Vec<_>>(),
    );
    assert!(done.status.success(), "{}", text(&done));
    let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let row = |op: &str| report.rows.iter().find(|row| row.head.op == op).unwrap();
    // 96 columns are 2 steps of 64, 192 are 3; and a GEMM-ReduceScatter has one shard to send.
    let gathers =
        "tile=8x16x64 rows=per-shard:2 k=split-k:2 chunk=shard k-slices=2 comm=fused:kernel";
    let scatters = "tile=8x16x64 rows=per-shard:1 k=split-k:3 chunk=1 k-slices=1 comm=fused:kernel";
    for (op, plan) in [("ag_gemm", gathers), ("gemm_rs", scatters)] {
        assert_eq!((row(op).plan.as_str(), row(op).execution.as_ref().unwrap().workers), (plan, 3));
    }
}

#[test]
fn a_file_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let done = flux_bench(&["bench", "--transport", "host", "--json", "/no/such/folder/b.json"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(text(&done).contains("a file cannot be created in"), "{}", text(&done));
}

#[test]
fn a_wrong_element_of_any_rank_fails_the_row_the_file_and_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.json");
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "3",
        "--ms",
        "24",
        "--shapes",
        "gpt3/128",
        "--samples",
        "1",
        "--spoil",
        "--json",
    ];
    for as_what in [[].as_slice(), &["--processes"]] {
        let done = flux_bench(&[words.as_slice(), &[path.to_str().unwrap()], as_what].concat());
        assert_eq!(done.status.code(), Some(1), "{}", text(&done));
        assert_eq!(
            text(&done).lines().filter(|line| line.ends_with("  NO")).count(),
            2,
            "{}",
            text(&done)
        );
        assert!(
            text(&done).contains("the first at row ") && text(&done).contains(" of rank 2"),
            "{}",
            text(&done)
        );
        let report: Report = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert!(report.rows.iter().all(|row| !row.verified), "{report:?}");
    }
    let words = [
        "lab",
        "soak",
        "--transport",
        "host",
        "--tp",
        "3",
        "--quick",
        "--only",
        "least",
        "--spoil",
    ];
    for as_what in [[].as_slice(), &["--processes"]] {
        let done = flux_bench(&[words.as_slice(), as_what].concat());
        assert_eq!(done.status.code(), Some(1), "{}", text(&done));
        assert_eq!(
            text(&done).lines().filter(|line| line.starts_with("FAILED  least")).count(),
            least_cases(),
            "{}",
            text(&done)
        );
    }
    let words = [
        "lab",
        "first-call",
        "--transport",
        "host",
        "--tp",
        "2",
        "--ms",
        "16",
        "--shapes",
        "gpt3/128",
        "--ops",
        "ag-gemm",
        "--spoil",
    ];
    let done = flux_bench(&words);
    assert!(
        done.status.code() == Some(1) && text(&done).contains("the result of call 0 is wrong"),
        "{}",
        text(&done)
    );
}

#[test]
fn a_run_of_hours_on_the_host_is_refused_unless_it_is_asked_for() {
    // Months, on any machine.
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "2",
        "--ms",
        "65536",
        "--shapes",
        "gpt3",
        "--samples",
        "100000",
    ];
    for more in [&[][..], &["--processes"]] {
        let done = flux_bench(&[&words[..], more].concat());
        let said = text(&done);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(
            said.contains("more than 60 minutes: give --yes to start it all the same"),
            "{said}"
        );
    }
}
