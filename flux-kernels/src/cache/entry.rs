//! A cubin on disk.
//!
//! Invariant: a file that decodes is, byte for byte, what was encoded for its key. It begins with
//! the image, so that CUDA's tools read it.
//!
//! ```text
//! [ image ][ trailer ]
//! trailer: [ magic 8 ][ NVRTC major u32 ][ minor u32 ][ build u32 ][ key 32 ]
//!          [ SHA-256 of all before 32 ]
//! ```

use crate::nvrtc::{KernelSource, Version};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"FLUXCUB3";
const TRAILER: usize = 8 + 4 + 4 + 4 + 32 + 32;

/// SHA-256 of everything that a compilation depends on, besides the version of NVRTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn of(source: &KernelSource<'_>) -> Self {
        let mut hash = Sha256::new();
        // Lengths before texts: no two sources give the same bytes.
        let mut field = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        field(source.name);
        field(source.arch.name());
        field(source.text);
        for list in [source.options.len(), source.headers.len()] {
            field(&list.to_string());
        }
        source.options.iter().for_each(|option| field(option));
        for (name, text) in source.headers {
            field(name);
            field(text);
        }
        Self(hash.finalize().into())
    }

    /// Name of the file for this source; of the cache with the compiler's `version`.
    pub(super) fn file_name(&self, name: &str, version: Option<Version>) -> String {
        use std::fmt::Write;
        let safe = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '_' };
        let mut file: String = name.chars().map(safe).collect();
        if let Some(version) = version {
            write!(file, "-nvrtc{version}-{:08x}", version.build)
                .expect("a string can always be written to");
        }
        format!("{file}-{}.cubin", self.digits())
    }

    /// Its first 16 hexadecimal digits, which name a file.
    pub(super) fn digits(&self) -> String {
        use std::fmt::Write;
        self.0[..8].iter().fold(String::new(), |mut digits, byte| {
            write!(digits, "{byte:02x}").expect("a string can always be written to");
            digits
        })
    }
}

/// What is kept of a compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) image: Vec<u8>,
    pub(super) version: Version,
}

impl Entry {
    pub(super) fn encode(&self, key: &Key) -> Vec<u8> {
        let mut file = Vec::with_capacity(self.image.len() + TRAILER);
        file.extend(&self.image);
        file.extend(MAGIC);
        file.extend(self.version.major.to_le_bytes());
        file.extend(self.version.minor.to_le_bytes());
        file.extend(self.version.build.to_le_bytes());
        file.extend(key.0);
        let sum: [u8; 32] = Sha256::digest(&file).into();
        file.extend(sum);
        file
    }

    /// The entry in `file`, or why it is none of this key.
    pub(super) fn decode(mut file: Vec<u8>, key: &Key) -> Result<Self, &'static str> {
        let body = file.len().checked_sub(TRAILER).ok_or("it is shorter than any entry")?;
        let (summed, sum) = file.split_at(file.len() - 32);
        if Sha256::digest(summed)[..] != *sum {
            return Err("its checksum does not fit");
        }
        let trailer = &summed[body..];
        let (magic, trailer) = trailer.split_at(8);
        if magic != MAGIC {
            return Err("it is of another format");
        }
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| trailer[at + i]));
        let version = Version { major: number(0), minor: number(4), build: number(8) };
        if trailer[12..] != key.0 {
            return Err("it is of another source");
        }
        file.truncate(body);
        Ok(Self { image: file, version })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvrtc::Arch;

    const SOURCE: KernelSource<'_> = KernelSource {
        name: "name",
        text: "text",
        headers: &[("a", "b"), ("c", "d")],
        options: &["o"],
        arch: Arch::Sm90a,
    };

    fn entry() -> Entry {
        Entry { image: b"image".to_vec(), version: Version { major: 13, minor: 0, build: 7 } }
    }

    #[test]
    fn whatever_changes_a_compilation_changes_the_key() {
        let others = [
            KernelSource { name: "nam", ..SOURCE },
            KernelSource { text: "texts", ..SOURCE },
            KernelSource { headers: &[("a", "b")], ..SOURCE },
            KernelSource { headers: &[("a", "b"), ("c", "e")], ..SOURCE },
            KernelSource { headers: &[("a", "bc"), ("", "d")], ..SOURCE },
            KernelSource { options: &[], ..SOURCE },
            KernelSource { options: &["o", "a"], headers: &[("b", "c"), ("d", "")], ..SOURCE },
        ];
        for other in others {
            assert_ne!(Key::of(&other), Key::of(&SOURCE), "{other:?}");
        }
    }

    #[test]
    fn an_entry_comes_back_as_it_was() {
        let key = Key::of(&SOURCE);
        assert_eq!(Entry::decode(entry().encode(&key), &key), Ok(entry()));
        let empty = Entry { image: Vec::new(), ..entry() };
        assert_eq!(Entry::decode(empty.encode(&key), &key), Ok(empty));
    }

    #[test]
    fn any_changed_bit_and_any_cut_is_noticed() {
        let key = Key::of(&SOURCE);
        let file = entry().encode(&key);
        for bit in 0..file.len() * 8 {
            let mut broken = file.clone();
            broken[bit / 8] ^= 1 << (bit % 8);
            assert!(Entry::decode(broken, &key).is_err(), "bit {bit}");
        }
        for length in 0..file.len() {
            assert!(Entry::decode(file[..length].to_vec(), &key).is_err(), "{length} bytes");
        }
    }

    #[test]
    fn an_entry_of_another_source_is_not_taken() {
        let file = entry().encode(&Key::of(&KernelSource { text: "other", ..SOURCE }));
        assert_eq!(Entry::decode(file, &Key::of(&SOURCE)), Err("it is of another source"));
    }

    #[test]
    fn file_names_stay_in_their_folder() {
        let name =
            Key::of(&SOURCE).file_name("../a b", Some(Version { major: 13, minor: 0, build: 7 }));
        assert!(name.starts_with(".._a_b-nvrtc13.0-") && !name.contains('/'), "{name}");
    }
}
