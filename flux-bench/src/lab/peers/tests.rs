use super::child::{ScriptCase, ScriptJob, run};
use super::*;
use crate::harness::Times;
use crate::lateness::{AMPLE, assert_soon, scaled};
use flux_core::DType;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

fn args() -> Args {
    let words = ["peers", "--ms", "64,512", "--shapes", "gpt3", "--tp", "4"];
    let command = <Args as clap::Args>::augment_args(clap::Command::new("peers"));
    <Args as clap::FromArgMatches>::from_arg_matches(&command.get_matches_from(words)).unwrap()
}

fn small_job() -> ScriptJob {
    ScriptJob {
        tp: 2,
        dtype: "bf16".into(),
        output: "bf16",
        scales: "none".into(),
        fast_accumulation: false,
        samples: 3,
        norm: false,
        cases: vec![ScriptCase {
            op: "ag_gemm",
            model: "gpt3".into(),
            n: 48,
            k: 16,
            ms: vec![64, 512],
        }],
    }
}

/// A shell script in place of Python, called with the peers' script and its input as JSON.
///
/// Written by another process: a fork of a test thread would keep the file open, and it could not
/// run.
fn python(folder: &Path, text: &str) -> OsString {
    let path = folder.join("python3");
    let source = folder.join("source");
    fs::write(
        &source,
        format!(
            "#!/bin/sh\nout=$(printf %s \"$2\" | sed \
             's/.*\"out\":\"\\([^\"]*\\)\".*/\\1/')\n{text}\n"
        ),
    )
    .unwrap();
    assert!(
        Command::new("sh")
            .arg("-c")
            .arg("cp \"$1\" \"$2\" && chmod +x \"$2\"")
            .args(["sh".as_ref(), source.as_os_str(), path.as_os_str()])
            .status()
            .unwrap()
            .success()
    );
    path.into_os_string()
}

const VERSIONS: &str = r#"{"torch": "2.11.0", "nccl": "2.28.9"}"#;

fn row(m: u32, fused: &str) -> String {
    format!(
        r#"{{"op": "ag_gemm", "model": "gpt3", "m": {m}, "n": 48, "k": 16, "tp": 2, "dtype": "bf16", "async_tp_ms": {fused},
        "gemm_ms": {{"p10": 1.0, "median": 1.5, "p90": 2.0}}, "serial_ms": {{"p10": 2.0, "median": 2.5, "p90": 3.0}},
        "verified": true, "samples": 3}}"#
    )
    .replace('\n', "")
}

fn limit() -> Duration {
    AMPLE
}

#[test]
fn the_job_names_every_shape_once() {
    let job = job(&args(), 4).unwrap();
    let shapes: Vec<_> = job.cases.iter().map(|c| (c.op, c.n, c.k, c.ms.as_slice())).collect();
    assert_eq!(
        shapes,
        [("ag_gemm", 49152, 12288, [64, 512].as_slice()), ("gemm_rs", 12288, 49152, &[64, 512])]
    );
    let asked = |dtype| {
        let mut args = args();
        args.layers.types.dtype = dtype;
        args
    };
    let of = |dtype| {
        serde_json::to_value(super::job(&asked(dtype), 4).unwrap()).unwrap()["dtype"].clone()
    };
    assert_eq!([job.dtype.into(), of(DType::F16)], ["bf16", "fp16"]);
    let mut scaled = asked(DType::E4m3);
    let types = |args: &Args| super::job(args, 4).map(|job| (job.dtype, job.output, job.scales));
    let of_rows = ("e4m3.row:bf16".to_owned(), "bf16", "row".to_owned());
    assert_eq!(types(&scaled).unwrap(), of_rows);
    scaled.layers.types.scales = Some(Scales::Block);
    let error = types(&scaled).unwrap_err().to_string();
    assert!(error.contains("no scales of blocks: use --scales tensor or row"), "{error}");
    let error = format!("{:#}", super::job(&args(), 5).unwrap_err());
    assert!(error.contains("is not divisible by the world size 5"), "{error}");
    let mut unequal = args();
    unequal.layers.ms = Some("40".parse().unwrap());
    let error = format!("{:#}", super::job(&unequal, 5).unwrap_err());
    assert_eq!(
        error,
        "ag_gemm of gpt3: n = 49152 has no 5 equal parts of groups of 8, which the peers need"
    );
}

#[test]
fn rows_of_the_child_become_the_report_with_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let failed = row(512, r#"null, "why": "RuntimeError: no""#);
    let fused =
        row(64, r#"{"p10": 1.8, "median": 1.9, "p90": 2.1}, "late": {"gemm": 0, "async_tp": 2}"#);
    let text = format!(
        "cat > \"$out\" <<'END'\n{VERSIONS}\n{fused}\n{failed}\nEND\nenv > {}/env",
        folder.path().display()
    );
    let (versions, rows) = run(&python(folder.path(), &text), &small_job(), limit()).unwrap();
    assert_eq!((versions.torch.as_str(), versions.nccl.as_str()), ("2.11.0", "2.28.9"));
    assert_eq!(rows[0].async_tp_ms, Some(Times { p10: 1.8, median: 1.9, p90: 2.1 }));
    assert_eq!((rows[0].best(), rows[1].best()), (Some((1.9, "async-TP")), Some((2.5, "serial"))));
    assert_eq!((rows[1].async_tp_ms, rows[1].why.as_deref()), (None, Some("RuntimeError: no")));
    assert_eq!((rows[0].late.get("async_tp"), rows[1].late.len()), (Some(&2), 0));
    let environment = fs::read_to_string(folder.path().join("env")).unwrap();
    for wanted in ["NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"] {
        assert!(environment.lines().any(|l| l == wanted), "{wanted}");
    }

    let report = PeersReport {
        schema: PEERS_SCHEMA,
        origin: Origin::of_a_test("a device", 2, "flux-bench peers"),
        nccl: versions.nccl,
        torch: versions.torch,
        rows,
    };
    let path = folder.path().join("peers.json");
    crate::atomic_file::write_json(&path, &report).unwrap();
    assert_eq!(serde_json::from_slice::<PeersReport>(&fs::read(&path).unwrap()).unwrap(), report);
    let text = peers_table(&report);
    assert!(
        text.lines().any(|l| l.ends_with("RuntimeError: no")) && text.contains(" 1.900 "),
        "{text}"
    );
}

#[test]
fn a_child_that_hangs_is_ended_at_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let text = format!("printf '%s\\n' '{VERSIONS}' > \"$out\"; echo here >&2; sleep 1000");
    // It has said something by then.
    let limit = scaled(Duration::from_millis(500));
    let start = Instant::now();
    let error = run(&python(folder.path(), &text), &small_job(), limit).unwrap_err().to_string();
    assert_soon(start.elapsed(), Duration::from_secs(15));
    assert!(
        error.contains(&format!("0 rows of 2 done, took more than {} s", limit.as_secs_f64()))
            && error.contains("here"),
        "{error}"
    );
}

#[test]
fn what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let none = run("/no/such/python3".as_ref(), &small_job(), limit()).unwrap_err().to_string();
    assert!(
        none.contains("/no/such/python3 was not found: the peers need Python 3 with PyTorch"),
        "{none}"
    );
    let failing = python(folder.path(), "echo PyTorch cannot be imported >&2; exit 3");
    let error = run(&failing, &small_job(), limit()).unwrap_err().to_string();
    assert!(error.contains("exit status: 3:\nPyTorch cannot be imported"), "{error}");
    let short = python(folder.path(), &format!("printf '%s\\n' '{VERSIONS}' > \"$out\""));
    let error = run(&short, &small_job(), limit()).unwrap_err().to_string();
    assert!(error.contains("wrote 0 rows of 2"), "{error}");
}

/// The real script, in a Python that is told that there is no PyTorch.
#[test]
fn the_script_says_that_there_is_no_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    let text = "exec python3 -c 'import runpy, sys; sys.modules[\"torch\"] = None; sys.argv = \
                sys.argv[1:]; runpy.run_path(sys.argv[0], run_name=\"__main__\")' \"$@\"";
    let error = run(&python(folder.path(), text), &small_job(), limit()).unwrap_err().to_string();
    assert!(error.contains("exit status: 3:\nPyTorch cannot be imported"), "{error}");
}

/// Of the real script, which has it without PyTorch.
#[test]
fn the_script_knows_the_types_that_it_is_asked_for() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/async_tp.py");
    let print =
        r#"import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])["DTYPES"]))"#;
    let said = Command::new("python3").args(["-B", "-c", print, script]).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let known: BTreeMap<String, (String, f64)> = serde_json::from_slice(&said.stdout).unwrap();
    let types = [(DType::Bf16, "bfloat16"), (DType::F16, "float16")];
    let expected = types
        .map(|(dtype, name)| (dtype.name().to_owned(), (name.to_owned(), dtype.unit_roundoff())));
    assert_eq!(known, BTreeMap::from(expected));
}

/// Of the real script: such a call would end one rank, and leave the others waiting.
#[test]
fn shards_whose_scales_are_not_aligned_are_left_out() {
    const CHECKS: &str = r#"
import itertools, json, runpy, sys, types
misaligned = runpy.run_path(sys.argv[1])["Bench"].misaligned
def left_out(op, scales, m):
    bench = types.SimpleNamespace(world=2, job={"scales": scales})
    return misaligned(bench, {"op": op}, m) is not None
cases = itertools.product(("ag_gemm", "gemm_rs"), ("row", "tensor"), (8, 12))
print(json.dumps([left_out(*case) for case in cases]))
"#;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/async_tp.py");
    let said = Command::new("python3").args(["-B", "-c", CHECKS, script]).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let left_out: Vec<bool> = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(left_out, [false, true, false, false, false, false, false, false]);
}

/// Of the real script, which makes it without PyTorch.
#[test]
fn the_schedule_gives_every_call_another_operand_set_and_every_contender_all_of_them() {
    const CHECKS: &str = r#"
import json, runpy, sys
script = runpy.run_path(sys.argv[1])
print(json.dumps([[script["schedule"](contenders, 36) for contenders in (2, 3)], script["SETS"]]))
"#;
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/async_tp.py");
    let said = Command::new("python3").args(["-B", "-c", CHECKS, script]).output().unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let (schedules, sets): (Vec<Vec<Vec<[usize; 2]>>>, usize) =
        serde_json::from_slice(&said.stdout).unwrap();
    for (rounds, contenders) in schedules.iter().zip([2, 3]) {
        let calls: Vec<[usize; 2]> = rounds.iter().flatten().copied().collect();
        assert_eq!((rounds.len(), calls.len()), (36, 36 * contenders));
        assert!(calls.windows(2).all(|pair| pair[0][1] != pair[1][1]), "{calls:?}");
        for contender in 0..contenders {
            assert!(
                rounds
                    .iter()
                    .all(|round| round.iter().filter(|turn| turn[0] == contender).count() == 1)
            );
            for set in 0..sets {
                let taken = calls.iter().filter(|&&turn| turn == [contender, set]).count();
                assert_eq!(taken, 36 / sets, "{contender} of {contenders} on set {set}");
            }
            for other in (0..contenders).filter(|&other| other != contender) {
                let after = calls
                    .windows(2)
                    .filter(|pair| pair[0][0] == other && pair[1][0] == contender)
                    .count();
                assert!(after >= 12, "{contender} of {contenders} follows {other} {after} times");
            }
        }
    }
}
