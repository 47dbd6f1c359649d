//! `include/flux.h` is what cbindgen makes of this crate. `FLUX_WRITE_HEADER=1` writes it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const NOTES: &str = "\
/* flux: fused tensor-parallel GEMM layers. docs/c.md has a guide.
 *
 * Made by cbindgen from the crate flux-c: change that, not this file.
 *
 * A function that fails leaves a message: flux_last_error_message. Pointers are to memory of the
 * caller's, which the library uses until the function returns unless a comment says more. Threads
 * may call functions at the same time; a handle is destroyed when no other thread uses it. */";

#[test]
fn the_header_is_that_of_the_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    config.header = Some(NOTES.to_owned());
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/lib.rs"));
    let mut made = Vec::new();
    builder.generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();

    let header = root.join("include/flux.h");
    if std::env::var_os("FLUX_WRITE_HEADER").is_some_and(|value| value == "1") {
        fs::write(&header, &made).unwrap();
    }
    let committed = fs::read_to_string(&header).unwrap_or_default();
    let differs =
        || made.lines().zip(committed.lines()).find(|(made, committed)| made != committed);
    assert!(
        made == committed,
        "{:?}: run `FLUX_WRITE_HEADER=1 cargo test -p flux-tp-c --test header`",
        differs()
    );
    // Constants that comments speak of are there: no include guard, nor variable of a process.
    let is_of_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let words: BTreeSet<_> =
        made.split(|c| !is_of_name(c)).filter(|word| word.starts_with("FLUX_")).collect();
    let words = words.into_iter().filter(|word| !["FLUX_H", "FLUX_TRANSPORT"].contains(word));
    let is_defined = |word: &str| {
        made.lines().map(str::trim_start).any(|line| {
            let line = line.strip_prefix("#define ").unwrap_or(line);
            line.strip_prefix(word).is_some_and(|rest| rest.starts_with([' ', ',']))
        })
    };
    for word in words {
        assert!(is_defined(word), "{word} is in no enum: see [export] of cbindgen.toml");
    }
}
