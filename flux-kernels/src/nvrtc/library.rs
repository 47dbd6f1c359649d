//! The table of NVRTC entry points.
//!
//! Invariant: a [`Library`] has every entry point and a version that knows `sm_90a`, and stays
//! loaded for the life of the process.

use flux_cuda::library::{self, Search};
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
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
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

flux_core::debug_is_text!(NvrtcUnavailable);

flux_cuda::table! {
    /// NVRTC's entry points; programs are opaque pointers.
    pub(super) struct Entries {
        version = "nvrtcVersion" (*mut c_int, *mut c_int) -> c_int;
        error_string = "nvrtcGetErrorString" (c_int) -> *const c_char;
        create = "nvrtcCreateProgram"
            (*mut usize, *const c_char, *const c_char, c_int, *const *const c_char,
             *const *const c_char) -> c_int;
        destroy = "nvrtcDestroyProgram" (*mut usize) -> c_int;
        compile = "nvrtcCompileProgram" (usize, c_int, *const *const c_char) -> c_int;
        log_size = "nvrtcGetProgramLogSize" (usize, *mut usize) -> c_int;
        log = "nvrtcGetProgramLog" (usize, *mut c_char) -> c_int;
        cubin_size = "nvrtcGetCUBINSize" (usize, *mut usize) -> c_int;
        cubin = "nvrtcGetCUBIN" (usize, *mut c_char) -> c_int;
        ptx_size = "nvrtcGetPTXSize" (usize, *mut usize) -> c_int;
        ptx = "nvrtcGetPTX" (usize, *mut c_char) -> c_int;
    }
}

/// Where NVRTC may be.
const SEARCH: Search = Search {
    names: &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
    variable: "FLUX_NVRTC_LIB",
    wheels: &["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"],
    loader_first: false,
};

/// NVRTC, with the file that it came from.
pub(super) struct Library {
    pub(super) entries: Entries,
    pub(super) path: PathBuf,
    pub(super) version: Version,
}

impl Library {
    /// The first library among the candidates that can be used.
    pub(super) fn find() -> Result<Self, NvrtcUnavailable> {
        let mut tried = Vec::new();
        for path in SEARCH.candidates() {
            match Self::open(&path) {
                Ok(library) => {
                    let (path, version) = (library.path.display(), library.version);
                    tracing::debug!(%path, %version, "NVRTC loaded");
                    return Ok(library);
                }
                Err(reason) => tried.push(format!("{} ({reason})", path.display())),
            }
        }
        Err(NvrtcUnavailable { tried })
    }

    /// This library.
    pub(super) fn open(path: &Path) -> Result<Self, String> {
        let (_, library) =
            library::first(vec![path.to_path_buf()]).map_err(|none| none.to_string())?;
        // SAFETY: the entries are declared as in nvrtc.h.
        let entries = unsafe { Entries::bind(library) }.map_err(|missing| missing.to_string())?;
        let version = version(&entries)?;
        if version < OLDEST {
            return Err(format!(
                "version {version} is older than {OLDEST}, the first that compiles for sm_90a"
            ));
        }
        load_builtins(path, version);
        Ok(Self { entries, path: path.to_path_buf(), version })
    }

    /// A result in words.
    pub(super) fn text(&self, code: c_int) -> String {
        // SAFETY: returns a static, terminated string for every code.
        unsafe { CStr::from_ptr((self.entries.error_string)(code)) }.to_string_lossy().into_owned()
    }
}

fn version(entries: &Entries) -> Result<Version, String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both out pointers are valid.
    match unsafe { (entries.version)(&raw mut major, &raw mut minor) } {
        0 => Ok(Version {
            major: major.unsigned_abs(),
            minor: minor.unsigned_abs(),
            build: build(entries.version as usize),
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

/// Loads the library of builtins beside NVRTC. NVRTC opens it by its bare name, which the loader
/// does not find in a wheel or a named folder unless it is loaded already.
fn load_builtins(nvrtc: &Path, version: Version) {
    let Some(folder) = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty()) else {
        return;
    };
    let path = folder.join(format!("libnvrtc-builtins.so.{version}"));
    match library::first(vec![path]) {
        // It stays loaded, as NVRTC does.
        Ok((_, library)) => {
            let _stays = ManuallyDrop::new(library);
        }
        // A toolkit may keep them on the loader's path; if not, the compiler's log says so.
        Err(reason) => tracing::debug!(%reason, "NVRTC's builtins are not beside it"),
    }
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
