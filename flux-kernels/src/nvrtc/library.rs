//! The table of NVRTC entry points.
//!
//! Invariant: a [`Library`] has every entry point and a version that knows `sm_90a`, and stays
//! loaded for the life of the process.

use super::search;
use sha2::{Digest, Sha256};
use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The first version that compiles for `sm_90a`.
pub(super) const OLDEST: Version = Version { major: 12, minor: 0, build: 0 };

/// Version of an NVRTC library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// As in CUDA 13.0: 13.
    pub major: u32,
    /// As in CUDA 13.0: 0.
    pub minor: u32,
    /// A hash of the library's file, which tells releases of one version apart. 0 where the file is
    /// not known.
    pub build: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// There is no NVRTC that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no NVRTC (the CUDA run-time compiler) is usable here; tried {}. Install one with `pip install \
     'nvidia-cuda-nvrtc==13.0.*'` or a CUDA toolkit, or set FLUX_NVRTC_LIB to libnvrtc.so.13, or \
     FLUX_CUBIN_DIR to a folder of cubins compiled ahead of time",
    tried.join("; ")
)]
pub struct NvrtcUnavailable {
    /// Each library that was tried, and what was wrong with it.
    pub tried: Vec<String>,
}

macro_rules! table {
    ($($name:ident = $symbol:literal ($($type:ty),* $(,)?) -> $result:ty;)*) => {
        /// The entry points; programs are opaque pointers, here `usize`.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> $result,)*
            pub(super) path: PathBuf,
            pub(super) version: Version,
            /// With its builtins. Never unloaded: the library has threads and destructors of its
            /// own.
            _loaded: ManuallyDrop<(libloading::Library, Option<libloading::Library>)>,
        }

        impl Library {
            fn bind(path: &Path, library: libloading::Library, version: Version) -> Result<Self, String> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the entry point's declaration in nvrtc.h (opaque
                        // pointers as `usize`, the result enum as an integer, which have the same
                        // representation); `_loaded` keeps it loaded for ever.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> $result>($symbol) };
                        *symbol.map_err(|error| reason(&error))?
                    },)*
                    path: path.to_path_buf(),
                    version,
                    _loaded: ManuallyDrop::new((library, builtins(path, version))),
                })
            }
        }
    };
}

table! {
    error_string = b"nvrtcGetErrorString\0" (c_int) -> *const c_char;
    create = b"nvrtcCreateProgram\0"
        (*mut usize, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int;
    destroy = b"nvrtcDestroyProgram\0" (*mut usize) -> c_int;
    compile = b"nvrtcCompileProgram\0" (usize, c_int, *const *const c_char) -> c_int;
    log_size = b"nvrtcGetProgramLogSize\0" (usize, *mut usize) -> c_int;
    log = b"nvrtcGetProgramLog\0" (usize, *mut c_char) -> c_int;
    cubin_size = b"nvrtcGetCUBINSize\0" (usize, *mut usize) -> c_int;
    cubin = b"nvrtcGetCUBIN\0" (usize, *mut c_char) -> c_int;
    ptx_size = b"nvrtcGetPTXSize\0" (usize, *mut usize) -> c_int;
    ptx = b"nvrtcGetPTX\0" (usize, *mut c_char) -> c_int;
}

impl Library {
    /// The first library among the candidates that can be used.
    pub(super) fn find() -> Result<Self, NvrtcUnavailable> {
        let executable = std::env::current_exe().ok();
        let mut tried = Vec::new();
        for path in search::candidates(|key| std::env::var_os(key), executable.as_deref()) {
            match Self::open(&path) {
                Ok(library) => {
                    tracing::debug!(path = %path.display(), version = %library.version, "NVRTC \
                                                                                         loaded");
                    return Ok(library);
                }
                Err(reason) => tried.push(format!("{} ({reason})", path.display())),
            }
        }
        Err(NvrtcUnavailable { tried })
    }

    /// This library.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: NVRTC's initialisers are made to run in any process at any time.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| reason(&error))?;
        let version = version(&library)?;
        if version < OLDEST {
            return Err(format!(
                "version {version} is older than {OLDEST}, the first that compiles for sm_90a"
            ));
        }
        Self::bind(path, library, version)
    }

    /// A result in words.
    pub(super) fn text(&self, code: c_int) -> String {
        // SAFETY: returns a static, terminated string for every code.
        unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned()
    }
}

fn version(library: &libloading::Library) -> Result<Version, String> {
    // SAFETY: the type is the entry point's declaration in nvrtc.h; it is called while `library` is
    // borrowed, so loaded.
    let entry = unsafe {
        library.get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0")
    };
    let entry = entry.map_err(|error| reason(&error))?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both out pointers are valid.
    match unsafe { entry(&raw mut major, &raw mut minor) } {
        0 => Ok(Version {
            major: major.unsigned_abs(),
            minor: minor.unsigned_abs(),
            build: build(*entry as usize),
        }),
        code => Err(format!("nvrtcVersion failed ({code})")),
    }
}

/// A hash of the size and time of the file that code at `address` was loaded from. NVRTC does not
/// tell its releases apart.
fn build(address: usize) -> u32 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let Some(file) = maps
        .lines()
        .find_map(|line| mapped(line, address))
        .and_then(|path| std::fs::metadata(path).ok())
    else {
        return 0;
    };
    let words = [i64::try_from(file.size()).unwrap_or(i64::MAX), file.mtime(), file.mtime_nsec()]
        .map(i64::to_le_bytes);
    let [a, b, c, d, ..]: [u8; 32] = Sha256::digest(words.concat()).into();
    u32::from_le_bytes([a, b, c, d])
}

/// The file of a line of `/proc/self/maps` that `address` is in.
fn mapped(line: &str, address: usize) -> Option<&str> {
    let (range, rest) = line.split_once(' ')?;
    let (first, end) = range.split_once('-')?;
    let within = usize::from_str_radix(first, 16).ok()?..usize::from_str_radix(end, 16).ok()?;
    within.contains(&address).then(|| rest.find('/').map(|at| &rest[at..])).flatten()
}

/// The library of builtins beside NVRTC. NVRTC opens it by its bare name, which the loader does not
/// find in a wheel or a named folder unless it is loaded already.
fn builtins(nvrtc: &Path, version: Version) -> Option<libloading::Library> {
    let folder = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty())?;
    let path = folder.join(format!("libnvrtc-builtins.so.{version}"));
    // SAFETY: as for NVRTC; the library is data with trivial initialisers.
    let loaded = unsafe { libloading::Library::new(&path) };
    // A toolkit may keep them on the loader's path; if not, the compiler's log says so.
    loaded
        .inspect_err(|error| {
            tracing::debug!(path = %path.display(), %error, "NVRTC's builtins are not beside it");
        })
        .ok()
}

/// What the loader said.
fn reason(error: &libloading::Error) -> String {
    use std::error::Error;
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_that_code_was_loaded_from_has_a_number_and_what_is_no_code_has_none() {
        let own = build as fn(usize) -> u32 as usize;
        assert!(build(own) != 0 && build(own) == build(own));
        assert_eq!(build(0), 0);
        assert_eq!(
            mapped("7f00-7f10 r-xp 00000000 00:1b 12   /a b/libnvrtc.so.13", 0x7f0f),
            Some("/a b/libnvrtc.so.13")
        );
        assert_eq!(mapped("7f00-7f10 r-xp 00000000 00:1b 12   /a b/libnvrtc.so.13", 0x7f10), None);
        assert_eq!(mapped("7f00-7f10 rw-p 00000000 00:00 0    [heap]", 0x7f00), None);
    }
}
