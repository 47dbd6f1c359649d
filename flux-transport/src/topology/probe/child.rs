//! Runs a probe in a process of its own, which may hang or crash.
//!
//! Invariant: [`run`] ends soon after its limit and takes bounded memory. When it returns, nothing
//! of the program's process group runs, unless the kernel cannot end it. A probe whose parent was
//! killed ends by itself. Nothing runs between fork and exec, so no memory is copied.

use super::report::ChildReport;
use super::request::{REQUEST, Request};
use crate::topology::limited;
use rustix::fs::{MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Most that a program can say, on stdout and on stderr.
const ROOM: u64 = 1 << 18;
/// How long a program that was killed may take to go.
const GRACE: Duration = Duration::from_secs(2);
/// Characters of a program's last words that are repeated.
const WORDS: usize = 200;

/// Why a program gave no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Silence {
    #[error("it does not start: {0}")]
    NotStarted(io::Error),
    /// It was started and could not be looked after.
    #[error("it was started, and then lost: {0}")]
    Lost(io::Error),
    #[error("it had not answered after {0:?} and was killed: a driver call that does not return")]
    Late(Duration),
    #[error(
        "it ended without an answer ({}){words}",
        .status.map_or_else(|| "this process is not told how".to_owned(), |status| status.to_string())
    )]
    Ended { status: Option<ExitStatus>, words: String },
}

pub(super) fn run(
    program: &Path,
    request: &Request,
    limit: Duration,
) -> Result<ChildReport, Silence> {
    let (child, out, err) = start(program, request).map_err(Silence::NotStarted)?;
    let status = match limited::wait(child, limit, GRACE) {
        Ok(Some(status)) => Some(status),
        Ok(None) => return Err(Silence::Late(limit)),
        // What it has said shows it: a crash in the driver leaves no whole answer.
        Err(error) if limited::is_untold(&error) => None,
        Err(error) => return Err(Silence::Lost(error)),
    };
    let well = status.is_none_or(|status| status.success());
    let answer = if well { ChildReport::decode(&said(&out).map_err(Silence::Lost)?) } else { None };
    answer.ok_or_else(|| Silence::Ended {
        status,
        words: said(&err).map_or_else(|_| String::new(), |text| last_words(&text)),
    })
}

/// The program, and what it says on stdout and on stderr.
fn start(program: &Path, request: &Request) -> io::Result<(Child, File, File)> {
    let (out, err) = (room()?, room()?);
    let mut command = Command::new(program);
    command
        .env(REQUEST, request.encode())
        .env("CUDA_VISIBLE_DEVICES", request.visible())
        .process_group(0);
    // It would make each stream wait for the other device's before that has work.
    command.env_remove("CUDA_LAUNCH_BLOCKING");
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(err.try_clone()?);
    Ok((command.spawn()?, out, err))
}

/// A file without a name that cannot grow: what is written beyond its end fails.
fn room() -> io::Result<File> {
    let fd =
        rustix::fs::memfd_create("flux-probe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, ROOM)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::GROW | SealFlags::SHRINK)?;
    Ok(File::from(fd))
}

/// What was written, from the start.
fn said(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; usize::try_from(ROOM).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

fn last_words(text: &str) -> String {
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.map_or_else(String::new, |line| {
        format!(": {}", line.chars().take(WORDS).collect::<String>())
    })
}

#[cfg(test)]
#[path = "../../../tests/processes/mod.rs"]
mod processes;

#[cfg(test)]
mod tests {
    use super::processes::gone_within;
    use super::*;
    use crate::lateness::{AMPLE, assert_soon, scaled};
    use crate::topology::probe::report::tests::{report, uuid};
    use std::fmt::Write as _;
    use std::path::PathBuf;
    use std::time::Instant;

    /// A program for the shell. It is written by another process: one that a test thread forks
    /// meanwhile would keep the file open, and the system runs no open file.
    fn program(folder: &Path, script: &str) -> PathBuf {
        let path = folder.join("probe");
        let status = Command::new("sh")
            .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" > "$0" && chmod +x "$0""#])
            .arg(&path)
            .arg(script)
            .status()
            .unwrap();
        assert!(status.success());
        path
    }

    fn ask(script: &str, limit: Duration) -> Result<ChildReport, Silence> {
        let folder = tempfile::tempdir().unwrap();
        run(
            &program(folder.path(), script),
            &Request { devices: vec![uuid(0), uuid(1)], veto: false },
            limit,
        )
    }

    #[test]
    fn an_answer_is_taken_and_the_program_has_the_request_and_sees_its_devices() {
        let answer = ChildReport::Report(report(2, &[(1, 0)]));
        let mut script = String::new();
        for line in answer.encode().lines() {
            writeln!(script, "echo '{line}'").unwrap();
        }
        assert_eq!(ask(&script, AMPLE).unwrap(), answer);
        let ChildReport::Cannot(seen) = ask(
            &format!(
                "echo '{}'; echo \"cannot $CUDA_VISIBLE_DEVICES $FLUX_PROBE_REQUEST\"; echo end",
                answer.encode().lines().next().unwrap()
            ),
            AMPLE,
        )
        .unwrap() else {
            panic!("a report")
        };
        let both = format!("{},{}", uuid(0), uuid(1));
        assert_eq!(seen, format!("{both} {} prove {both}", env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_what_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let start = Instant::now();
        let silence = ask(
            &format!("sleep 1000 & echo $! > '{}'; sleep 1000", pid.display()),
            scaled(Duration::from_millis(300)),
        )
        .unwrap_err();
        assert!(matches!(silence, Silence::Late(_)), "{silence}");
        assert_soon(start.elapsed(), Duration::from_secs(10));
        let pid = std::fs::read_to_string(pid).unwrap();
        assert!(
            gone_within(&[pid.trim().parse().unwrap()], Duration::from_secs(5)),
            "{pid} still runs"
        );
    }

    #[test]
    fn a_program_that_crashes_or_says_anything_else_gives_no_answer() {
        let crash = ask("echo why >&2; kill -SEGV $$", AMPLE).unwrap_err().to_string();
        assert!(crash.contains("signal: 11") && crash.ends_with(": why"), "{crash}");
        let whole = ChildReport::Report(report(2, &[])).encode();
        for script in [
            "true",
            "echo works",
            "exit 3",
            &format!("printf '{}'; exit 1", whole.replace('\n', "\\n")),
        ] {
            assert!(matches!(ask(script, AMPLE), Err(Silence::Ended { .. })), "{script}");
        }
    }

    /// Set for a process that ignores SIGCHLD, to the folder with its programs.
    const UNTOLD: &str = "FLUX_TEST_UNTOLD";
    const NAME: &str = "probe::child::tests::a_process_that_is_not_told_how_its_children_end_judges_by_what_they_say";

    #[test]
    fn a_process_that_is_not_told_how_its_children_end_judges_by_what_they_say() {
        let (request, answer) = (
            Request { devices: vec![uuid(0), uuid(1)], veto: false },
            ChildReport::Report(report(2, &[])),
        );
        let Some(folder) = std::env::var_os(UNTOLD).map(PathBuf::from) else {
            let folder = tempfile::tempdir().unwrap();
            let whole = format!("printf '{}'", answer.encode().replace('\n', "\\n"));
            for (name, script) in [
                ("answers", &*whole),
                ("crashes", "kill -SEGV $$"),
                ("hangs", "sleep 1000 & echo $! > \"$0-pid\"; sleep 1000"),
            ] {
                let within = folder.path().join(name);
                std::fs::create_dir(&within).unwrap();
                program(&within, script);
            }
            let mut untold = Command::new("env");
            untold.arg("--ignore-signal=CHLD").arg(std::env::current_exe().unwrap()).args([
                "--exact",
                NAME,
                "--nocapture",
            ]);
            assert!(
                untold.env(UNTOLD, folder.path()).status().unwrap().success(),
                "its words are above"
            );
            return;
        };
        let ask = |name: &str, limit| run(&folder.join(name).join("probe"), &request, limit);
        assert!(
            limited::is_untold(&Command::new("true").status().unwrap_err()),
            "SIGCHLD is not ignored"
        );
        assert_eq!(ask("answers", AMPLE).unwrap(), answer);
        assert!(matches!(ask("crashes", AMPLE), Err(Silence::Ended { status: None, .. })));
        let start = Instant::now();
        assert!(matches!(ask("hangs", scaled(Duration::from_millis(300))), Err(Silence::Late(_))));
        assert_soon(start.elapsed(), Duration::from_secs(10));
        let pid = std::fs::read_to_string(folder.join("hangs/probe-pid")).unwrap();
        assert!(
            gone_within(&[pid.trim().parse().unwrap()], Duration::from_secs(5)),
            "{pid} still runs"
        );
        assert!(matches!(ask("missing", AMPLE), Err(Silence::NotStarted(_))));
    }

    #[test]
    fn a_program_that_does_not_stop_talking_is_bounded() {
        let start = Instant::now();
        assert!(ask("yes; yes >&2", AMPLE).is_err());
        assert_soon(start.elapsed(), Duration::from_secs(15));
    }

    #[test]
    fn a_program_that_is_missing_does_not_start() {
        let request = Request { devices: vec![uuid(0), uuid(1)], veto: false };
        assert!(matches!(
            run(Path::new("/no/such/program"), &request, AMPLE),
            Err(Silence::NotStarted(_))
        ));
    }
}
