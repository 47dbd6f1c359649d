//! docs/environment.md names every variable of flux's own that its crates and programs read, and no other.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Variables of tests alone.
const OF_TESTS: &str = "FLUX_TEST_";

/// Rust sources below a folder, without files and folders of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let kept = entries.filter(|path| path.file_stem().is_none_or(|name| name != "tests" && name != "fuzz"));
    let (folders, files): (Vec<_>, Vec<_>) = kept.partition(|path| path.is_dir());
    let rust = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    rust.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

fn variables(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
    words.filter(|word| word.len() > "FLUX_".len() && word.starts_with("FLUX_") && !word.starts_with(OF_TESTS)).map(str::to_owned)
}

#[test]
fn the_table_names_every_variable_and_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let crates = ["flux-core", "flux-kernels", "flux-transport", "flux-ops", "flux-bench", "xtask"];
    let files = crates.iter().flat_map(|name| sources(&root.join(name).join("src")));
    let read: BTreeSet<String> = files.flat_map(|path| variables(&fs::read_to_string(path).unwrap()).collect::<Vec<_>>()).collect();
    let table = fs::read_to_string(root.join("docs/environment.md")).unwrap();
    // The first cell of each row.
    let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let named: BTreeSet<String> = cells.flat_map(|cell| variables(cell).collect::<Vec<_>>()).collect();
    assert!(read.len() > 20, "{read:?}");
    assert_eq!(read, named);
}
