//! Entries of the fuzz targets in `flux-transport/fuzz`: what this crate reads that others wrote.
//!
//! Invariant: each entry takes any bytes, checks what its readers rely on, and says whether one of
//! them took the bytes; none needs a GPU, a file or a network. There only under test and
//! `cargo fuzz`.

pub use crate::backends::device::peer_memory::fuzz::offer;
pub use crate::backends::fuzz::region;
pub use crate::backends::nccl::fuzz::member;
pub use crate::bootstrap::control::fuzz::step;
pub use crate::bootstrap::fuzz::{environment, frame, handshake, hello, roster, stream};
pub use crate::comm::fuzz::{facts, report, size, verdict};
pub use crate::topology::probe::fuzz::answer;

/// A message of this version: its target, its file's name in the target's corpus, and its bytes.
#[cfg(test)]
pub(crate) type Seed = (&'static str, &'static str, Vec<u8>);

#[cfg(test)]
mod tests {
    use super::Seed;
    use crate::backends::device::peer_memory;
    use crate::backends::nccl;
    use crate::bootstrap::control;
    use crate::topology::probe;
    use crate::{backends, bootstrap, comm};
    use proptest::prelude::*;
    use std::path::{Path, PathBuf};

    type Target = fn(&[u8]) -> bool;

    const TARGETS: [(&str, Target); 15] = [
        ("answer", super::answer),
        ("environment", super::environment),
        ("facts", super::facts),
        ("frame", super::frame),
        ("handshake", super::handshake),
        ("hello", super::hello),
        ("member", super::member),
        ("offer", super::offer),
        ("region", super::region),
        ("report", super::report),
        ("roster", super::roster),
        ("size", super::size),
        ("step", super::step),
        ("stream", super::stream),
        ("verdict", super::verdict),
    ];

    fn seeds() -> impl Iterator<Item = Seed> {
        let first = [
            bootstrap::fuzz::seeds(),
            comm::fuzz::seeds(),
            control::fuzz::seeds(),
            backends::fuzz::seeds(),
        ];
        let second = [nccl::fuzz::seeds(), peer_memory::fuzz::seeds(), probe::fuzz::seeds()];
        first.into_iter().chain(second).flatten()
    }

    fn fuzz() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
    }

    fn folder(target: &str) -> PathBuf {
        fuzz().join("corpus").join(target)
    }

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let folder = folder(name);
        let files = std::fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    }

    /// A fuzzer that begins with messages of another version never gets past their first bytes.
    #[test]
    fn the_corpus_has_what_the_code_writes_and_its_target_takes_it() {
        for (name, target) in TARGETS {
            let mut seeds = seeds().filter(|(of, ..)| *of == name).peekable();
            assert!(seeds.peek().is_some(), "{name}: no seed");
            for (_, file, bytes) in seeds {
                assert!(target(&bytes), "{name}: {file} is refused");
                let path = folder(name).join(file);
                let stale = "where a format has changed: cargo test --package flux-tp-transport \
                             --lib write_the_seeds -- --ignored";
                assert!(
                    std::fs::read(&path).is_ok_and(|kept| kept == bytes),
                    "{} is not what the code writes; {stale}",
                    path.display()
                );
            }
        }
    }

    #[test]
    #[ignore = "writes files of the corpus"]
    fn write_the_seeds() {
        for (name, file, bytes) in seeds() {
            std::fs::create_dir_all(folder(name)).unwrap();
            std::fs::write(folder(name).join(file), bytes).unwrap();
        }
    }

    #[test]
    fn every_entry_has_a_program() {
        let manifest = std::fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
        let named: Vec<&str> = manifest
            .lines()
            .filter_map(|line| line.strip_prefix("path = \"fuzz_targets/")?.strip_suffix(".rs\""))
            .collect();
        assert_eq!(named, TARGETS.map(|(name, _)| name));
        for name in named {
            let program =
                std::fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).unwrap();
            assert!(program.contains(&format!("flux_transport::fuzz::{name}(bytes)")), "{program}");
        }
    }

    #[test]
    fn the_corpus_of_every_target_holds() {
        for (name, target) in TARGETS {
            let corpus = corpus(name);
            assert!(!corpus.is_empty(), "{name}");
            // As far as it goes without a fuzzer: each input, cut anywhere and with any one byte
            // another.
            for bytes in &corpus {
                target(bytes);
                for at in 0..bytes.len().min(300) {
                    target(&bytes[..at]);
                    let mut other = bytes.clone();
                    other[at] ^= 0x81;
                    target(&other);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn targets_take_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            for (_, target) in TARGETS {
                target(&bytes);
            }
        }
    }
}
