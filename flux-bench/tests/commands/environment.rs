//! What environment variables do to the commands, and how they are reported.

use crate::program::text;
use std::process::{Command, Output};

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
