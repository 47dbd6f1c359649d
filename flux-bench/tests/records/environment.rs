//! docs/environment.md names every variable of flux's own that its crates and programs speak of,
//! and none that nothing reads.

use crate::reads::reads;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Variables of tests alone.
const OF_TESTS: &str = "FLUX_TEST_";

/// Sources of a language below a folder, without files and folders of tests.
fn sources(folder: &Path, language: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let kept = entries
        .filter(|path| path.file_stem().is_none_or(|name| name != "tests" && name != "fuzz"));
    let (folders, files): (Vec<_>, Vec<_>) = kept.partition(|path| path.is_dir());
    let own = files
        .into_iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == language));
    own.chain(folders.iter().flat_map(|folder| sources(folder, language))).collect()
}

fn variables(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_');
    words
        .filter(|word| {
            word.len() > "FLUX_".len() && word.starts_with("FLUX_") && !word.starts_with(OF_TESTS)
        })
        .map(str::to_owned)
}

/// The sources of the crates and programs, and of what the tests of all of them share to say what
/// they skip.
fn texts(root: &Path) -> Vec<String> {
    let crates = [
        "flux-core",
        "flux-cuda",
        "flux-kernels",
        "flux-transport",
        "flux-ops",
        "flux-bench",
        "xtask",
    ];
    let files = crates.iter().flat_map(|name| sources(&root.join(name).join("src"), "rs"));
    let shared = root.join("flux-kernels/tests/skipped/mod.rs");
    files.chain([shared]).map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// The modules of the Python package.
fn modules(root: &Path) -> Vec<String> {
    let files = sources(&root.join("flux-python/python"), "py");
    files.iter().map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// The variables that a module reads.
fn read_by_python(module: &str) -> impl Iterator<Item = String> {
    module.split("os.environ.get(\"").skip(1).filter_map(|rest| {
        rest.split('"').next().filter(|name| name.starts_with("FLUX_")).map(str::to_owned)
    })
}

/// Of the variables that a table names, those that no source reads.
fn unread<'a>(named: &BTreeSet<String>, texts: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    named.difference(&reads(texts)).cloned().collect()
}

#[test]
fn the_table_names_every_variable_and_none_that_nothing_reads() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (texts, modules) = (texts(root), modules(root));
    // Whatever the sources speak of, in a message too, a person may look for.
    let spoken: BTreeSet<String> =
        texts.iter().chain(&modules).flat_map(|text| variables(text)).collect();
    let table = fs::read_to_string(root.join("docs/environment.md")).unwrap();
    // The first cell of each row.
    let cells = table.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    let named: BTreeSet<String> =
        cells.flat_map(|cell| variables(cell).collect::<Vec<_>>()).collect();
    assert!(spoken.len() > 20, "{spoken:?}");
    assert_eq!(spoken, named);
    let by_python: BTreeSet<String> =
        modules.iter().flat_map(|module| read_by_python(module)).collect();
    assert!(by_python.contains("FLUX_VLLM"), "{by_python:?}");
    let others = &named - &by_python;
    assert_eq!(unread(&others, texts.iter().map(String::as_str)), Vec::<String>::new());
}

#[test]
fn a_variable_that_is_only_spoken_of_is_not_read() {
    let sample = r##"
        //! `FLUX_A` stands in a comment: std::env::var("FLUX_A").
        /* var_os("FLUX_A"), /* lookup("FLUX_A") */ folder("FLUX_A") */
        /// As `env("FLUX_A")`.
        const NAMES: [&str; 1] = ["FLUX_A"];
        const NAME: &str = "FLUX_A";
        #[error("set FLUX_A: var(\"FLUX_A\")")]
        fn says<'a>() -> String {
            let quote = '"'; // var("FLUX_A")
            command.env("FLUX_A", r#"var("FLUX_A")"#);
            format!("unset {}, or var_os(FLUX_A), {quote}", NAME)
        }
        #[cfg(test)]
        mod tests {
            fn reads() -> Option<String> { let x = [1; 2]; std::env::var("FLUX_A").ok() }
        }
        fn after() { let _ = std::env::var("FLUX_READ"); }
    "##;
    let named =
        |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(unread(&named(&["FLUX_A", "FLUX_READ"]), [sample]), ["FLUX_A"]);
    // A constant may be of another source than the call.
    let reading = [
        r#"fn reads() { std::env::var_os("FLUX_A"); }"#,
        "fn reads() { let commit = option_env!(\"FLUX_A\"); }",
        "fn reads() { lookup(NAME) }",
        "fn reads() { vars.below(NAME, 8, OTHER)?; }",
        "#[cfg(not(test))] fn reads() { env(NAME) }",
    ];
    for text in reading {
        assert_eq!(reads([sample, text]), named(&["FLUX_A", "FLUX_READ"]), "{text}");
    }
}
