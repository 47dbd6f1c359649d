//! The steps of a run, in order: names and command lines.
//!
//! Invariant: they follow from the folder, the arguments and the GPUs.

use super::{Args, find};
use flux_transport::Select;
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

/// Tests that also run as processes of a launch on shared GPUs, and what is skipped there as too
/// slow.
const LAUNCHED: [(&str, &[&str]); 5] = [
    ("gpu_leaks", &[]),
    ("gpu_messages", &[]),
    ("gpu_mixed", &[]),
    ("gpu_nvlink", &["--skip", "ten_thousand_calls_in_a_row"]),
    ("gpu_pcie", &["--skip", "a_thousand_calls_in_a_row"]),
];

/// Queues for the streams of several ranks on a device: a wait in a shared queue blocks other
/// ranks.
const QUEUES: [(&str, &str); 2] =
    [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "32")];

/// The steps' names and command lines. `out`: where figures go.
pub(super) fn steps(
    args: &Args,
    out: &Path,
    gpus: u32,
    pytorch: bool,
) -> anyhow::Result<Vec<(String, Command)>> {
    let mut list = StepList { args, out, gpus, steps: Vec::new() };
    list.run("doctor", |doctor| doctor.arg("doctor"));
    list.run("compile", |compile| compile.args(["lab", "compile"]));
    list.tests()?;
    list.soaks();
    // A world of 8 on fewer GPUs.
    let per_gpu = (matches!(gpus, 1 | 2 | 4) && args.tp.is_none()).then(|| (8 / gpus).to_string());
    if let Some(per_gpu) = &per_gpu {
        list.shared(per_gpu);
    }
    if gpus > 1 {
        list.by_transport();
        list.run("links", |links| {
            links.args(["lab", "links", "--json"]).arg(out.join("links.json"))
        });
    }
    list.faults("", args.tp.unwrap_or(gpus), "1");
    if let Some(per_gpu) = &per_gpu {
        list.faults("-shared", 8, per_gpu);
    }
    list.times(pytorch);
    Ok(list.steps)
}

struct StepList<'a> {
    args: &'a Args,
    out: &'a Path,
    gpus: u32,
    steps: Vec<(String, Command)>,
}

impl StepList<'_> {
    fn add(&mut self, name: impl Into<String>, command: Command) {
        self.steps.push((name.into(), command));
    }

    fn command(&self, program: &OsStr) -> Command {
        let mut command = Command::new(program);
        command
            .env("FLUX_CUBIN_DIR", self.args.dist.join("cubins"))
            .env("NCCL_NVLS_ENABLE", "0")
            .env("RUST_BACKTRACE", "1");
        command.env("FLUX_PROBE", self.args.dist.join("flux-probe"));
        command
    }

    /// A step of this program.
    fn run(&mut self, name: impl Into<String>, words: impl FnOnce(&mut Command) -> &mut Command) {
        let mut command = self.command(self.args.dist.join("flux-bench").as_os_str());
        words(&mut command);
        self.add(name, command);
    }

    /// A step of this program that takes the number of ranks.
    fn ranks(
        &mut self,
        name: impl Into<String>,
        words: &[&str],
        more: impl FnOnce(&mut Command) -> &mut Command,
    ) {
        let tp = self.args.tp;
        self.run(name, |command| {
            // Behind the subcommand: the last word may be an option that waits for its value.
            let (subcommand, options) = words.split_at(if words[0] == "lab" { 2 } else { 1 });
            command.args(subcommand);
            if let Some(tp) = tp {
                command.args(["--tp", &tp.to_string()]);
            }
            more(command.args(options))
        });
    }

    /// The same of words alone.
    fn ranked(&mut self, name: impl Into<String>, words: &[&str]) {
        self.ranks(name, words, |command| command);
    }

    fn tests(&mut self) -> anyhow::Result<()> {
        let tests = self.args.dist.join("tests");
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(&tests)?.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>()?;
        paths.sort();
        for path in paths {
            let mut add = |name: &str, words: &[&str]| {
                let mut test = self.command(path.as_os_str());
                test.args(["--test-threads=1", "--nocapture"]).args(words);
                self.add(name, test);
            };
            match &*path.file_name().unwrap_or_default().to_string_lossy() {
                OPS => MODULES.iter().for_each(|module| add(module, &[&format!("{module}::")])),
                name => add(name, &[]),
            }
        }
        let (example, gpus) = (self.args.dist.join("tp_mlp"), self.gpus.to_string());
        self.add("tp_mlp-threads", self.command(example.as_os_str()));
        self.run("tp_mlp-processes", |launch| {
            launch.args(["launch", "--ranks", &gpus, "--"]).arg(&example)
        });
        let kernel_tests = tests.join("gpu_fused_gemm");
        let sanitizer = std::env::var_os("PATH").and_then(|path| find("compute-sanitizer", &path));
        if let Some(sanitizer) = sanitizer.filter(|_| kernel_tests.exists()) {
            let mut memcheck = self.command(sanitizer.as_os_str());
            memcheck.args(["--tool", "memcheck", "--error-exitcode", "1"]).arg(kernel_tests);
            // The tool runs one kernel at a time, so tests whose ranks await each other cannot run.
            memcheck.args(["--test-threads=1", "alone"]);
            self.add("memcheck", memcheck);
        }
        Ok(())
    }

    fn soaks(&mut self) {
        self.ranked("soak-threads", &["lab", "soak", "--quick"]);
        self.ranked("soak-processes", &["lab", "soak", "--quick", "--processes"]);
        // 20 seconds.
        self.ranked("soak-random", &["lab", "soak", "--random", "0.34"]);
    }

    /// `per_gpu` ranks on each GPU, as threads, which divide it, and as processes, which take
    /// turns.
    fn shared(&mut self, per_gpu: &str) {
        let soak = ["lab", "soak", "--quick", "--ranks-per-gpu", per_gpu];
        let processes =
            |words: &[&'static str]| [&soak, ["--processes"].as_slice(), words].concat();
        self.ranked("soak-shared", &soak);
        for transport in [Select::NvLink, Select::Pcie, Select::Nccl].map(Select::name) {
            self.ranked(
                format!("soak-{transport}-shared"),
                &processes(&["--transport", transport]),
            );
        }
        self.ranked(
            "soak-mixed-processes-shared",
            &processes(&["--transport", Select::Mixed.name(), "--nodes", "2"]),
        );
        if self.gpus == 2 {
            // Two threads of a node on each GPU.
            let soak = [
                "lab",
                "soak",
                "--quick",
                "--transport",
                Select::Mixed.name(),
                "--nodes",
                "2",
                "--ranks-per-gpu",
                "2",
            ];
            self.ranks("soak-mixed-shared", &soak, |soak| soak.envs(QUEUES));
        }
        let tests = self.args.dist.join("tests");
        for (name, words) in LAUNCHED {
            let module = MODULES.contains(&name).then(|| format!("{name}::"));
            let test = tests.join(if module.is_some() { OPS } else { name });
            if !test.exists() {
                continue;
            }
            self.run(format!("{name}-shared"), |launch| {
                launch.args(["launch", "--ranks", "4", "--sharing-devices", "--"]).arg(test);
                launch.args(["--test-threads=1", "--nocapture"]).args(module).args(words)
            });
        }
    }

    /// Every transport between GPUs of which each rank has its own.
    fn by_transport(&mut self) {
        for transport in [Select::Nccl, Select::Pcie].map(Select::name) {
            let soak = ["lab", "soak", "--quick", "--transport", transport, "--processes"];
            self.ranked(format!("soak-{transport}-threads"), &soak[..5]);
            self.ranked(format!("soak-{transport}-processes"), &soak);
        }
        if self.gpus.is_multiple_of(2) {
            let soak = [
                "lab",
                "soak",
                "--quick",
                "--transport",
                Select::Mixed.name(),
                "--nodes",
                "2",
                "--processes",
            ];
            self.ranked("soak-mixed-threads", &soak[..7]);
            self.ranked("soak-mixed-processes", &soak);
        }
    }

    /// The fault suite over every transport, all of it over peer memory.
    fn faults(&mut self, suffix: &str, ranks: u32, per_gpu: &str) {
        if ranks < 2 {
            return;
        }
        let mut faults = |name: &str, transport: Select, words: &[&str]| {
            self.run(format!("{name}{suffix}"), |faults| {
                faults
                    .args([
                        "lab",
                        "faults",
                        "--transport",
                        transport.name(),
                        "--ranks",
                        &ranks.to_string(),
                        "--ranks-per-gpu",
                        per_gpu,
                    ])
                    .args(words)
            });
        };
        let few = ["--kills", "5", "--stops", "4", "--missing", "2"];
        // Connecting ranks that take turns takes NCCL longer than the usual deadline.
        let slow: &[&str] = if per_gpu == "1" { &[] } else { &["--deadline-ms", "8000"] };
        let slow = [few.as_slice(), slow].concat();
        faults(FAULTS, Select::NvLink, &[]);
        faults("faults-pcie", Select::Pcie, &few);
        faults("faults-nccl", Select::Nccl, &slow);
        if ranks > 2 && ranks.is_multiple_of(2) {
            faults("faults-mixed", Select::Mixed, &[slow.as_slice(), &["--nodes", "2"]].concat());
        }
    }

    fn times(&mut self, pytorch: bool) {
        let json = |file: &str| self.out.join(file);
        let [bench, fp16, hosts, core, peers] =
            ["bench", "bench-fp16", "bench-hosts", "core", "peers"]
                .map(|name| json(&format!("{name}.json")));
        self.ranks(
            "bench",
            &["bench", "--ms", "1024,8192", "--samples", "25", "--json"],
            |command| command.arg(bench),
        );
        let words = [
            "bench",
            "--dtype",
            "fp16",
            "--shapes",
            "llama70b",
            "--ms",
            "1024",
            "--samples",
            "10",
            "--json",
        ];
        self.ranks("bench-fp16", &words, |command| command.arg(fp16));
        let as_processes = ["bench", "--ms", "1024", "--samples", "10", "--processes"];
        self.ranked("bench-processes", &as_processes);
        if self.gpus > 1 {
            let apart = ["--hosts", "2", "--transport", Select::Nccl.name(), "--json"];
            self.ranks("bench-hosts", &[as_processes.as_slice(), &apart].concat(), |command| {
                command.arg(hosts)
            });
        }
        self.ranked(
            "first-call",
            &["lab", "first-call", "--ms", "512,8192", "--shapes", "llama70b"],
        );
        // Of a world of 8, whatever there is.
        self.run("core", |command| {
            command
                .args([
                    "lab",
                    "core",
                    "--shapes",
                    "llama70b",
                    "--ms",
                    "1024",
                    "--samples",
                    "10",
                    "--json",
                ])
                .arg(core)
        });
        if pytorch {
            let words =
                ["lab", "peers", "--ms", "512", "--samples", "10", "--limit", "150", "--json"];
            self.ranks("peers", &words, |command| command.arg(peers));
        }
    }
}
