//! What README and docs name exists: paths, commands with their options, and identifiers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// A document with its folder, below the root.
struct Document {
    path: PathBuf,
    text: String,
}

fn documents() -> Vec<Document> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let more = ["README.md", "results/README.md"].map(|name| root().join(name));
    let markdown =
        docs.chain(more).filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    markdown.map(|path| Document { text: fs::read_to_string(&path).unwrap(), path }).collect()
}

impl Document {
    /// Lines outside fenced blocks, and the lines of blocks of shell commands.
    fn prose_and_commands(&self) -> (Vec<&str>, Vec<&str>) {
        let (mut prose, mut commands, mut block) = (Vec::new(), Vec::new(), None);
        for line in self.text.lines() {
            match (line.strip_prefix("```"), block) {
                (Some(language), None) => block = Some(language),
                (Some(_), Some(_)) => block = None,
                (None, None) => prose.push(line),
                (None, Some("sh")) => commands.push(line),
                (None, Some(_)) => {}
            }
        }
        (prose, commands)
    }

    /// What stands between backticks.
    fn spans(&self) -> Vec<&str> {
        let (prose, _) = self.prose_and_commands();
        prose.into_iter().flat_map(|line| line.split('`').skip(1).step_by(2)).collect()
    }

    fn name(&self) -> String {
        self.path.strip_prefix(root()).unwrap().display().to_string()
    }
}

/// Whether the word is a path below the root, of a file or of a folder.
fn is_path(word: &str) -> bool {
    const TOPS: [&str; 11] = [
        "flux-core/",
        "flux-kernels/",
        "flux-transport/",
        "flux-ops/",
        "flux-bench/",
        "flux-python/",
        "flux-c/",
        "xtask/",
        "docs/",
        "results/",
        ".ci/",
    ];
    TOPS.iter().any(|top| word.starts_with(top)) && !word.contains(['*', '{', '<'])
}

#[test]
fn paths_exist() {
    for document in documents() {
        for word in document
            .spans()
            .into_iter()
            .flat_map(str::split_whitespace)
            .filter(|word| is_path(word))
        {
            assert!(root().join(word).exists(), "{}: there is no {word}", document.name());
        }
        for link in document
            .text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
            .map(|(link, _)| link)
        {
            let target = link.split('#').next().unwrap();
            let exists = target.is_empty()
                || target.contains("://")
                || document.path.parent().unwrap().join(target).exists();
            assert!(exists, "{}: there is no {link}", document.name());
        }
    }
}

/// The commands of the document, from the program's name on.
fn commands(document: &Document) -> Vec<String> {
    let (_, blocks) = document.prose_and_commands();
    let lines = document
        .spans()
        .into_iter()
        .chain(blocks)
        .map(|line| line.split(" #").next().unwrap().trim());
    lines
        .filter(|line| line.starts_with("flux-bench ") || line.starts_with("cargo xtask "))
        .map(str::to_owned)
        .collect()
}

#[test]
fn commands_and_their_options_exist() {
    let xtask = fs::read_to_string(root().join("xtask/src/main.rs")).unwrap();
    let mut seen = 0;
    for document in documents() {
        for command in commands(&document) {
            let name = document.name();
            if let Some(words) = command.strip_prefix("cargo xtask ") {
                let task = words.split(' ').next().unwrap();
                let variant: String =
                    task.split('-').map(|word| word[..1].to_uppercase() + &word[1..]).collect();
                assert!(
                    [" {", "(", ","]
                        .iter()
                        .any(|end| xtask.contains(&format!("\n    {variant}{end}"))),
                    "{name}: `{command}`"
                );
            } else if let Err(refused) = flux_bench::check_words(command.split(' ')) {
                panic!("{name}: `{command}`: {refused}");
            }
            seen += 1;
        }
    }
    assert!(seen > 20, "{seen}");
}

/// Words of all sources.
fn identifiers() -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    folders.push(path);
                }
            } else if [".rs", ".cu", ".cuh", ".py"].iter().any(|end| name.ends_with(end)) {
                let text = fs::read_to_string(&path).unwrap();
                words.extend(
                    text.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned),
                );
            }
        }
    }
    words
}

/// Spans such as `Type::method`, `object.function()` and `--option` are of words that sources have.
#[test]
fn identifiers_and_options_exist() {
    let known = identifiers();
    for document in documents() {
        for span in document.spans() {
            let is_code = span.contains("::") || span.ends_with("()") || span.starts_with("--");
            if !is_code || span.contains([' ', '/']) {
                continue;
            }
            let words =
                span.trim_start_matches("--").split(['=', '(']).next().unwrap().replace('-', "_");
            for word in words.split("::").flat_map(|of| of.split('.')).filter(|of| !of.is_empty()) {
                let word = word.split('<').next().unwrap();
                assert!(
                    known.contains(word),
                    "{}: there is no {word} of `{span}`",
                    document.name()
                );
            }
        }
    }
}
