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
    assert!(parse("launch --tp 2 -- true").is_ok() && parse("launch --ranks 2 -- true").is_ok());
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
    let parse =
        |samples: &str| Cli::try_parse_from(["flux-bench", "lab", "links", "--samples", samples]);
    assert!(parse("1").is_ok() && parse("0").is_err());
}

#[test]
fn trace_needs_one_shape_and_something_to_show() {
    let parse = |words: &str| {
        Cli::try_parse_from(["flux-bench", "trace"].into_iter().chain(words.split(' ')))
    };
    assert!(parse("--ops gemm_rs --ms 512").is_err() && parse("--ops gemm_rs --summary").is_err());
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
    let Command::Simulate(args) = parse("--ms 512 --machine h800 --candidate 2").unwrap().command
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
