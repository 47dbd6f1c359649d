//! What a registry asks of the library crates stands in their manifests.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use serde_json::Value;
use std::path::Path;
use std::process::Command;

const LIBRARIES: [&str; 6] = [
    "flux-tp-core",
    "flux-tp-cuda",
    "flux-tp-files",
    "flux-tp-kernels",
    "flux-tp-transport",
    "flux-tp-ops",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn packages() -> Vec<Value> {
    let words = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let done = Command::new(env!("CARGO")).args(words).current_dir(root()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let metadata: Value = serde_json::from_slice(&done.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

#[test]
fn library_crates_can_be_published_and_the_others_cannot() {
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let is_library = LIBRARIES.contains(&name);
        assert_eq!(package["publish"].is_null(), is_library, "{name}");
        if !is_library {
            continue;
        }
        for field in ["description", "license", "repository", "documentation", "readme"] {
            assert!(
                package[field].as_str().is_some_and(|said| !said.is_empty()),
                "{name} says no {field}"
            );
        }
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        assert!(
            manifest.with_file_name(package["readme"].as_str().unwrap()).is_file(),
            "{name} has no readme"
        );
        for dependency in package["dependencies"].as_array().unwrap() {
            // A registry drops dependencies of tests that have only a path.
            let by_path_alone = !dependency["path"].is_null()
                && dependency["req"] == "*"
                && dependency["kind"] != "dev";
            assert!(!by_path_alone, "{name}: {} has no version", dependency["name"]);
        }
    }
}

#[test]
fn the_changelog_has_a_dated_heading_for_the_version() {
    let changelog = std::fs::read_to_string(root().join("CHANGELOG.md")).unwrap();
    for package in
        packages().iter().filter(|package| LIBRARIES.contains(&package["name"].as_str().unwrap()))
    {
        let heading = format!("## {} - ", package["version"].as_str().unwrap());
        let date = changelog
            .lines()
            .find_map(|line| line.strip_prefix(&*heading))
            .unwrap_or_else(|| panic!("no line {heading:?}"));
        let numbers: Vec<Option<u32>> = date.split('-').map(|part| part.parse().ok()).collect();
        assert!(
            matches!(numbers[..], [Some(2020..), Some(1..=12), Some(1..=31)]),
            "{date:?} is no date"
        );
    }
}
