//! Entries of the fuzz targets in `flux-transport/fuzz`: what this crate reads that others wrote.
//!
//! Invariant: each entry takes any bytes and checks what its readers rely on; none needs a GPU, a file or a network. There only under test and
//! `cargo fuzz`.

pub use crate::bootstrap::fuzz::{environment, frame, handshake, hello, roster, stream};
pub use crate::comm::fuzz::{facts, report};
pub use crate::nvlink::fuzz::offer;
pub use crate::probe::fuzz::answer;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::path::Path;

    type Target = fn(&[u8]);

    const TARGETS: [(&str, Target); 10] = [
        ("answer", super::answer),
        ("environment", super::environment),
        ("facts", super::facts),
        ("frame", super::frame),
        ("handshake", super::handshake),
        ("hello", super::hello),
        ("offer", super::offer),
        ("report", super::report),
        ("roster", super::roster),
        ("stream", super::stream),
    ];

    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect()
    }

    #[test]
    fn the_corpus_of_every_target_holds() {
        for (name, target) in TARGETS {
            let corpus = corpus(name);
            assert!(!corpus.is_empty(), "{name}");
            // As far as it goes without a fuzzer: each input, cut anywhere and with any one byte another.
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
