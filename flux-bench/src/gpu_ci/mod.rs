//! What `cargo xtask dist` carries to a GPU host, run there: doctor, every GPU test binary, soak and a quick benchmark.
//!
//! Invariant: every step runs, however the ones before it ended, each with a time limit of its own; one failure fails the whole.

mod step;

pub use step::{Outcome, Step};

use crate::atomic_file;
use crate::{limited, out, report};
use anyhow::Context;
use flux_transport::Select;
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Arguments of `flux-bench gpu-ci`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The folder that `cargo xtask dist` built: this program, `tests/`, `cubins/`
    #[arg(long, value_name = "DIR")]
    pub dist: PathBuf,
    /// Seconds after which a step is killed
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    pub limit: u64,
    /// Run only the steps whose names contain this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Ranks of soak and benchmark: as many as there are GPUs where it is left out
    #[arg(long)]
    pub tp: Option<u32>,
    /// Where summary, logs and the benchmark's figures go: the folder itself where it is left out
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// What `gpu-ci.json` holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Version of the file's form.
    pub schema: u32,
    /// Commit of the code.
    pub commit: String,
    /// When the run ended, UTC.
    pub date: String,
    /// Whether every step passed.
    pub passed: bool,
    /// The steps, in the order in which they ran.
    pub steps: Vec<Step>,
}

/// Runs the steps, prints the summary, writes `gpu-ci.json`, and says whether all passed.
///
/// # Errors
/// No GPU: tests that skip themselves would pass.
pub fn run(args: &Args) -> anyhow::Result<bool> {
    flux_transport::cuda::available().context("gpu-ci checks GPUs")?;
    check(args, crate::machine::gpu_count())
}

fn check(args: &Args, gpus: u32) -> anyhow::Result<bool> {
    let out = args.out.as_ref().unwrap_or(&args.dist);
    let logs = out.join("logs");
    std::fs::create_dir_all(&logs)?;
    let wanted = |name: &str| args.only.as_deref().is_none_or(|only| name.contains(only));
    let pytorch = gpus > 1 && has_pytorch(OsStr::new("python3"), LOOK, &logs.join("pytorch.log"));
    let mut steps = Vec::new();
    for (name, command) in plan(args, out, gpus, pytorch)?.into_iter().filter(|(name, _)| wanted(name)) {
        out::note(&format!("gpu-ci: {name}"));
        let limit = if name == FAULTS { args.limit.max(FAULTS_LIMIT) } else { args.limit };
        let step = Step::run(&name, command, Duration::from_secs(limit), &logs.join(format!("{name}.log")));
        out::note(&format!("gpu-ci: {name}: {:?} after {:.1} s {}", step.outcome, step.seconds, step.status));
        steps.push(step);
    }
    let passed = !steps.is_empty() && steps.iter().all(|s| s.outcome == Outcome::Passed);
    let summary = Summary { schema: report::SCHEMA, commit: report::commit().to_owned(), date: report::now(), passed, steps };
    atomic_file::write_json(&out.join("gpu-ci.json"), &summary)?;
    out::print(&text(&summary));
    Ok(passed)
}

/// The step of the fault suite, whose 80 processes each come to their device anew, and its least limit in seconds.
const FAULTS: &str = "faults";
const FAULTS_LIMIT: u64 = 570;

/// The steps' names and command lines.
fn plan(args: &Args, out: &Path, gpus: u32, pytorch: bool) -> anyhow::Result<Vec<(String, Command)>> {
    let program = |words: &[&str]| {
        let mut command = command(args, args.dist.join("flux-bench").as_os_str());
        // Behind the subcommand: the last word may be an option that waits for its value.
        let (subcommand, options) = words.split_at(1);
        command.args(subcommand);
        if let Some(tp) = args.tp {
            command.args(["--tp", &tp.to_string()]);
        }
        command.args(options);
        command
    };
    let mut steps = vec![("doctor".to_owned(), command(args, args.dist.join("flux-bench").as_os_str()))];
    steps[0].1.arg("doctor");
    let mut tests: Vec<PathBuf> = std::fs::read_dir(args.dist.join("tests"))?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
    tests.sort();
    for test in tests {
        let name = test.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut test = command(args, test.as_os_str());
        test.args(["--test-threads=1", "--nocapture"]);
        steps.push((name, test));
    }
    let example = args.dist.join("tp_mlp");
    steps.push(("tp_mlp-threads".to_owned(), command(args, example.as_os_str())));
    let mut launch = command(args, args.dist.join("flux-bench").as_os_str());
    launch.args(["launch", "--ranks", &gpus.to_string(), "--"]).arg(&example);
    steps.push(("tp_mlp-processes".to_owned(), launch));
    let kernel_tests = args.dist.join("tests/gpu_fused_gemm");
    let sanitizer = std::env::var_os("PATH").and_then(|path| find("compute-sanitizer", &path));
    if let Some(sanitizer) = sanitizer.filter(|_| kernel_tests.exists()) {
        let mut memcheck = command(args, sanitizer.as_os_str());
        memcheck.args(["--tool", "memcheck", "--error-exitcode", "1"]).arg(kernel_tests);
        // Tests whose ranks await each other cannot run: the tool lets one kernel run at a time.
        memcheck.args(["--test-threads=1", "alone"]);
        steps.push(("memcheck".to_owned(), memcheck));
    }
    steps.push(("soak-threads".to_owned(), program(&["soak", "--quick"])));
    steps.push(("soak-processes".to_owned(), program(&["soak", "--quick", "--processes"])));
    // 20 seconds.
    steps.push(("soak-random".to_owned(), program(&["soak", "--random", "0.34"])));
    if matches!(gpus, 1 | 2 | 4) && args.tp.is_none() {
        // A world of 8 on fewer GPUs.
        steps.push(("soak-shared".to_owned(), program(&["soak", "--quick", "--ranks-per-gpu", &(8 / gpus).to_string()])));
    }
    if gpus > 1 {
        for transport in [Select::Nccl, Select::Pcie].map(Select::name) {
            let soak = ["soak", "--quick", "--transport", transport, "--processes"];
            steps.push((format!("soak-{transport}-threads"), program(&soak[..4])));
            steps.push((format!("soak-{transport}-processes"), program(&soak)));
        }
        if gpus.is_multiple_of(2) {
            let soak = ["soak", "--quick", "--transport", Select::Mixed.name(), "--nodes", "2", "--processes"];
            steps.push(("soak-mixed-threads".to_owned(), program(&soak[..6])));
            steps.push(("soak-mixed-processes".to_owned(), program(&soak)));
            if gpus == 2 && args.tp.is_none() {
                // Two ranks of a node on each GPU.
                let mut shared = program(&soak[..6]);
                shared.args(["--ranks-per-gpu", "2"]).envs(QUEUES);
                steps.push(("soak-mixed-shared".to_owned(), shared));
            }
        }
        let mut links = command(args, args.dist.join("flux-bench").as_os_str());
        links.args(["links", "--json"]).arg(out.join("links.json"));
        steps.push(("links".to_owned(), links));
        let ranks = args.tp.unwrap_or(gpus).to_string();
        let faults = |transport: Select, words: &[&str]| {
            let mut faults = command(args, args.dist.join("flux-bench").as_os_str());
            faults.args(["faults", "--transport", transport.name(), "--ranks", &ranks]).args(words);
            faults
        };
        steps.push((FAULTS.to_owned(), faults(Select::NvLink, &[])));
        for transport in [Select::Pcie, Select::Nccl] {
            let few = ["--kills", "5", "--stops", "4", "--missing", "2"];
            steps.push((format!("{FAULTS}-{transport}"), faults(transport, &few)));
        }
    }
    let mut bench = program(&["bench", "--ms", "1024,8192", "--samples", "25", "--json"]);
    bench.arg(out.join("bench.json"));
    steps.push(("bench".to_owned(), bench));
    let mut fp16 = program(&["bench", "--dtype", "fp16", "--shapes", "llama70b", "--ms", "1024", "--samples", "10", "--json"]);
    fp16.arg(out.join("bench-fp16.json"));
    steps.push(("bench-fp16".to_owned(), fp16));
    let as_processes = ["bench", "--ms", "1024", "--samples", "10", "--processes"];
    steps.push(("bench-processes".to_owned(), program(&as_processes)));
    if gpus > 1 {
        let apart = ["--hosts", "2", "--transport", Select::Nccl.name(), "--json"];
        let mut hosts = program(&[as_processes.as_slice(), &apart].concat());
        hosts.arg(out.join("bench-hosts.json"));
        steps.push(("bench-hosts".to_owned(), hosts));
    }
    steps.push(("first-call".to_owned(), program(&["first-call", "--ms", "512,8192", "--shapes", "llama70b"])));
    // Of a world of 8, whatever there is.
    let mut core = command(args, args.dist.join("flux-bench").as_os_str());
    core.args(["core", "--shapes", "llama70b", "--ms", "1024", "--samples", "10", "--json"]).arg(out.join("core.json"));
    steps.push(("core".to_owned(), core));
    if pytorch {
        let mut peers = program(&["peers", "--ms", "512", "--samples", "10", "--limit", "150", "--json"]);
        peers.arg(out.join("peers.json"));
        steps.push(("peers".to_owned(), peers));
    }
    Ok(steps)
}

/// Enough queues for the streams of several ranks on one device, of kernels and of copies: where two share one, a wait in it holds up what another rank
/// launches.
const QUEUES: [(&str, &str); 2] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "32")];

/// How long Python may look for PyTorch.
const LOOK: Duration = Duration::from_secs(30);

/// Whether Python would find PyTorch, which is slow to import, within the limit.
fn has_pytorch(python: &OsStr, limit: Duration, log: &Path) -> bool {
    let script = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)";
    let found = limited::run(Command::new(python).args(["-c", script]), limit, log);
    found.is_ok_and(|ended| ended.is_some_and(|status| status.success()))
}

/// The first program of this name in the folders of `path`.
fn find(name: &str, path: &OsStr) -> Option<PathBuf> {
    std::env::split_paths(path).map(|folder| folder.join(name)).find(|program| program.is_file())
}

fn command(args: &Args, program: &OsStr) -> Command {
    let mut command = Command::new(program);
    command.env("FLUX_CUBIN_DIR", args.dist.join("cubins")).env("NCCL_NVLS_ENABLE", "0").env("RUST_BACKTRACE", "1");
    command.env("FLUX_PROBE", args.dist.join("flux-probe"));
    command
}

/// The summary as a person reads it: a line a step, and below it the last output of each that did not pass.
fn text(summary: &Summary) -> String {
    let mut text = String::new();
    let width = summary.steps.iter().map(|s| s.name.len()).max().unwrap_or(0);
    for step in &summary.steps {
        let word = match step.outcome {
            Outcome::Passed => "passed",
            Outcome::Failed => "FAILED",
            Outcome::TimedOut => "TIMED OUT",
        };
        let skipped = if step.skipped.is_empty() { String::new() } else { format!("{} skipped", step.skipped.len()) };
        let _infallible = writeln!(text, "{:<width$}  {word:<9}  {:>7.1} s  {}{skipped}", step.name, step.seconds, step.status);
    }
    for step in summary.steps.iter().filter(|s| s.outcome != Outcome::Passed) {
        let _infallible = writeln!(text, "\n== {}: {}\n{}", step.name, step.command, step.output_tail.join("\n"));
    }
    let mut skipped: Vec<&str> = summary.steps.iter().flat_map(|s| s.skipped.iter().map(String::as_str)).collect();
    let (steps, tests) = (summary.steps.len(), skipped.len());
    skipped.dedup();
    for why in skipped {
        let _infallible = write!(text, "\nskipped: {why}");
    }
    let failed = summary.steps.iter().filter(|s| s.outcome != Outcome::Passed).count();
    let _infallible = writeln!(text, "\n{steps} steps, {failed} not passed, {tests} tests skipped, commit {}", summary.commit);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// Written by another process: one that a test thread forks meanwhile would keep the file open, and the system runs no open file.
    fn script(path: &Path, text: &str) {
        let write = format!("printf '#!/bin/sh\\n%s\\n' '{text}' > '{0}' && chmod +x '{0}'", path.display());
        assert!(Command::new("sh").args(["-c", &write]).status().unwrap().success());
    }

    fn dist() -> (tempfile::TempDir, Args) {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("tests")).unwrap();
        script(&folder.path().join("flux-bench"), "echo $NCCL_NVLS_ENABLE $@");
        script(&folder.path().join("tp_mlp"), "exit 0");
        script(&folder.path().join("tests/gpu_good"), "exit 0");
        let args = Args { dist: folder.path().to_owned(), limit: 20, only: None, tp: None, out: None };
        (folder, args)
    }

    #[test]
    fn a_failing_test_fails_the_whole_and_the_steps_after_it_still_run() {
        let (folder, args) = dist();
        assert!(check(&args, 2).unwrap());
        script(&folder.path().join("tests/gpu_bad"), "echo why; exit 1");
        assert!(!check(&args, 2).unwrap());
        let json = std::fs::read_to_string(folder.path().join("gpu-ci.json")).unwrap();
        let summary: Summary = serde_json::from_str(&json).unwrap();
        let names: Vec<&str> = summary.steps.iter().map(|s| s.name.as_str()).filter(|&name| name != "peers").collect();
        let examples = ["tp_mlp-threads", "tp_mlp-processes"];
        let soaks = ["soak-threads", "soak-processes", "soak-random", "soak-shared"];
        let by_name = ["soak-nccl-threads", "soak-nccl-processes", "soak-pcie-threads", "soak-pcie-processes"];
        let mixed = ["soak-mixed-threads", "soak-mixed-processes", "soak-mixed-shared"];
        let measures = ["links", "faults", "faults-pcie", "faults-nccl"];
        let times = ["bench", "bench-fp16", "bench-processes", "bench-hosts", "first-call", "core"];
        assert_eq!(names, [["doctor", "gpu_bad", "gpu_good"].as_slice(), &examples, &soaks, &by_name, &mixed, &measures, &times].concat());
        assert_eq!(summary.steps.iter().filter(|s| s.outcome != Outcome::Passed).count(), 1);
        assert!(text(&summary).contains("\nwhy\n"), "{}", text(&summary));
        assert_eq!(summary.steps[0].output_tail, ["0 doctor"]);
    }

    #[test]
    fn tests_that_were_skipped_are_counted_in_the_run_that_skips_them() {
        let (folder, args) = dist();
        let summary = || -> Summary { serde_json::from_slice(&std::fs::read(folder.path().join("gpu-ci.json")).unwrap()).unwrap() };
        script(&folder.path().join("tests/gpu_good"), r#"echo "gpu_good: no GPU" | tee -a "$FLUX_SKIPPED" >> "$FLUX_SKIPPED""#);
        for _ in 0..2 {
            assert!(check(&Args { only: Some("gpu_good".into()), ..args.clone() }, 1).unwrap());
            assert_eq!(summary().steps[0].skipped, ["gpu_good: no GPU", "gpu_good: no GPU"]);
            let text = text(&summary());
            assert!(
                text.contains("2 skipped\n") && text.contains(" 0 not passed, 2 tests skipped, ") && text.matches(": no GPU").count() == 1,
                "{text}"
            );
        }
        script(&folder.path().join("tests/gpu_good"), "exit 0");
        assert!(check(&Args { only: Some("gpu_good".into()), ..args }, 1).unwrap());
        assert!(summary().steps[0].skipped.is_empty() && text(&summary()).contains(" 0 tests skipped, "));
    }

    #[test]
    fn every_step_of_this_program_is_a_command_that_it_takes() {
        let (folder, args) = dist();
        for (gpus, tp) in [1, 2, 3, 4, 8].into_iter().flat_map(|gpus| [None, Some(2)].map(|tp| (gpus, tp))) {
            let steps = plan(&Args { tp, ..args.clone() }, folder.path(), gpus, true).unwrap();
            let ours = steps.iter().filter(|(_, command)| command.get_program() == folder.path().join("flux-bench"));
            for (name, command) in ours {
                let words = std::iter::once(OsStr::new("flux-bench")).chain(command.get_args());
                let parsed = crate::cli::Cli::try_parse_from(words);
                assert!(parsed.is_ok(), "{name} of {gpus} GPUs, --tp {tp:?}: {}", parsed.unwrap_err());
            }
            let benches = steps.iter().filter(|(name, _)| name == "bench" && tp.is_some());
            assert!(
                benches.clone().all(|(_, bench)| bench.get_args().take(3).eq(["bench", "--tp", "2"]))
                    && tp.is_none_or(|_| benches.count() == 1)
            );
        }
    }

    #[test]
    fn a_python_that_does_not_end_has_no_pytorch() {
        let folder = tempfile::tempdir().unwrap();
        let (python, log) = (folder.path().join("python3"), folder.path().join("log"));
        script(&python, "sleep 1000");
        assert!(!has_pytorch(python.as_os_str(), Duration::from_millis(200), &log));
        script(&python, "exit 0");
        assert!(has_pytorch(python.as_os_str(), LOOK, &log));
    }

    #[test]
    fn a_filter_that_matches_nothing_is_no_success() {
        let (_folder, args) = dist();
        assert!(!check(&Args { only: Some("no such step".into()), ..args }, 2).unwrap());
    }
}
