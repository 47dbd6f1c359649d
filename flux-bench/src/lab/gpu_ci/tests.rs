use super::*;
use clap::Parser;

/// Written by another process: a fork of a test thread would keep the file open, and it could
/// not run.
fn script(path: &Path, text: &str) {
    let write =
        format!("printf '#!/bin/sh\\n%s\\n' '{text}' > '{0}' && chmod +x '{0}'", path.display());
    assert!(Command::new("sh").args(["-c", &write]).status().unwrap().success());
}

fn dist() -> (tempfile::TempDir, Args) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("tests")).unwrap();
    script(&folder.path().join("flux-bench"), "echo $NCCL_NVLS_ENABLE $@");
    script(&folder.path().join("tp_mlp"), "exit 0");
    script(&folder.path().join("tests/gpu_good"), "exit 0");
    let args = Args {
        dist: folder.path().to_owned(),
        limit: 20,
        only: Vec::new(),
        no_skips: false,
        tp: None,
        out: None,
    };
    (folder, args)
}

#[test]
fn a_folder_that_is_no_dist_is_refused_and_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let (_, args) = dist();
    let error = check(&Args { dist: folder.path().join("mispelt"), ..args }, 2).unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("mispelt is no folder that `cargo xtask dist` has built: it has no tests/"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_failing_test_fails_the_whole_and_the_steps_after_it_still_run() {
    let (folder, args) = dist();
    assert!(check(&args, 2).unwrap());
    script(&folder.path().join("tests/gpu_bad"), "echo why; exit 1");
    assert!(!check(&args, 2).unwrap());
    let json = std::fs::read_to_string(folder.path().join("gpu-ci.json")).unwrap();
    let summary: Summary = serde_json::from_str(&json).unwrap();
    let names: Vec<&str> =
        summary.steps.iter().map(|s| s.name.as_str()).filter(|&name| name != "peers").collect();
    let examples = ["tp_mlp-threads", "tp_mlp-processes"];
    let soaks = ["soak-threads", "soak-processes", "soak-random", "soak-shared"];
    let shared = [
        "soak-nvlink-shared",
        "soak-pcie-shared",
        "soak-nccl-shared",
        "soak-mixed-processes-shared",
        "soak-mixed-shared",
    ];
    let by_name =
        ["soak-nccl-threads", "soak-nccl-processes", "soak-pcie-threads", "soak-pcie-processes"];
    let mixed = ["soak-mixed-threads", "soak-mixed-processes"];
    let measures = ["links", "faults", "faults-pcie", "faults-nccl"];
    let faults =
        ["faults-shared", "faults-pcie-shared", "faults-nccl-shared", "faults-mixed-shared"];
    let times = [
        "bench",
        "bench-fp16",
        "bench-fp8-row",
        "bench-fp8-block",
        "bench-swiglu",
        "bench-geglu",
        "bench-silu",
        "bench-processes",
        "bench-hosts",
        "first-call",
        "core",
    ];
    assert_eq!(
        names,
        [
            ["doctor", "compile", "gpu_bad", "gpu_good"].as_slice(),
            &examples,
            &soaks,
            &shared,
            &by_name,
            &mixed,
            &measures,
            &faults,
            &times
        ]
        .concat()
    );
    assert_eq!(summary.steps.iter().filter(|s| s.outcome != Outcome::Passed).count(), 1);
    assert!(text(&summary).contains("\nwhy\n"), "{}", text(&summary));
    assert_eq!(summary.steps[0].output_tail, ["0 doctor"]);
}

#[test]
fn tests_that_were_skipped_are_counted_in_the_run_that_skips_them() {
    let (folder, args) = dist();
    let summary = || -> Summary {
        serde_json::from_slice(&std::fs::read(folder.path().join("gpu-ci.json")).unwrap()).unwrap()
    };
    script(
        &folder.path().join("tests/gpu_good"),
        r#"echo "gpu_good: no GPU" | tee -a "$FLUX_SKIPPED" >> "$FLUX_SKIPPED""#,
    );
    for _ in 0..2 {
        assert!(check(&Args { only: vec!["gpu_good".into()], ..args.clone() }, 1).unwrap());
        assert_eq!(summary().steps[0].skipped, ["gpu_good: no GPU", "gpu_good: no GPU"]);
        let text = text(&summary());
        assert!(
            text.contains("2 skipped\n")
                && text.contains(" 0 failed; 2 tests skipped, ")
                && text.matches(": no GPU").count() == 1,
            "{text}"
        );
    }
    script(&folder.path().join("tests/gpu_good"), "exit 0");
    assert!(check(&Args { only: vec!["gpu_good".into()], ..args }, 1).unwrap());
    assert!(
        summary().steps[0].skipped.is_empty() && text(&summary()).contains(" 0 tests skipped, ")
    );
}

#[test]
fn a_step_whose_tests_were_all_skipped_is_told_as_skipped_and_fails_where_none_may_be() {
    let (folder, args) = dist();
    let summary = || -> Summary {
        serde_json::from_slice(&std::fs::read(folder.path().join("gpu-ci.json")).unwrap()).unwrap()
    };
    let result = "echo test result: ok. 2 passed; 0 failed; 0 ignored";
    let result = result.replace(';', "\\;");
    let skip = r#"echo "gpu_none: no GPU" >> "$FLUX_SKIPPED""#;
    script(&folder.path().join("tests/gpu_none"), &format!("{skip}\n{skip}\n{result}"));
    script(&folder.path().join("tests/gpu_some"), &format!("{skip}\n{result}"));
    let part = r#"echo "gpu_part, in part: one GPU" >> "$FLUX_SKIPPED""#;
    script(&folder.path().join("tests/gpu_part"), &format!("{part}\n{part}\n{result}"));
    let args = Args { only: vec!["gpu_none".into(), "gpu_some".into(), "gpu_part".into()], ..args };
    assert!(check(&args, 1).unwrap());
    let done = summary();
    let outcomes = |done: &Summary| done.steps.iter().map(|step| step.outcome).collect::<Vec<_>>();
    assert_eq!(outcomes(&done), [Outcome::Skipped, Outcome::Passed, Outcome::Passed]);
    assert!(
        done.passed
            && done.schema == SCHEMA
            && serde_json::to_string(&done).unwrap().contains(r#""outcome":"skipped""#)
    );
    let told = text(&done);
    assert!(
        told.contains("2 steps passed, 1 skipped, 0 failed; 3 tests skipped, ")
            && told.contains("gpu_none  skipped "),
        "{told}"
    );
    assert!(
        told.contains(" s  2 in part\n")
            && told.contains(" s  1 skipped\n")
            && !told.contains("=="),
        "{told}"
    );

    assert!(!check(&Args { no_skips: true, ..args.clone() }, 1).unwrap());
    let done = summary();
    assert_eq!(outcomes(&done), [Outcome::Failed, Outcome::Passed, Outcome::Passed]);
    assert!(!done.passed && text(&done).contains("no test ran, 2 skipped\n"), "{}", text(&done));
    let rest = Args { no_skips: true, only: args.only[1..].to_vec(), ..args };
    assert!(check(&rest, 1).unwrap(), "steps of which some tests ran");
}

/// In a process of its own: the signal comes to all of its tests.
#[test]
fn a_signal_ends_a_run_after_the_step_that_it_ends() {
    let words =
        ["--ignored", "--exact", "lab::gpu_ci::tests::a_run_that_its_second_step_interrupts"];
    let done = Command::new(std::env::current_exe().unwrap()).args(words).output().unwrap();
    assert!(
        done.status.success() && String::from_utf8_lossy(&done.stdout).contains("1 passed"),
        "{done:?}"
    );
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn a_run_that_its_second_step_interrupts() {
    let (folder, args) = dist();
    script(&folder.path().join("tests/gpu_a"), "exit 0");
    script(&folder.path().join("tests/gpu_b"), "kill -INT $PPID; sleep 1000");
    script(&folder.path().join("tests/gpu_c"), "exit 0");
    let error =
        check(&Args { only: ["gpu_a", "gpu_b", "gpu_c"].map(Into::into).into(), ..args }, 1)
            .unwrap_err();
    assert_eq!(limited::interrupted_by(&error), Some(rustix::process::Signal::INT));
    let summary: Summary =
        serde_json::from_slice(&std::fs::read(folder.path().join("gpu-ci.json")).unwrap()).unwrap();
    let ended: Vec<_> =
        summary.steps.iter().map(|step| (step.name.as_str(), step.outcome)).collect();
    assert_eq!(ended, [("gpu_a", Outcome::Passed), ("gpu_b", Outcome::Failed)]);
    assert!(!summary.passed && summary.steps[1].status == "ended by signal 2", "{summary:?}");
}

#[test]
fn every_step_of_this_program_is_a_command_that_it_takes() {
    let (folder, args) = dist();
    for (gpus, tp) in
        [1, 2, 3, 4, 8].into_iter().flat_map(|gpus| [None, Some(2)].map(|tp| (gpus, tp)))
    {
        let steps = steps::steps(&Args { tp, ..args.clone() }, folder.path(), gpus, true).unwrap();
        let ours = steps
            .iter()
            .filter(|(_, command)| command.get_program() == folder.path().join("flux-bench"));
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
fn every_module_of_tests_on_gpus_is_a_step() {
    let (folder, args) = dist();
    script(&folder.path().join("tests/ops"), "exit 0");
    let steps = steps::steps(&args, folder.path(), 2, false).unwrap();
    let run = |module: &str, name: &str| {
        let (_, command) = steps.iter().find(|(step, _)| step == name).unwrap();
        let filter = format!("{module}::");
        command.get_args().any(|word| word == &*filter)
    };
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../flux-ops/tests/ops");
    let files = std::fs::read_dir(tests).unwrap().map(|file| file.unwrap().path());
    let modules = files.map(|file| file.file_stem().unwrap().to_string_lossy().into_owned());
    let modules: Vec<_> = modules.filter(|module| module.starts_with("gpu_")).collect();
    assert_eq!(modules.len(), steps::MODULES.len());
    assert!(modules.iter().all(|module| run(module, module)));
    assert!(run("gpu_pcie", "gpu_pcie-shared"));
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
fn several_filters_choose_the_steps_of_each_and_one_that_matches_nothing_is_refused() {
    let (folder, args) = dist();
    let error =
        check(&Args { only: vec!["gpu_good".into(), "no such step".into()], ..args.clone() }, 2)
            .unwrap_err()
            .to_string();
    assert!(
        error.contains("no such step") && error.contains(" gpu_good tp_mlp-threads "),
        "{error}"
    );
    assert!(!folder.path().join("gpu-ci.json").exists());
    assert!(check(&Args { only: vec!["gpu_good".into(), "tp_mlp".into()], ..args }, 2).unwrap());
    let json = std::fs::read_to_string(folder.path().join("gpu-ci.json")).unwrap();
    let summary: Summary = serde_json::from_str(&json).unwrap();
    assert!(summary.steps.iter().map(|step| step.name.as_str()).eq([
        "gpu_good",
        "tp_mlp-threads",
        "tp_mlp-processes"
    ]));
}
