//! The cubin cache under threads, processes and damage, with a mock compiler: no NVRTC is needed.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use flux_kernels::nvrtc::{Arch, CompileError, Compiled, KernelSource, Version};
use flux_kernels::{Cubin, Cubins, Origin, Report};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;

const VERSION: Version = Version { major: 13, minor: 0, build: 7 };
const SOURCE: KernelSource<'_> =
    KernelSource { name: "kernel", text: "text", headers: &[], options: &[], arch: Arch::Sm90a };

/// The mock compilation of a source: large enough to show a half-written file.
fn compiled(source: &KernelSource<'_>) -> Compiled {
    let cubin = source.text.bytes().cycle().take(1 << 16).collect();
    let report =
        Report { name: source.name.to_owned(), functions: Vec::new(), warnings: Vec::new() };
    Compiled { cubin, log: "a log".to_owned(), report }
}

fn cubins(folder: &Path) -> Cubins {
    Cubins { ahead_of_time: Vec::new(), cache: Some(folder.to_path_buf()) }
}

fn get(folder: &Path, source: &KernelSource<'_>, version: Version) -> Cubin {
    let cubin = cubins(folder).cached(source, version, || Ok(compiled(source))).unwrap();
    assert!(cubin.image == compiled(source).cubin && cubin.version == version);
    cubin
}

fn files(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn a_source_is_compiled_once_for_each_version_of_the_compiler() {
    let dir = tempfile::tempdir().unwrap();
    let (newer, other_release) = (Version { minor: 1, ..VERSION }, Version { build: 8, ..VERSION });
    for version in [VERSION, newer, other_release] {
        assert_eq!(get(dir.path(), &SOURCE, version).origin, Origin::Compiled);
        assert_eq!(get(dir.path(), &SOURCE, version).origin, Origin::Cached);
    }
    let other = KernelSource { text: "other", ..SOURCE };
    assert_eq!(get(dir.path(), &other, VERSION).origin, Origin::Compiled);
    assert_eq!(files(dir.path()).len(), 4);
}

#[test]
fn a_damaged_file_is_compiled_again() {
    let dir = tempfile::tempdir().unwrap();
    get(dir.path(), &SOURCE, VERSION);
    let [file] = &files(dir.path())[..] else { panic!("one file") };
    let good = std::fs::read(file).unwrap();
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for bad in [&flipped[..], &good[..good.len() / 2], b""] {
        std::fs::write(file, bad).unwrap();
        assert_eq!(get(dir.path(), &SOURCE, VERSION).origin, Origin::Compiled);
        assert!(std::fs::read(file).unwrap() == good, "the file is whole again");
    }
}

#[test]
fn a_file_of_another_source_under_this_name_is_not_taken() {
    let dir = tempfile::tempdir().unwrap();
    let other = KernelSource { text: "other", ..SOURCE };
    get(dir.path(), &other, VERSION);
    let theirs = files(dir.path()).remove(0);
    get(dir.path(), &SOURCE, VERSION);
    let ours = files(dir.path()).into_iter().find(|file| *file != theirs).unwrap();
    std::fs::copy(theirs, ours).unwrap();
    assert_eq!(get(dir.path(), &SOURCE, VERSION).origin, Origin::Compiled);
}

#[test]
fn a_folder_that_cannot_be_written_costs_only_time() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a file");
    std::fs::write(&file, "").unwrap();
    for _ in 0..2 {
        assert_eq!(get(&file.join("cache"), &SOURCE, VERSION).origin, Origin::Compiled);
    }
    let nowhere = Cubins { ahead_of_time: Vec::new(), cache: None };
    assert_eq!(
        nowhere.cached(&SOURCE, VERSION, || Ok(compiled(&SOURCE))).unwrap().origin,
        Origin::Compiled
    );
}

#[test]
fn a_failed_compilation_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let failed = || Err(CompileError::Nul { name: "kernel".to_owned() });
    assert!(cubins(dir.path()).cached(&SOURCE, VERSION, failed).is_err());
    assert_eq!(files(dir.path()).len(), 0);
}

#[test]
fn threads_that_race_all_get_the_whole_cubin() {
    let dir = tempfile::tempdir().unwrap();
    let barrier = Barrier::new(8);
    for round in 0..10 {
        let text = format!("round {round}");
        let source = KernelSource { text: &text, ..SOURCE };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    get(dir.path(), &source, VERSION);
                });
            }
        });
        assert_eq!(get(dir.path(), &source, VERSION).origin, Origin::Cached);
    }
    assert_eq!(files(dir.path()).len(), 10, "no temporary file is left");
}

const CHILD: &str = "FLUX_TEST_CACHE_CHILD";

#[test]
fn processes_that_race_and_damage_all_get_the_whole_cubin() {
    if let Some(folder) = std::env::var_os(CHILD) {
        // A child: reads and writes the same few entries as its siblings, and now and then damages
        // one.
        let folder = PathBuf::from(folder);
        for round in 0..40u32 {
            let text = format!("text {}", round % 4);
            get(&folder, &KernelSource { text: &text, ..SOURCE }, VERSION);
            if (round + std::process::id()).is_multiple_of(7) {
                let file = files(&folder)
                    .into_iter()
                    .find(|file| file.extension().is_some_and(|e| e == "cubin"))
                    .unwrap();
                std::fs::write(file, "damage").unwrap();
            }
        }
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let children: Vec<_> = (0..4)
        .map(|_| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child
                .args(["--exact", "processes_that_race_and_damage_all_get_the_whole_cubin"])
                .env(CHILD, dir.path());
            child.spawn().unwrap()
        })
        .collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    for text in 0..4 {
        let text = format!("text {text}");
        let source = KernelSource { text: &text, ..SOURCE };
        get(dir.path(), &source, VERSION);
        assert_eq!(get(dir.path(), &source, VERSION).origin, Origin::Cached);
    }
}
