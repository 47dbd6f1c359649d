//! The header with C and C++ compilers, and the example on the host transport: as threads, and as
//! processes of a launcher.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

#[path = "../../flux-kernels/tests/skipped/mod.rs"]
mod skipped;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const WARNINGS: [&str; 4] = ["-Wall", "-Wextra", "-Werror", "-pedantic"];

/// A compiler of this machine, or a skipped test.
fn compiler(test: &str, variable: &str, default: &str) -> Option<Command> {
    let program = std::env::var_os(variable)
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| default.into());
    match Command::new(&program).arg("--version").output() {
        Ok(out) if out.status.success() => Some(Command::new(program)),
        _ => {
            skipped::skip(test, &format!("there is no {}", program.display()));
            None
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Where cargo has put the library: beside the tests.
fn library() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(
        folder.join("libflux_tp_c.so").is_file(),
        "there is no libflux_tp_c.so in {}",
        folder.display()
    );
    folder
}

fn succeeds(mut command: Command) -> Output {
    let out = command.output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{command:?}: {}\n{said}", out.status);
    out
}

/// Compiles the example, in a folder that goes with the returned guard.
fn example(test: &str) -> Option<(tempfile::TempDir, PathBuf)> {
    let mut cc = compiler(test, "CC", "cc")?;
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("mlp");
    cc.arg("-std=c11")
        .args(WARNINGS)
        .arg("-I")
        .arg(root().join("include"))
        .arg(root().join("examples/mlp.c"));
    cc.arg("-L").arg(library()).args(["-lflux_tp_c", "-lm", "-pthread", "-o"]).arg(&program);
    succeeds(cc);
    Some((folder, program))
}

/// Each rank has said that its rows are right.
fn all_right(out: &str, ranks: usize) {
    let right = |rank| {
        out.lines().any(|line| {
            line.starts_with(&format!("rank {rank} of {ranks}: ")) && line.ends_with(": right")
        })
    };
    assert!((0..ranks).all(right), "{out}");
}

#[test]
fn the_example_computes_an_mlp_with_ranks_as_threads() {
    let Some((_folder, program)) = example("flux-c example, threads") else { return };
    let mut run = Command::new(program);
    run.env("LD_LIBRARY_PATH", library());
    all_right(&String::from_utf8(succeeds(run).stdout).unwrap(), 4);
}

#[test]
fn the_example_computes_an_mlp_with_ranks_as_processes() {
    let Some((folder, program)) = example("flux-c example, processes") else { return };
    let meeting = folder.path().join("meeting");
    std::fs::create_dir(&meeting).unwrap();
    std::fs::set_permissions(&meeting, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .unwrap();
    let rank = &|rank: usize| {
        let mut run = Command::new(&program);
        run.arg("launched")
            .env("LD_LIBRARY_PATH", library())
            .env("FLUX_RENDEZVOUS", &meeting)
            .env("FLUX_LAUNCHER", "flux");
        run.env("FLUX_RANK", rank.to_string())
            .env("FLUX_LOCAL_RANK", rank.to_string())
            .env("FLUX_WORLD_SIZE", "3");
        String::from_utf8(succeeds(run).stdout).unwrap()
    };
    let said: String = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3).map(|number| scope.spawn(move || rank(number))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    all_right(&said, 3);
}

#[test]
fn a_cpp_compiler_takes_the_header() {
    let Some(mut cpp) = compiler("flux-c header in C++", "CXX", "c++") else { return };
    cpp.args(["-std=c++11", "-fsyntax-only", "-x", "c++"])
        .args(WARNINGS)
        .arg(root().join("include/flux.h"));
    succeeds(cpp);
}
