//! The command line.
//!
//! Invariant: the exit status is 0 only where everything was done, and found right where checked.

use crate::{
    bench, doctor, end, lab, launch, limited, out, page, run, show, simulate, trace, tune,
};
use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Benchmarks, verification and runs of flux.
#[derive(Debug, Parser)]
#[command(name = "flux-bench", version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Verify and measure the ops beside the unfused path
    Bench(bench::Args),
    /// Time the cost model's best plans of layers, and keep the fastest for later runs
    Tune(tune::Args),
    /// Run an op on operands from a safetensors file
    Run(run::Args),
    /// Start a program once for every rank, as processes of this machine
    Launch(launch::Args),
    /// Say what this machine has, which transports can work on it, and why others cannot
    Doctor(doctor::Args),
    /// Record when each phase of each tile of one call ended, on every rank
    Trace(trace::Args),
    /// Predict what the ops take, by a model of a machine that need not be there
    Simulate(simulate::Args),
    /// Show results that `bench --json` has written: as a table, as a picture
    Show(show::Args),
    /// Make one page of HTML of records, or of two records beside each other
    Report(page::Args),
    /// For maintainers: faults, soak, core, peers, links, first-call, compile, gpu-ci
    #[command(subcommand)]
    Lab(lab::Command),
}

/// Whether these words, the program's name first, are or begin a command line of this program.
///
/// # Errors
/// What `flux-bench` would print, unless only required arguments are missing.
pub fn check_words<'a>(words: impl Iterator<Item = &'a str>) -> Result<(), String> {
    match Cli::try_parse_from(words) {
        Err(error) if error.kind() != ErrorKind::MissingRequiredArgument => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Runs the command line.
pub fn main() -> ExitCode {
    tracing_subscriber::fmt().with_env_filter(filter()).with_writer(std::io::stderr).init();
    if let Err(error) = flux_transport::launch::hear_of_children() {
        tracing::warn!(%error, "how programs end that this one starts may not be known");
    }
    match act(Cli::parse().command).and_then(|code| out::end().map(|()| code)) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // The sender knows the reason, and clean-up is done.
            if let Some(signal) = limited::interrupted_by(&error) {
                end::by(signal);
            }
            end::say(&end::words(&error));
            // A failed thread may be left in the driver or in NCCL.
            end::now(1)
        }
    }
}

/// The filter of `FLUX_LOG`; the default where it is unset or cannot be read, which is reported.
fn filter() -> EnvFilter {
    const USUAL: &str = "warn";
    // A value that is not UTF-8 is no filter, but it is set.
    match std::env::var_os("FLUX_LOG").map(|value| value.to_string_lossy().into_owned()) {
        Some(value) if !value.is_empty() => read(&value).unwrap_or_else(|error| {
            end::say(&format!("FLUX_LOG = {value:?} is no filter, so {USUAL} is taken: {error}"));
            USUAL.into()
        }),
        _ => USUAL.into(),
    }
}

/// The filter that `value` says. A misspelt level would pass as a module's name and silence all
/// others.
fn read(value: &str) -> anyhow::Result<EnvFilter> {
    for part in value.split(',').map(str::trim) {
        let is_level = !part.is_empty() && part.parse::<LevelFilter>().is_ok();
        // A filter by spans alone, as `[call]=debug`, names no module.
        anyhow::ensure!(
            is_level || part.starts_with("flux_") || part.starts_with('['),
            "{part:?} is none of off, error, warn, info, debug and trace, nor of the form \
             flux_transport=debug"
        );
    }
    Ok(EnvFilter::try_new(value)?)
}

/// The exit status: of a launch its ranks', else 0 or 1.
fn act(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Bench(args) => bench::run(&args).map(status),
        Command::Tune(args) => tune::run(&args).map(status),
        Command::Run(args) => run::run(&args).map(|()| 0),
        Command::Launch(args) => launch::run(&args),
        Command::Doctor(args) => Ok(status(doctor::run(&args))),
        Command::Trace(args) => trace::run(&args).map(|()| 0),
        Command::Simulate(args) => simulate::run(&args).map(|()| 0),
        Command::Show(args) => show::run(&args).map(|()| 0),
        Command::Report(args) => page::run(&args).map(status),
        Command::Lab(command) => lab::run(&command).map(status),
    }
}

fn status(right: bool) -> u8 {
    u8::from(!right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::OverrideArgs;
    use clap::{Args, CommandFactory};
    use flux_core::DType;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn lists_are_separated_by_commas() {
        let words = [
            "flux-bench",
            "bench",
            "--ms",
            "512,1024",
            "--shapes",
            "gpt3,llama70b",
            "--ops",
            "ag_gemm",
        ];
        let Command::Bench(args) = Cli::parse_from(words).command else { panic!("not a bench") };
        let layers = args.layers;
        assert_eq!(
            (layers.ms, layers.shapes.unwrap().to_string(), layers.ops.len()),
            ("512,1024".parse().ok(), "gpt3,llama70b".to_owned(), 1)
        );
    }

    #[test]
    fn what_is_timed_is_bf16_unless_fp16_is_asked_for() {
        let parse = |words: &str| {
            Cli::try_parse_from(["flux-bench"].into_iter().chain(words.split_whitespace()))
        };
        for (option, asked) in [
            ("", DType::Bf16),
            ("--dtype bf16", DType::Bf16),
            ("--dtype fp16", DType::F16),
            ("--dtype f16", DType::F16),
        ] {
            for command in [
                "bench",
                "lab core",
                "lab first-call",
                "lab peers",
                "trace --ops ag_gemm --ms 64 --summary",
            ] {
                let dtype = match parse(&format!("{command} {option}")).unwrap().command {
                    Command::Bench(args) => args.layers.types.dtype,
                    Command::Lab(lab::Command::Core(args)) => args.layers.types.dtype,
                    Command::Lab(lab::Command::FirstCall(args)) => args.layers.types.dtype,
                    Command::Lab(lab::Command::Peers(args)) => args.layers.types.dtype,
                    Command::Trace(args) => args.types.dtype,
                    other => panic!("{other:?}"),
                };
                assert_eq!(dtype, asked, "{command} {option}");
                assert!(parse(&format!("{command} --dtype f32")).is_err(), "{command}");
            }
        }
        // The soak checks both, and a file says what it holds.
        for command in ["lab soak", "run ag-gemm --input a --output b"] {
            assert!(
                parse(command).is_ok() && parse(&format!("{command} --dtype fp16")).is_err(),
                "{command}"
            );
        }
    }

    /// Both words are in use, whichever a command prints first.
    #[test]
    fn ranks_and_tp_are_one_option_as_are_rounds_and_samples() {
        let parse = |words: &str| {
            Cli::try_parse_from(["flux-bench"].into_iter().chain(words.split_whitespace()))
        };
        let ranks = [
            "bench",
            "tune",
            "run ag-gemm --input a --output b",
            "trace --ops ag_gemm --ms 64 --summary",
            "simulate",
            "lab soak",
            "lab core",
            "lab first-call",
            "lab peers",
            "lab faults",
        ];
        for command in ranks {
            assert!(
                parse(&format!("{command} --tp 2")).is_ok()
                    && parse(&format!("{command} --ranks 2")).is_ok(),
                "{command}"
            );
        }
        assert!(
            parse("launch --tp 2 -- true").is_ok() && parse("launch --ranks 2 -- true").is_ok()
        );
        for command in ["bench", "tune", "lab core", "lab peers", "lab links"] {
            assert!(
                parse(&format!("{command} --rounds 3")).is_ok()
                    && parse(&format!("{command} --samples 3")).is_ok(),
                "{command}"
            );
            let misspelt = parse(&format!("{command} --round 3")).unwrap_err().to_string();
            assert!(misspelt.contains("'--rounds'"), "{misspelt}");
        }
    }

    #[test]
    fn links_are_measured_at_least_once() {
        let parse = |samples: &str| {
            Cli::try_parse_from(["flux-bench", "lab", "links", "--samples", samples])
        };
        assert!(parse("1").is_ok() && parse("0").is_err());
    }

    #[test]
    fn trace_needs_one_shape_and_something_to_show() {
        let parse = |words: &str| {
            Cli::try_parse_from(["flux-bench", "trace"].into_iter().chain(words.split(' ')))
        };
        assert!(
            parse("--ops gemm_rs --ms 512").is_err() && parse("--ops gemm_rs --summary").is_err()
        );
        let words =
            "--ops ag_gemm --shapes gpt3 --ms 512 --tp 4 --candidate 2 --output a.json --summary";
        let Command::Trace(args) = parse(words).unwrap().command else { panic!("not a trace") };
        assert_eq!((args.ms, args.calls, args.execution.plan.candidate), (512, 20, Some(2)));
        for (words, machine) in
            [("", None), (" --simulated", Some("H200")), (" --simulated h100", Some("H100"))]
        {
            let words = format!("--ops gemm_rs --ms 64 --html a.html --svg a.svg{words}");
            let Command::Trace(args) = parse(&words).unwrap().command else { panic!("no trace") };
            assert_eq!(args.simulated.map(|machine| machine.name), machine);
        }
        for words in ["--html a.html --simulated pigeon", "--summary --simulated", "--simulated"] {
            assert!(parse(&format!("--ops gemm_rs --ms 64 {words}")).is_err(), "{words}");
        }
    }

    #[test]
    fn simulate_takes_shapes_or_a_file_and_a_machine_that_is_known() {
        let parse = |words: &str| {
            Cli::try_parse_from(["flux-bench", "simulate"].into_iter().chain(words.split(' ')))
        };
        for words in [
            "--against a.json --ms 512",
            "--against a.json --tp 4",
            "--against a.json --plans",
            "--against a.json --html a.html",
            "--published --svg a.svg",
            "--machine a100",
        ] {
            assert!(parse(words).is_err(), "{words}");
        }
        let Command::Simulate(args) =
            parse("--ms 512 --machine h800 --candidate 2").unwrap().command
        else {
            panic!("not a simulation")
        };
        assert_eq!((args.machine.name, args.tp, args.plan.candidate), ("H800", 8, Some(2)));
        let Command::Simulate(args) = parse("--machine h100-pair-by-host").unwrap().command else {
            panic!("not a simulation")
        };
        assert!(args.machine.host_staged);
        assert!(parse("--against a.json --candidate 2").is_ok());
        assert!(parse("--ms 512 --html a.html --svg a.svg").is_ok());
    }

    #[test]
    fn no_workers_are_refused_and_every_change_to_the_plan_is_listed_as_one() {
        for command in ["bench --workers 0", "trace --ops ag_gemm --ms 64 --summary --workers 0"] {
            assert!(
                Cli::try_parse_from(["flux-bench"].into_iter().chain(command.split(' '))).is_err(),
                "{command}"
            );
        }
        let both = ["flux-bench", "bench", "--candidate", "1", "--plan", "tile=128x128x64"];
        assert!(Cli::try_parse_from(both).is_err());
        for argument in OverrideArgs::augment_args(clap::Command::new("plan")).get_arguments() {
            assert_eq!(argument.get_help_heading(), Some("Plan"), "{}", argument.get_id());
        }
    }

    #[test]
    fn what_asks_for_nothing_or_takes_no_effect_is_refused() {
        let words = [
            "lab soak --quick --calls 1000",
            "lab soak --calls 0",
            "lab soak --ranks-per-gpu 0",
            "lab first-call --at-most nan",
            "lab first-call --at-most -1",
            "lab first-call --limit 0",
            "lab peers --limit 0",
            "lab gpu-ci --dist . --limit 0",
            "lab faults --deadline-ms 0",
            "run ag-gemm --input a --output b --activation tanh",
            "doctor --require auto",
            "doctor --require nvlink,pigeon",
        ];
        for words in words {
            assert!(
                Cli::try_parse_from(["flux-bench"].into_iter().chain(words.split(' '))).is_err(),
                "{words}"
            );
        }
        assert!(Cli::try_parse_from(["flux-bench", "lab", "soak", "--calls", "1000"]).is_ok());
    }

    #[test]
    fn what_would_fill_the_memory_or_never_end_is_refused_with_the_limit() {
        for (words, most) in [
            ("bench --samples", 100_000_u64),
            ("lab core --samples", 100_000),
            ("lab peers --samples", 100_000),
            ("lab links --samples", 100_000),
            ("trace --ops ag_gemm --ms 64 --summary --calls", 100_000),
            ("lab soak --calls", 1_000_000),
            ("lab soak --ranks-per-gpu", 16),
            ("lab faults --kills", 10_000),
            ("lab faults --stops", 10_000),
            ("lab faults --missing", 10_000),
            ("lab faults --ranks-per-gpu", 16),
            ("lab faults --deadline-ms", 3_600_000),
            ("lab faults --patience", 86_400),
            ("lab peers --limit", 86_400),
            ("lab first-call --limit", 86_400),
            ("lab gpu-ci --dist . --limit", 86_400),
        ] {
            let parse = |count: u64| {
                Cli::try_parse_from(
                    ["flux-bench"].into_iter().chain(words.split(' ')).chain([&*count.to_string()]),
                )
            };
            assert!(parse(most).is_ok(), "{words} {most}");
            for beyond in [most + 1, u64::from(u32::MAX)] {
                let refused = parse(beyond).unwrap_err().to_string();
                assert!(
                    refused.contains(&format!("{beyond} is not in "))
                        && refused.contains(&format!("..={most}\n")),
                    "{words}: {refused}"
                );
            }
        }
    }

    #[test]
    fn show_needs_files_and_a_bound_something_to_compare() {
        for words in [
            "show --table rows",
            "show --svg a.svg",
            "show a.json --table other",
            "show a.json --ms x",
            "show a.json b.json --compare --svg a.svg",
            "report a.json --slower-than 2%",
            "report a.json b.json --compare --slower-than x",
            "show",
        ] {
            assert!(
                Cli::try_parse_from(["flux-bench"].into_iter().chain(words.split(' '))).is_err(),
                "{words}"
            );
        }
        for words in [
            "show a.json",
            "show a.json b.json --table summary --ms 64,128",
            "show a.json --table efficiency --svg a.svg",
            "show a.json b.json --compare",
            "report",
            "report a.json results --output a.html",
            "report a.json b.json --compare --slower-than 2%",
        ] {
            assert!(
                Cli::try_parse_from(["flux-bench"].into_iter().chain(words.split(' '))).is_ok(),
                "{words}"
            );
        }
    }
}
