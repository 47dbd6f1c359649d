//! What the repository says of its results is what its results say.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_bench::show::publish;
use std::fs;
use std::path::Path;

#[test]
fn the_readme_and_the_pictures_match_the_committed_results() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for file in publish::render(root).unwrap() {
        let committed = fs::read_to_string(&file.path).unwrap_or_default();
        assert!(committed == file.content, "{} does not match results/: run `cargo xtask results`", file.path.display());
    }
}
