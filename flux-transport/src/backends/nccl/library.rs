//! The table of NCCL entry points, loaded once.
//!
//! Invariant: a [`Library`] exists only with every entry point found. It stays loaded.

use super::abi::{Config, UniqueId};
use flux_cuda::library::{self, Search};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Why there is no NCCL.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclUnavailable {
    /// No candidate can be loaded.
    #[error(
        "no NCCL library can be loaded: {reason}; install NCCL or PyTorch, or set FLUX_NCCL_LIB to \
         libnccl.so.2"
    )]
    Library {
        /// What the loader said of those that are there; where none is, the names and paths that
        /// were looked at.
        reason: String,
    },
    /// A library lacks an entry point.
    #[error("{} has no `{symbol}`: NCCL 2.18 or newer is needed", path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The missing entry point.
        symbol: &'static str,
    },
}

/// A collective, or the setting up or down of a communicator, that failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// There is no NCCL in this process.
    #[error(transparent)]
    Unavailable(#[from] NcclUnavailable),
    /// NCCL refused a call.
    #[error("{call}: {text} ({code})")]
    Call {
        /// The NCCL call.
        call: &'static str,
        /// Its result.
        code: i32,
        /// The result in words.
        text: String,
    },
    /// The communicator was not complete in time: a rank is missing or stuck.
    #[error("rank {rank} waited {waited:?} for all {world} ranks of its NCCL communicator to join")]
    Deadline {
        /// The rank that waited.
        rank: u32,
        /// Number of ranks of the communicator; on `mixed` those of a rail.
        world: u32,
        /// How long.
        waited: std::time::Duration,
    },
    /// The communicator was complete, and a message that was to prove it did not come in time.
    #[error(
        "rank {rank} waited {waited:?} for a message from each of the {world} ranks of its NCCL \
         communicator, all of which had joined"
    )]
    #[non_exhaustive]
    Silent {
        /// The rank that waited.
        rank: u32,
        /// Number of ranks of the communicator.
        world: u32,
        /// How long.
        waited: std::time::Duration,
    },
    /// A call that waits for nobody took longer than the deadline.
    #[error("{what} was not done within the deadline")]
    Slow {
        /// What was asked of NCCL.
        what: &'static str,
    },
    /// The communicator was given up: a call has failed, or a peer is gone.
    #[error("the NCCL communicator was given up")]
    GivenUp,
    /// The device's context could not be made current.
    #[error(transparent)]
    Device(#[from] flux_cuda::CudaError),
    /// The operating system gave no thread.
    #[error("no thread to join or leave the communicator on: {reason}")]
    Thread {
        /// What the system said.
        reason: String,
    },
}

flux_core::debug_is_text!(NcclUnavailable, NcclError);

/// The oldest version whose communicators are told all that they are here: `10000 * major + 100 *
/// minor + patch`.
pub const OLDEST: u32 = 21_800;

flux_cuda::table! {
    /// NCCL's entry points.
    pub(super) struct Library {
        nccl_get_version = "ncclGetVersion" (*mut c_int) -> c_int;
        nccl_get_error_string = "ncclGetErrorString" (c_int) -> *const c_char;
        nccl_get_last_error = "ncclGetLastError" (usize) -> *const c_char;
        nccl_get_unique_id = "ncclGetUniqueId" (*mut UniqueId) -> c_int;
        nccl_comm_init_rank = "ncclCommInitRank" (*mut usize, c_int, UniqueId, c_int) -> c_int;
        nccl_comm_destroy = "ncclCommDestroy" (usize) -> c_int;
        nccl_comm_abort = "ncclCommAbort" (usize) -> c_int;
        nccl_comm_get_async_error = "ncclCommGetAsyncError" (usize, *mut c_int) -> c_int;
        nccl_all_gather = "ncclAllGather"
            (*const c_void, *mut c_void, usize, c_int, usize, usize) -> c_int;
        nccl_reduce_scatter = "ncclReduceScatter"
            (*const c_void, *mut c_void, usize, c_int, c_int, usize, usize) -> c_int;
        nccl_comm_split = "ncclCommSplit" (usize, c_int, c_int, *mut usize, *mut Config) -> c_int;
        nccl_comm_init_rank_config = "ncclCommInitRankConfig"
            (*mut usize, c_int, UniqueId, c_int, *mut Config) -> c_int;
        nccl_comm_finalize = "ncclCommFinalize" (usize) -> c_int;
        nccl_group_start = "ncclGroupStart" () -> c_int;
        nccl_group_end = "ncclGroupEnd" () -> c_int;
        nccl_send = "ncclSend" (*const c_void, usize, c_int, c_int, usize, usize) -> c_int;
        nccl_recv = "ncclRecv" (*mut c_void, usize, c_int, c_int, usize, usize) -> c_int;
        nccl_all_reduce = "ncclAllReduce"
            (*const c_void, *mut c_void, usize, c_int, c_int, usize, usize) -> c_int;
    }
}

impl Library {
    /// As [`check`](Self::check), where a call may also be under way.
    pub(super) fn accepted(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == IN_PROGRESS { Ok(()) } else { self.check(call, code) }
    }

    /// Turns a result into an error that names the call, with what NCCL noted about it last.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for every code; a null communicator asks for the
        // process's last error.
        let (what, why) =
            unsafe { ((self.nccl_get_error_string)(code), (self.nccl_get_last_error)(0)) };
        let text = [what, why].into_iter().filter(|p| !p.is_null()).map(|p| {
            // SAFETY: not null, and a terminated string that NCCL keeps.
            unsafe { CStr::from_ptr(p) }.to_string_lossy().trim().to_owned()
        });
        let text: Vec<String> = text.filter(|t| !t.is_empty()).collect();
        Err(NcclError::Call { call, code, text: text.join(": ") })
    }
}

/// `ncclInProgress`.
pub(super) const IN_PROGRESS: c_int = 7;

/// Where NCCL may be. A program that uses it, too, has loaded the one to share.
const SEARCH: Search = Search {
    names: &["libnccl.so.2", "libnccl.so"],
    variable: "FLUX_NCCL_LIB",
    wheels: &["nvidia/nccl/lib"],
    loader_first: true,
};

/// The library of this process, loaded at the first call.
pub(super) fn library() -> Result<&'static Library, NcclUnavailable> {
    loaded().map(|(_, library)| library)
}

fn loaded() -> Result<&'static (PathBuf, Library), NcclUnavailable> {
    static LIBRARY: OnceLock<Result<(PathBuf, Library), NcclUnavailable>> = OnceLock::new();
    LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<(PathBuf, Library), NcclUnavailable> {
    // NVLink multicast can take a shared host's devices out of service; NCCL reads this when it
    // makes communicators.
    if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // SAFETY: Rust code reads the environment under the lock that this takes. `available` asks
        // to be called before foreign threads run, and launchers set the variable for children.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
    open(SEARCH.candidates())
}

fn open(candidates: Vec<PathBuf>) -> Result<(PathBuf, Library), NcclUnavailable> {
    let (path, library) = library::first(candidates)
        .map_err(|none| NcclUnavailable::Library { reason: none.to_string() })?;
    // SAFETY: the entries are declared as in nccl.h.
    match unsafe { Library::bind(library) } {
        Ok(library) => Ok((path, library)),
        Err(missing) => Err(NcclUnavailable::Symbol { path, symbol: missing.symbol }),
    }
}

/// Whether this process has an NCCL, and which file it came from.
///
/// Call it, or anything of this module, first while the process has no threads of other languages:
/// it sets `NCCL_NVLS_ENABLE=0` in the environment where that is unset.
///
/// # Errors
/// [`NcclUnavailable`] says what was tried.
pub fn available() -> Result<PathBuf, NcclUnavailable> {
    loaded().map(|(path, _)| path.clone())
}

/// The library's version: `10000 * major + 100 * minor + patch`.
pub fn version() -> Result<u32, NcclError> {
    let library = library()?;
    let mut version = 0;
    // SAFETY: `version` is a place for the result.
    library.check("ncclGetVersion", unsafe { (library.nccl_get_version)(&raw mut version) })?;
    Ok(version.unsigned_abs())
}

/// A version in the words of its makers.
pub(super) fn words(version: u32) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The library's version, where it is new enough for communicators that carry messages; otherwise
/// why not.
pub fn supported(version: u32) -> Result<u32, String> {
    if version >= OLDEST {
        Ok(version)
    } else {
        Err(format!("NCCL {} was found, {} or newer is needed", words(version), words(OLDEST)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_too_old_is_refused_with_what_was_found_and_what_is_needed() {
        assert_eq!((supported(21_800), supported(22_803)), (Ok(21_800), Ok(22_803)));
        assert_eq!(
            supported(21_701).unwrap_err(),
            "NCCL 2.17.1 was found, 2.18.0 or newer is needed"
        );
    }

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = open(vec!["/nowhere/libnccl.so.2".into()]).err().unwrap();
        assert!(error.to_string().contains("/nowhere/libnccl.so.2"), "{error}");
        assert!(error.to_string().contains("FLUX_NCCL_LIB"), "{error}");
    }

    #[test]
    fn a_file_that_is_no_library_is_the_error_though_others_are_missing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "not a library").unwrap();
        let candidates = vec![file.path().into(), "/nowhere/libnccl.so.2".into()];
        let Err(NcclUnavailable::Library { reason }) = open(candidates) else {
            panic!("a library of no code")
        };
        assert!(
            reason.contains(&file.path().display().to_string()) && !reason.contains("nowhere"),
            "{reason}"
        );
    }

    #[test]
    fn a_library_that_is_not_nccl_is_named_with_the_missing_entry() {
        match open(vec!["libc.so.6".into()]) {
            Err(NcclUnavailable::Symbol { path, symbol }) => {
                assert_eq!((path, symbol), (PathBuf::from("libc.so.6"), "ncclGetVersion"));
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("libc is not NCCL"),
        }
    }
}
