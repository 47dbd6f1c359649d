//! `flux-bench bench` and `soak` on the host: what they print and write, and their exit status.

use flux_bench::FirstCallReport;
use flux_bench::{Report, ServingReport};
use flux_core::OpKind;
use flux_ops::Activation;
use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn flux_bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_flux-bench")).args(words).output().unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

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

/// Of a trace on three ranks, whose shards are uneven or empty.
fn served(more: &[&str]) -> (Output, Option<ServingReport>) {
    let folder = tempfile::tempdir().unwrap();
    let (trace, path) = (folder.path().join("steps"), folder.path().join("host.json"));
    std::fs::write(&trace, "# a prefill chunk, then decode\n64\n1\n7 # three ranks\n2\n").unwrap();
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "3",
        "--shapes",
        "48x96",
        "--trace-m",
        trace.to_str().unwrap(),
        "--json",
    ];
    let done = flux_bench(&[words.as_slice(), &[path.to_str().unwrap()], more].concat());
    let report = std::fs::read(&path).ok().map(|json| serde_json::from_slice(&json).unwrap());
    (done, report)
}

#[test]
fn calls_with_the_rows_of_a_file_are_timed_beside_the_serial_path_and_each_is_verified() {
    for (more, ops) in [
        (&[][..], &["gemm_ar"][..]),
        (
            &["--ops", "ag_gemm,gemm_rs,gemm_ar", "--calls", "21"],
            &["ag_gemm", "gemm_rs", "gemm_ar"],
        ),
        (&["--processes", "--dtype", "fp16"], &["gemm_ar"]),
    ] {
        let (done, report) = served(more);
        assert!(done.status.success(), "{more:?}: {}", text(&done));
        let report = report.unwrap();
        assert_eq!(report.serving.iter().map(|row| row.head.op.as_str()).collect::<Vec<_>>(), ops);
        assert_eq!((report.schema, report.transport.as_str()), (1, "host"));
        for row in &report.serving {
            let calls = if more.contains(&"--calls") { 21 } else { 64 };
            assert_eq!(
                (row.calls, row.trace.as_str(), row.different_rows, row.head.tp),
                (calls, "steps", 4, 3)
            );
            assert_eq!(row.rows, calls / 4 * (64 + 1 + 7 + 2) + if calls == 21 { 64 } else { 0 });
            assert!(
                row.verified && row.checked >= 4 * row.calls && row.max_rel_err > 0.0,
                "{row:?}"
            );
            assert!(row.total_op_ms > 0.0 && row.total_serial_ms > 0.0, "{row:?}");
            for host in [row.host_us, row.host_serial_us] {
                assert!(0.0 < host.p50 && host.p50 <= host.p99, "{row:?}");
            }
            assert!(row.memory.host.before > 0 && row.memory.device.after == 0, "{row:?}");
            assert!(
                text(&done).contains(&format!("rows of steps, 4 numbers of rows in {calls} calls")),
                "{}",
                text(&done)
            );
        }
    }
}

#[test]
fn a_wrong_element_of_a_call_of_a_trace_is_found() {
    for op in ["ag_gemm", "gemm_rs", "gemm_ar"] {
        let (done, report) = served(&["--ops", op, "--calls", "4", "--spoil"]);
        assert_eq!(done.status.code(), Some(1), "{}", text(&done));
        assert!(text(&done).contains("wrong elements, the first at row "), "{}", text(&done));
        assert!(!report.unwrap().serving[0].verified);
    }
}

#[test]
fn the_mix_serves_on_the_host_and_bad_traces_are_refused_with_line_and_value() {
    let words = [
        "bench",
        "--transport",
        "host",
        "--tp",
        "2",
        "--shapes",
        "16x32",
        "--calls",
        "24",
        "--trace-m",
    ];
    let done = flux_bench(&[words.as_slice(), &["mix"]].concat());
    assert!(done.status.success() && text(&done).contains("rows of mix, "), "{}", text(&done));
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("steps");
    std::fs::write(&trace, "16\nmany\n").unwrap();
    let refused = flux_bench(&[words.as_slice(), &[trace.to_str().unwrap()]].concat());
    assert!(
        !refused.status.success()
            && text(&refused).contains("line 2: \"many\" is no number of rows"),
        "{}",
        text(&refused)
    );
    for more in
        ["--ms 16", "--samples 3", "--sustained 1", "--bias", "--norm 1e-6", "--gates swiglu"]
    {
        let more: Vec<&str> = more.split(' ').collect();
        let refused = flux_bench(&[words.as_slice(), &["mix"], &more].concat());
        assert!(
            !refused.status.success() && text(&refused).contains("cannot be used with"),
            "{}",
            text(&refused)
        );
    }
    let refused = flux_bench(&["bench", "--calls", "4"]);
    assert!(
        !refused.status.success() && text(&refused).contains("--trace-m"),
        "{}",
        text(&refused)
    );
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
fn the_variable_decides_where_no_transport_is_named() {
    let bench = |transport: &str, hidden: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command
            .args(["bench", "--tp", "2", "--ms", "16", "--shapes", "gpt3/128", "--samples", "1"])
            .env("FLUX_TRANSPORT", transport);
        if hidden {
            command.env("CUDA_VISIBLE_DEVICES", "");
        }
        command.output().unwrap()
    };
    for (transport, says) in [
        ("nvlink", "transport nvlink needs GPUs"),
        ("pigeon", "FLUX_TRANSPORT: `pigeon` names no transport"),
    ] {
        let done = bench(transport, true);
        assert!(
            done.status.code() == Some(1) && text(&done).contains(says),
            "{transport}: {}",
            text(&done)
        );
    }
    // Also where there are GPUs.
    let done = bench("host", false);
    assert!(
        done.status.success() && text(&done).contains("transport host, TP 2"),
        "{}",
        text(&done)
    );
}

#[test]
fn that_no_rank_has_a_gpu_is_said_once_however_many_ranks_and_rebuilds_there_are() {
    let said = |words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        let done = command.args(words.split(' ')).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        assert!(done.status.success(), "{}", text(&done));
        text(&done).matches("no rank has a GPU, so all compute on the host's processors").count()
    };
    assert_eq!(said("bench --tp 3 --processes --shapes 48x96 --ms 24 --samples 1"), 1);
    assert!(said("lab faults --ranks 3 --kills 2 --stops 0 --missing 0") <= 1);
}

#[test]
fn the_doctor_says_of_the_variable_what_a_run_says() {
    let doctor = |transport: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command
            .arg("doctor")
            .env("FLUX_TRANSPORT", transport)
            .env("CUDA_VISIBLE_DEVICES", "")
            .output()
            .unwrap()
    };
    let auto = |done: &Output| {
        text(done)
            .lines()
            .find_map(|line| line.strip_prefix("auto"))
            .unwrap()
            .trim_start()
            .to_owned()
    };
    for (transport, says) in [
        ("nvlink", "fails: transport nvlink needs GPUs: "),
        ("pigeon", "fails: FLUX_TRANSPORT: `pigeon` names no transport: auto, host, "),
    ] {
        let done = doctor(transport);
        assert!(
            done.status.code() == Some(1) && auto(&done).starts_with(says),
            "{transport}: {}",
            text(&done)
        );
    }
    for (required, works) in [("nvlink", false), ("host,nvlink", false), ("host", true)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command.args(["doctor", "--require", required]).env("CUDA_VISIBLE_DEVICES", "");
        let done = command.output().unwrap();
        assert_eq!(done.status.success(), works, "{required}: {}", text(&done));
        assert_eq!(text(&done).contains("NOT MET: nvlink\n"), !works, "{}", text(&done));
    }
    let done = doctor("host");
    assert!(
        done.status.success() && auto(&done) == "takes host, as FLUX_TRANSPORT says",
        "{}",
        text(&done)
    );
    assert_eq!(auto(&doctor("")), auto(&doctor("auto")));
}

#[test]
fn a_filter_of_the_log_that_cannot_be_read_is_named_and_changes_nothing_else() {
    let with = |filter: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flux-bench"));
        command
            .args(["simulate", "--ms", "512", "--tp", "2", "--shapes", "gpt3/128"])
            .env("FLUX_LOG", filter)
            .output()
            .unwrap()
    };
    let done = with("flux_transport=loud");
    let error = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        done.status.success()
            && error.starts_with(
                "flux-bench: FLUX_LOG = \"flux_transport=loud\" is no filter, so warn is taken: "
            ),
        "{error}"
    );
    assert_eq!(error.lines().count(), 1, "{error}");
    for misspelt in
        ["verbose", "warnn", "9", ",", "flux-bench=debug", "debug,flux_transport=trace,infos"]
    {
        let done = with(misspelt);
        let error = String::from_utf8_lossy(&done.stderr).into_owned();
        let says = format!("flux-bench: FLUX_LOG = {misspelt:?} is no filter, so warn is taken: ");
        assert!(
            done.status.success() && error.starts_with(&says) && error.lines().count() == 1,
            "{error}"
        );
    }
    for fine in
        ["", "warn", "flux_transport=debug", "error,flux_transport=debug", "flux_transport", "OFF"]
    {
        let error = with(fine).stderr;
        assert!(error.is_empty(), "{fine}: {}", String::from_utf8_lossy(&error));
    }
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
fn each_first_call_has_a_process_of_its_own_and_a_slow_one_fails() {
    let words = [
        "lab",
        "first-call",
        "--transport",
        "host",
        "--tp",
        "2",
        "--ms",
        "16,32",
        "--shapes",
        "gpt3/128",
        "--ops",
        "ag-gemm",
    ];
    let done = flux_bench(&[words.as_slice(), &["--at-most", "1e9"]].concat());
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(
        text(&done).lines().filter(|l| l.starts_with("ag_gemm")).count(),
        2,
        "{}",
        text(&done)
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("first.json");
    let of_fp16 = flux_bench(
        &[words.as_slice(), &["--dtype", "fp16", "--json", path.to_str().unwrap()]].concat(),
    );
    assert!(
        of_fp16.status.success() && text(&of_fp16).contains(", TP 2, fp16\n"),
        "{}",
        text(&of_fp16)
    );
    let report: FirstCallReport = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert!(
        report.rows.len() == 2 && report.rows.iter().all(|row| row.head.dtype == "fp16"),
        "{report:?}"
    );
    let unjudged = flux_bench(&words);
    assert!(
        unjudged.status.success() && !text(&unjudged).contains("at most"),
        "{}",
        text(&unjudged)
    );
    let slow = flux_bench(&[words.as_slice(), &["--at-most", "0"]].concat());
    assert_eq!(
        (slow.status.code(), text(&slow).matches("TOO SLOW").count()),
        (Some(1), 2),
        "{}",
        text(&slow)
    );
}

/// Cases of the soak in the least shape: each op in two types, plain and with a bias and each
/// activation. Then two kinds of gates, or of sums a residual, without norm and with it, and in one
/// type fp32 partial sums.
fn least_cases() -> usize {
    OpKind::ALL
        .map(|op| 2 * (1 + Activation::of(op).len() + 2) + usize::from(op.reduces()))
        .iter()
        .sum()
}

#[test]
fn the_soak_passes_on_the_host() {
    let done = flux_bench(&[
        "lab",
        "soak",
        "--transport",
        "host",
        "--tp",
        "3",
        "--quick",
        "--only",
        "least",
    ]);
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(
        text(&done).lines().filter(|l| l.starts_with("passed  least")).count(),
        least_cases(),
        "{}",
        text(&done)
    );
}

#[test]
fn processes_share_host_memory_as_threads_do() {
    for ranks in ["2", "3", "8"] {
        let done = flux_bench(&[
            "lab",
            "soak",
            "--transport",
            "host",
            "--tp",
            ranks,
            "--quick",
            "--processes",
            "--only",
            "least",
        ]);
        assert!(done.status.success(), "{}", text(&done));
        assert!(
            text(&done).contains(&format!("{ranks} ranks are processes of this machine")),
            "{}",
            text(&done)
        );
        assert_eq!(
            text(&done).lines().filter(|l| l.starts_with("passed  least")).count(),
            least_cases(),
            "{}",
            text(&done)
        );
    }
}

#[test]
fn a_random_soak_says_its_seed_and_one_of_its_cases_can_be_run_again() {
    let words = ["lab", "soak", "--transport", "host", "--tp", "3"];
    let done = flux_bench(&[words.as_slice(), &["--random", "0.04", "--seed", "11"]].concat());
    assert!(done.status.success(), "{}", text(&done));
    assert!(text(&done).contains("random cases of seed 11: "), "{}", text(&done));
    let again = flux_bench(&[words.as_slice(), &["--case", "1", "--seed", "11"]].concat());
    assert!(
        again.status.success() && text(&again).contains("passed  case 1, "),
        "{}",
        text(&again)
    );
    assert_eq!(
        flux_bench(&[words.as_slice(), &["--case", "1"]].concat()).status.code(),
        Some(2),
        "a case is of a seed"
    );
}

#[test]
fn a_soak_of_nothing_is_a_failure() {
    let done =
        flux_bench(&["lab", "soak", "--transport", "host", "--tp", "2", "--only", "no such case"]);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
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

#[test]
fn the_commit_is_that_of_the_build_wherever_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let git = "git init -q && git -c user.name=a -c user.email=a commit -q --allow-empty -m other";
    assert!(Command::new("sh").args(["-c", git]).current_dir(&folder).status().unwrap().success());
    let doctor = Command::new(env!("CARGO_BIN_EXE_flux-bench"))
        .arg("doctor")
        .current_dir(&folder)
        .env("FLUX_COMMIT", "another")
        .output()
        .unwrap();
    let built = option_env!("FLUX_COMMIT").filter(|commit| !commit.is_empty()).unwrap_or("unknown");
    assert!(
        text(&doctor).lines().next().unwrap().ends_with(&format!(", commit {built}")),
        "{}",
        text(&doctor)
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
