//! The steps of a run, in order: names and command lines.
//!
//! Invariant: they follow from the folder, the arguments and the GPUs.

use super::{Args, find};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the fault suite's steps, and their least limit in seconds: the longest starts 80
/// processes.
pub(super) const FAULTS: &str = "faults";
pub(super) const FAULTS_LIMIT: u64 = 570;

/// The test binary whose modules are steps of their own.
const OPS: &str = "ops";
/// Its modules on GPUs.
pub(super) const MODULES: [&str; 6] =
    ["gpu_launches", "gpu_messages", "gpu_mixed", "gpu_nvlink", "gpu_pcie", "gpu_tune"];

/// A step of this program: its name, its command line, and whether a machine has it.
type Line = (&'static str, &'static str, Has);
type Has = fn(&Machine) -> bool;

/// The steps before all tests. In the words of a line:
///
/// - `NAME=VALUE` before the command is a variable.
/// - `TP` is `--tp` with the number of ranks that is asked for, or nothing.
/// - `RANKS` is that number, or the number of GPUs.
/// - `PER` is the number of ranks on a GPU with which a world of 8 is on all of them.
/// - A word of [`SHORT`] is what it stands for.
/// - `FILE.json` lies where figures go.
/// - `tests/NAME` is a test that was packed; without it there is no such step.
const FIRST: [Line; 2] = [("doctor", "doctor", ALWAYS), ("compile", "lab compile", ALWAYS)];

/// Words that stand for several.
const SHORT: [(&str, &str); 5] = [
    ("FEW", "--kills 5 --stops 4 --missing 2"),
    ("IN_TURN", "--test-threads=1 --nocapture"),
    ("LAUNCH", "launch --ranks 4 --sharing-devices --"),
    ("QUEUES", "CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_DEVICE_MAX_COPY_CONNECTIONS=32"),
    ("SHARED", "--ranks-per-gpu PER"),
];

/// The steps behind the tests.
#[rustfmt::skip]
const STEPS: [Line; 42] = [
    ("soak-threads", "lab soak TP --quick", ALWAYS),
    ("soak-processes", "lab soak TP --quick --processes", ALWAYS),
    // 20 seconds.
    ("soak-random", "lab soak TP --random 0.34", ALWAYS),
    // Several ranks on each GPU, as threads, which divide it, and as processes, which take turns.
    // Threads have queues for the streams of all: a wait in a shared queue blocks other ranks.
    ("soak-shared", "QUEUES lab soak --quick SHARED", SHARED),
    ("soak-nvlink-shared", "lab soak --quick SHARED --processes --transport nvlink", SHARED),
    ("soak-pcie-shared", "lab soak --quick SHARED --processes --transport pcie", SHARED),
    ("soak-nccl-shared", "lab soak --quick SHARED --processes --transport nccl", SHARED),
    ("soak-mixed-processes-shared",
     "lab soak --quick SHARED --processes --transport mixed --nodes 2", SHARED),
    // Two threads of a node on each GPU.
    ("soak-mixed-shared",
     "QUEUES lab soak --quick --transport mixed --nodes 2 --ranks-per-gpu 2", SHARED_PAIR),
    // Tests as processes of a launch, without those that are too slow there.
    ("gpu_leaks-shared", "LAUNCH tests/gpu_leaks IN_TURN", SHARED),
    ("gpu_messages-shared", "LAUNCH tests/ops gpu_messages:: IN_TURN", SHARED),
    ("gpu_mixed-shared", "LAUNCH tests/ops gpu_mixed:: IN_TURN", SHARED),
    ("gpu_nvlink-shared",
     "LAUNCH tests/ops gpu_nvlink:: IN_TURN --skip ten_thousand_calls_in_a_row", SHARED),
    ("gpu_pcie-shared",
     "LAUNCH tests/ops gpu_pcie:: IN_TURN --skip a_thousand_calls_in_a_row", SHARED),
    // Every transport between GPUs of which each rank has its own.
    ("soak-nccl-threads", "lab soak TP --quick --transport nccl", SEVERAL),
    ("soak-nccl-processes", "lab soak TP --quick --transport nccl --processes", SEVERAL),
    ("soak-pcie-threads", "lab soak TP --quick --transport pcie", SEVERAL),
    ("soak-pcie-processes", "lab soak TP --quick --transport pcie --processes", SEVERAL),
    ("soak-mixed-threads", "lab soak TP --quick --transport mixed --nodes 2", EVEN),
    ("soak-mixed-processes", "lab soak TP --quick --transport mixed --nodes 2 --processes", EVEN),
    ("links", "lab links --json links.json", SEVERAL),
    // The fault suite over every transport, all of it over peer memory.
    ("faults", "lab faults --transport nvlink --ranks RANKS", FAILS),
    ("faults-pcie", "lab faults --transport pcie --ranks RANKS FEW", FAILS),
    ("faults-nccl", "lab faults --transport nccl --ranks RANKS FEW", FAILS),
    ("faults-mixed", "lab faults --transport mixed --ranks RANKS FEW --nodes 2", FAILS_APART),
    ("faults-shared", "lab faults --transport nvlink --ranks 8 SHARED", SHARED),
    ("faults-pcie-shared", "lab faults --transport pcie --ranks 8 SHARED FEW", SHARED),
    // Connecting ranks that take turns takes NCCL longer than the usual deadline.
    ("faults-nccl-shared",
     "lab faults --transport nccl --ranks 8 SHARED FEW --deadline-ms 8000", SHARED),
    ("faults-mixed-shared",
     "lab faults --transport mixed --ranks 8 SHARED FEW --deadline-ms 8000 --nodes 2", SHARED),
    ("bench", "bench TP --ms 1024,8192 --samples 25 --json bench.json", ALWAYS),
    ("bench-fp16",
     "bench TP --dtype fp16 --shapes llama70b --ms 1024 --samples 10 \
      --json bench-fp16.json", ALWAYS),
    // Scales that the serial path gathers, and those that it has to put in order, too.
    ("bench-fp8-row",
     "bench TP --dtype fp8 --shapes llama70b --ops ag_gemm,gemm_rs,gemm_ar --ms 1024 \
      --samples 10", ALWAYS),
    ("bench-fp8-block",
     "bench TP --dtype fp8 --scales block --shapes llama70b --ops ag_gemm,gemm_rs,gemm_ar \
      --ms 1024 --samples 10", ALWAYS),
    // Every part of an epilogue, and rows that the serial path pads.
    ("bench-swiglu",
     "bench TP --shapes llama70b --ops ag_gemm,gemm_rs,gemm_ar --ms 1001 --samples 10 \
      --bias --residual --norm 1e-6 --gates swiglu", ALWAYS),
    ("bench-geglu",
     "bench TP --shapes llama70b --ops ag_gemm,gemm_rs --ms 1001 --samples 10 \
      --dtype fp16 --residual --gates geglu_interleaved", ALWAYS),
    ("bench-silu",
     "bench TP --shapes llama70b --ops ag_gemm,gemm_ar --ms 1001 --samples 10 \
      --bias --activation silu", ALWAYS),
    ("bench-processes", "bench TP --ms 1024 --samples 10 --processes", ALWAYS),
    ("bench-hosts",
     "bench TP --ms 1024 --samples 10 --processes --hosts 2 --transport nccl \
      --json bench-hosts.json", SEVERAL),
    ("first-call", "lab first-call TP --ms 512,8192 --shapes llama70b", ALWAYS),
    // Of a world of 8, whatever there is.
    ("core", "lab core --shapes llama70b --ms 1024 --samples 10 --json core.json", ALWAYS),
    ("peers", "lab peers TP --ms 512 --samples 10 --limit 150 --json peers.json", PYTORCH),
    ("peers-fp8", "lab peers TP --dtype fp8 --ms 16,512 --samples 10 --limit 150", PYTORCH),
];

/// What decides which steps there are.
struct Machine {
    gpus: u32,
    /// The number of ranks that is asked for.
    tp: Option<u32>,
    pytorch: bool,
}

impl Machine {
    /// Ranks of each GPU in a world of 8.
    fn per_gpu(&self) -> Option<u32> {
        (matches!(self.gpus, 1 | 2 | 4) && self.tp.is_none()).then(|| 8 / self.gpus)
    }

    fn ranks(&self) -> u32 {
        self.tp.unwrap_or(self.gpus)
    }
}

const ALWAYS: Has = |_| true;
const SHARED: Has = |machine| machine.per_gpu().is_some();
const SHARED_PAIR: Has = |machine| SHARED(machine) && machine.gpus == 2;
const SEVERAL: Has = |machine| machine.gpus > 1;
const EVEN: Has = |machine| SEVERAL(machine) && machine.gpus.is_multiple_of(2);
const FAILS: Has = |machine| machine.ranks() > 1;
const FAILS_APART: Has = |machine| machine.ranks() > 2 && machine.ranks().is_multiple_of(2);
const PYTORCH: Has = |machine| machine.pytorch;

/// The steps' names and command lines. `out`: where figures go.
pub(super) fn steps(
    args: &Args,
    out: &Path,
    gpus: u32,
    pytorch: bool,
) -> anyhow::Result<Vec<(String, Command)>> {
    let machine = Machine { gpus, tp: args.tp, pytorch };
    let list = StepList { args, out, machine };
    let mut steps: Vec<_> = FIRST.iter().filter_map(|line| list.step(line)).collect();
    steps.append(&mut list.tests()?);
    steps.extend(STEPS.iter().filter_map(|line| list.step(line)));
    Ok(steps)
}

struct StepList<'a> {
    args: &'a Args,
    out: &'a Path,
    machine: Machine,
}

impl StepList<'_> {
    fn command(&self, program: &OsStr) -> Command {
        let mut command = Command::new(program);
        command
            .env("FLUX_CUBIN_DIR", self.args.dist.join("cubins"))
            .env("NCCL_NVLS_ENABLE", "0")
            .env("RUST_BACKTRACE", "1");
        command.env("FLUX_PROBE", self.args.dist.join("flux-probe"));
        command
    }

    /// A step of this program, if the machine has it.
    fn step(&self, &(name, line, has): &Line) -> Option<(String, Command)> {
        if !has(&self.machine) {
            return None;
        }
        let mut command = self.command(self.args.dist.join("flux-bench").as_os_str());
        let long = |word| SHORT.iter().find(|(short, _)| *short == word).map_or(word, |of| of.1);
        for word in line.split_whitespace().flat_map(|word| long(word).split(' ')) {
            match word {
                "TP" => command
                    .args(self.machine.tp.iter().flat_map(|tp| ["--tp".into(), tp.to_string()])),
                "RANKS" => command.arg(self.machine.ranks().to_string()),
                "PER" => command.arg(self.machine.per_gpu()?.to_string()),
                _ if word.strip_suffix(".json").is_some() => command.arg(self.out.join(word)),
                _ if word.starts_with("tests/") => {
                    let test = self.args.dist.join(word);
                    if !test.exists() {
                        return None;
                    }
                    command.arg(test)
                }
                _ => match word.split_once('=').filter(|_| !word.starts_with('-')) {
                    Some((variable, value)) => command.env(variable, value),
                    None => command.arg(word),
                },
            };
        }
        Some((name.to_owned(), command))
    }

    /// The tests and examples that were packed.
    fn tests(&self) -> anyhow::Result<Vec<(String, Command)>> {
        let tests = self.args.dist.join("tests");
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(&tests)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        paths.sort();
        let mut steps = Vec::new();
        for path in paths {
            let mut add = |name: &str, words: &[&str]| {
                let mut test = self.command(path.as_os_str());
                test.args(["--test-threads=1", "--nocapture"]).args(words);
                steps.push((name.to_owned(), test));
            };
            match &*path.file_name().unwrap_or_default().to_string_lossy() {
                OPS => MODULES.iter().for_each(|module| add(module, &[&format!("{module}::")])),
                name => add(name, &[]),
            }
        }
        let example = self.args.dist.join("tp_mlp");
        steps.push(("tp_mlp-threads".to_owned(), self.command(example.as_os_str())));
        let mut launch = self.command(self.args.dist.join("flux-bench").as_os_str());
        launch.args(["launch", "--ranks", &self.machine.gpus.to_string(), "--"]).arg(&example);
        steps.push(("tp_mlp-processes".to_owned(), launch));
        let kernel_tests = tests.join("gpu_fused_gemm");
        let sanitizer = std::env::var_os("PATH").and_then(|path| find("compute-sanitizer", &path));
        if let Some(sanitizer) = sanitizer.filter(|_| kernel_tests.exists()) {
            let mut memcheck = self.command(sanitizer.as_os_str());
            memcheck.args(["--tool", "memcheck", "--error-exitcode", "1"]).arg(kernel_tests);
            // The tool runs one kernel at a time, so tests whose ranks await each other cannot run.
            memcheck.args(["--test-threads=1", "alone"]);
            steps.push(("memcheck".to_owned(), memcheck));
        }
        Ok(steps)
    }
}
