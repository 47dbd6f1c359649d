//! Modules of a crate do not import each other in circles: a reader can understand them one by one.
//!
//! A module is a file or a folder beside `lib.rs`. Test and fuzzing code may import anything.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const CRATES: [&str; 5] = ["flux-core", "flux-kernels", "flux-transport", "flux-ops", "flux-bench"];

/// By module: the modules that it names.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Without comments and unit tests.
fn code(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

fn first_word(text: &str) -> &str {
    let text = text.trim_start();
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// The first names of a path, of which a list in braces has several: `a::b`, `{a, b::{c, d}}`.
fn heads(path: &str) -> Vec<&str> {
    let Some(list) = path.strip_prefix('{') else { return vec![first_word(path)] };
    let (mut depth, mut begin, mut found) = (1, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 || depth == 1 && c == ',' {
            found.push(first_word(&list[begin..at]));
            begin = at + 1;
        }
        if depth == 0 {
            break;
        }
    }
    found
}

/// Files below `folder`, without those of tests and fuzzing.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let kept =
        |path: &PathBuf| !["tests", "fuzz"].contains(&path.file_stem().unwrap().to_str().unwrap());
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.filter(kept).flat_map(below).collect()
}

/// What the modules of the crate in `folder` import.
fn imports(folder: &Path) -> Imports {
    let lib = code(&folder.join("src/lib.rs"));
    let modules: BTreeSet<&str> = lib.split("mod ").skip(1).map(first_word).collect();
    // What the crate's root exports of a module: `use module::{a, b};`.
    let mut exports = BTreeMap::new();
    for item in lib.split("use ").skip(1) {
        let (path, module) = (item.split(';').next().unwrap_or_default(), first_word(item));
        if modules.contains(module) {
            let names = path.split(|c: char| !c.is_alphanumeric() && c != '_');
            exports.extend(names.map(|name| (name.to_owned(), module)));
        }
    }
    let mut all = Imports::new();
    for file in files(&folder.join("src")) {
        let inside = file.strip_prefix(folder.join("src")).unwrap();
        let own = inside
            .components()
            .next()
            .unwrap()
            .as_os_str()
            .to_str()
            .unwrap()
            .trim_end_matches(".rs");
        if !modules.contains(own) {
            continue;
        }
        let text = code(&file);
        for name in text.split("crate::").skip(1).flat_map(heads) {
            let module = modules.get(name).copied().or_else(|| exports.get(name).copied());
            if let Some(module) = module.filter(|&module| module != own) {
                all.entry(own.to_owned()).or_default().insert(module.to_owned());
            }
        }
    }
    all
}

/// Modules that import themselves by way of others.
fn in_circles(imports: &Imports) -> Vec<&str> {
    let reaches_itself = |module: &&String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![*module]);
        while let Some(from) = next.pop() {
            for to in imports.get(from).into_iter().flatten() {
                if to == *module {
                    return true;
                }
                if seen.insert(to) {
                    next.push(to);
                }
            }
        }
        false
    };
    imports.keys().filter(reaches_itself).map(String::as_str).collect()
}

#[test]
fn modules_do_not_import_each_other_in_circles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for folder in CRATES {
        let imports = imports(&root.join(folder));
        assert!(!imports.is_empty(), "{folder} has modules that import others");
        let circles = in_circles(&imports);
        assert!(
            circles.is_empty(),
            "{folder}: {circles:?} import each other in circles: {imports:#?}"
        );
    }
}

#[test]
fn a_circle_is_found_whatever_its_length() {
    let of = |edges: &[(&str, &str)]| {
        let mut imports = Imports::new();
        for (from, to) in edges {
            imports.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        in_circles(&imports).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("a", "c")]), [""; 0]);
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("c", "b")]), ["b", "c"]);
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("c", "a")]), ["a", "b", "c"]);
}

#[test]
fn names_of_a_path_are_read_from_braces() {
    assert_eq!(heads("plan::Plan;"), ["plan"]);
    assert_eq!(heads("{OpKind, tile::{TileGrid, TileShape}, Rank};"), ["OpKind", "tile", "Rank"]);
}
