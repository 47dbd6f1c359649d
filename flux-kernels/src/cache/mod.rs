//! Cubins: compiled ahead of time, cached on disk, or compiled now.
//!
//! Invariant: a file in the cache is complete once it has its name. So any number of processes may
//! share the folder. A damaged file is compiled again.

mod entry;

use crate::inspect::Report;
use crate::nvrtc::{Arch, CompileError, Compiled, KernelSource, Nvrtc, Version};
use crate::on_threads::on_threads;
use crate::sources::Source;
use entry::{Entry, Key};
use std::io;
use std::path::{Path, PathBuf};

/// Where a cubin came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A file compiled ahead of time.
    AheadOfTime,
    /// A file in the cache.
    Cached,
    /// The compiler, now.
    Compiled,
}

/// A cubin and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubin {
    /// The image that the driver loads.
    pub image: Vec<u8>,
    /// The compiler's version.
    pub version: Version,
    /// Where it came from.
    pub origin: Origin,
}

/// Where cubins are looked for and kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cubins {
    /// Folders of cubins compiled ahead of time, consulted in order.
    pub ahead_of_time: Vec<PathBuf>,
    /// Folder of the cache; without one every call compiles.
    pub cache: Option<PathBuf>,
}

impl Cubins {
    /// From the environment. Ahead of time: `FLUX_CUBIN_DIR`, then `cubins` beside the executable.
    /// Cache: `FLUX_CACHE_DIR`, else `flux` in the user's cache folder.
    pub fn from_env() -> Self {
        let folder = |name: &str| {
            std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
        };
        let beside =
            std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("cubins")));
        let user = || {
            folder("XDG_CACHE_HOME")
                .or_else(|| Some(folder("HOME")?.join(".cache")))
                .map(|cache| cache.join("flux"))
        };
        Self {
            ahead_of_time: folder("FLUX_CUBIN_DIR").into_iter().chain(beside).collect(),
            cache: folder("FLUX_CACHE_DIR").or_else(user).map(|cache| cache.join("cubins")),
        }
    }

    /// The cubin of a source, compiled with the library of this process if need be. A cache that
    /// cannot be read or written only costs time, and is reported as a warning.
    ///
    /// # Errors
    /// As [`Nvrtc::get`] and [`Nvrtc::compile`].
    pub fn get(&self, source: &KernelSource<'_>) -> Result<Cubin, CompileError> {
        if let Some(cubin) = self.ahead_of_time(source) {
            return Ok(cubin);
        }
        let nvrtc = Nvrtc::get()?;
        self.cached(source, nvrtc.version(), || nvrtc.compile(source))
    }

    /// The file compiled ahead of time for a source, whatever version compiled it.
    fn ahead_of_time(&self, source: &KernelSource<'_>) -> Option<Cubin> {
        let key = Key::of(source);
        let file = key.file_name(source.name, None);
        let found = self.ahead_of_time.iter().find_map(|folder| read(&folder.join(&file), &key));
        if found.is_none() {
            tracing::debug!(file, folders = ?self.ahead_of_time, "not compiled ahead of time");
        }
        found.map(|entry| Cubin::new(entry, Origin::AheadOfTime))
    }

    /// The cached cubin of a source as `version` compiles it; else the result of `compile`, which
    /// is then cached.
    ///
    /// # Errors
    /// Those of `compile`.
    pub fn cached(
        &self,
        source: &KernelSource<'_>,
        version: Version,
        compile: impl FnOnce() -> Result<Compiled, CompileError>,
    ) -> Result<Cubin, CompileError> {
        let key = Key::of(source);
        let path = self
            .cache
            .as_ref()
            .map(|folder| folder.join(key.file_name(source.name, Some(version))));
        if let Some(entry) = path.as_ref().and_then(|path| read(path, &key))
            && entry.version == version
        {
            return Ok(Cubin::new(entry, Origin::Cached));
        }
        let entry = Entry { image: compile()?.cubin, version };
        if let Some(path) = &path
            && let Err(error) = write(path, &entry.encode(&key))
        {
            tracing::warn!(
                path = %path.display(),
                %error,
                "the cubin is not cached, the next process compiles it again",
            );
        }
        Ok(Cubin::new(entry, Origin::Compiled))
    }

    /// Compiles a source into `folder`, where [`Self::get`] finds it ahead of time.
    pub(crate) fn compile_ahead(
        source: &KernelSource<'_>,
        folder: &Path,
    ) -> Result<Report, AheadError> {
        let nvrtc = Nvrtc::get().map_err(CompileError::from)?;
        let Compiled { cubin, report, .. } = nvrtc.compile(source)?;
        let key = Key::of(source);
        let path = folder.join(key.file_name(source.name, None));
        let entry = Entry { image: cubin, version: nvrtc.version() };
        write(&path, &entry.encode(&key))
            .map_err(|error| AheadError::Write { path, reason: error.to_string() })?;
        Ok(report)
    }
}

/// The cubin of one of our sources, as [`Cubins::from_env`] and [`Cubins::get`] find it.
///
/// # Errors
/// As [`Cubins::get`].
pub fn cubin(source: &Source, arch: Arch) -> Result<Cubin, CompileError> {
    Cubins::from_env().get(&KernelSource::ours(source, arch))
}

/// As [`cubin`], of several sources, on so many threads. Processes that share a cache and begin at
/// different numbers, `first`, find what the others have compiled meanwhile.
pub fn cubins(
    sources: &[Source],
    arch: Arch,
    threads: usize,
    first: usize,
) -> Vec<Result<Cubin, CompileError>> {
    on_threads(sources, threads, first, |source| cubin(source, arch))
}

/// The key of a source's image: 16 hexadecimal digits of a hash of its name, text, headers, options
/// and architecture. It does not depend on the machine or the compiler.
pub fn image_key(source: &KernelSource<'_>) -> String {
    Key::of(source).digits()
}

/// Why a cubin was not compiled ahead of time.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AheadError {
    /// It does not compile.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Its file cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
}

flux_core::debug_is_text!(AheadError);

impl Cubin {
    fn new(entry: Entry, origin: Origin) -> Self {
        let Entry { image, version } = entry;
        Self { image, version, origin }
    }
}

/// The entry of `key` in a file; `None` where there is none, or a damaged one.
fn read(path: &Path, key: &Key) -> Option<Entry> {
    match std::fs::read(path) {
        Ok(file) => {
            let entry = Entry::decode(file, key);
            entry
                .inspect_err(|reason| {
                    tracing::warn!(
                        path = %path.display(),
                        reason,
                        "a cubin on disk does not check out",
                    );
                })
                .ok()
        }
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), %error, "a cubin on disk cannot be read");
            }
            None
        }
    }
}

/// Puts an entry in place whole, or not at all.
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    std::fs::create_dir_all(path.parent().ok_or(io::ErrorKind::InvalidInput)?)?;
    flux_files::write(path, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: KernelSource<'_> = KernelSource {
        name: "kernel",
        text: "text",
        headers: &[],
        options: &[],
        arch: Arch::Sm90a,
    };

    #[test]
    fn a_cubin_compiled_ahead_of_time_is_found_without_a_compiler_and_by_this_source_only() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::of(&SOURCE);
        let version = Version { major: 13, minor: 0, build: 7 };
        let entry = Entry { image: b"image".to_vec(), version };
        let path = dir.path().join("second").join(key.file_name(SOURCE.name, None));
        write(&path, &entry.encode(&key)).unwrap();
        let cubins = Cubins {
            ahead_of_time: vec![dir.path().join("first"), dir.path().join("second")],
            cache: None,
        };

        let cubin = cubins.get(&SOURCE).unwrap();
        assert_eq!((&cubin.image[..], cubin.origin), (&b"image"[..], Origin::AheadOfTime));
        assert_eq!(cubins.ahead_of_time(&KernelSource { text: "changed", ..SOURCE }), None);
        std::fs::write(path, "damage").unwrap();
        assert_eq!(cubins.ahead_of_time(&SOURCE), None);
    }
}
