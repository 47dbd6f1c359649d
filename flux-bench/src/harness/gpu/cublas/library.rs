//! The table of cuBLASLt entry points, loaded once.
//!
//! Invariant: a [`Library`] has every entry point and stays loaded. Results are plain integers, as
//! a newer library may return unknown codes.

use crate::machine::library_version;
use flux_core::Scales;
use flux_cuda::library::{self, Search};
use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Why the baseline GEMM cannot be had, or failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CublasError {
    #[error(
        "no cuBLASLt library can be loaded: {reason}; install CUDA's libraries or PyTorch, or set \
         FLUX_CUBLASLT_LIB"
    )]
    Library {
        /// What the loader reported, or the names and paths that were tried.
        reason: String,
    },
    #[error("{} has no `{symbol}`", path.display())]
    Symbol { path: PathBuf, symbol: &'static str },
    #[error("{call} failed with status {status}")]
    Call { call: &'static str, status: i32 },
    /// The heuristic knows no algorithm for the shape.
    #[error("cuBLASLt has no algorithm for m={m} n={n} k={k}")]
    NoAlgorithm { m: u32, n: u32, k: u32 },
    /// The library or the device knows no scales of this form.
    #[error(
        "cuBLASLt {} has no GEMM with scales by {scales}: {why}; scales of rows and blocks need \
         cuBLAS 12.9 or later and a GPU of compute capability 9.0",
        library_version(*version as u32)
    )]
    Scales { scales: Scales, version: usize, why: Box<CublasError> },
    #[error(transparent)]
    Device(#[from] flux_cuda::CudaError),
}

/// `cublasLtMatmulAlgo_t`: opaque, copied freely.
pub(super) type Algo = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    pub(super) algo: Algo,
    pub(super) workspace: usize,
    pub(super) state: c_int,
    pub(super) waves: f32,
    pub(super) reserved: [c_int; 4],
}

flux_cuda::table! {
    /// cuBLASLt's entry points.
    pub(super) struct Library {
        version = "cublasLtGetVersion" () -> usize;
        create = "cublasLtCreate" (*mut usize) -> c_int;
        destroy = "cublasLtDestroy" (usize) -> c_int;
        layout_create = "cublasLtMatrixLayoutCreate" (*mut usize, c_int, u64, u64, i64) -> c_int;
        layout_destroy = "cublasLtMatrixLayoutDestroy" (usize) -> c_int;
        desc_create = "cublasLtMatmulDescCreate" (*mut usize, c_int, c_int) -> c_int;
        desc_destroy = "cublasLtMatmulDescDestroy" (usize) -> c_int;
        desc_set = "cublasLtMatmulDescSetAttribute" (usize, c_int, *const c_void, usize) -> c_int;
        preference_create = "cublasLtMatmulPreferenceCreate" (*mut usize) -> c_int;
        preference_destroy = "cublasLtMatmulPreferenceDestroy" (usize) -> c_int;
        preference_set = "cublasLtMatmulPreferenceSetAttribute"
            (usize, c_int, *const c_void, usize) -> c_int;
        heuristic = "cublasLtMatmulAlgoGetHeuristic"
            (usize, usize, usize, usize, usize, usize, usize, c_int, *mut Candidate,
             *mut c_int) -> c_int;
        algo_ids = "cublasLtMatmulAlgoGetIds"
            (usize, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut c_int,
             *mut c_int) -> c_int;
        algo_init = "cublasLtMatmulAlgoInit"
            (usize, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut Algo) -> c_int;
        algo_capability = "cublasLtMatmulAlgoCapGetAttribute"
            (*const Algo, c_int, *mut c_void, usize, *mut usize) -> c_int;
        algo_configure = "cublasLtMatmulAlgoConfigSetAttribute"
            (*mut Algo, c_int, *const c_void, usize) -> c_int;
        algo_check = "cublasLtMatmulAlgoCheck"
            (usize, usize, usize, usize, usize, usize, *const Algo, *mut Candidate) -> c_int;
        matmul = "cublasLtMatmul"
            (usize, usize, *const c_void, *const c_void, usize, *const c_void, usize, *const c_void, *const c_void, usize, *mut c_void, usize,
             *const Algo, *mut c_void, usize, usize) -> c_int;
    }
}

/// Turns a status into an error that names the call.
pub(super) fn check(call: &'static str, status: c_int) -> Result<(), CublasError> {
    if status == 0 { Ok(()) } else { Err(CublasError::Call { call, status }) }
}

/// Where cuBLASLt may be.
const SEARCH: Search = Search {
    names: &["libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12"],
    variable: "FLUX_CUBLASLT_LIB",
    wheels: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    loader_first: false,
};

/// The library of this process, loaded at the first call, and the file that it came from.
pub(super) fn loaded() -> Result<&'static (PathBuf, Library), CublasError> {
    static LIBRARY: OnceLock<Result<(PathBuf, Library), CublasError>> = OnceLock::new();
    LIBRARY.get_or_init(|| open(SEARCH.candidates())).as_ref().map_err(Clone::clone)
}

fn open(candidates: Vec<PathBuf>) -> Result<(PathBuf, Library), CublasError> {
    let (path, library) = library::first(candidates)
        .map_err(|none| CublasError::Library { reason: none.to_string() })?;
    // SAFETY: the entries are declared as in cublasLt.h.
    match unsafe { Library::bind(library) } {
        Ok(library) => Ok((path, library)),
        Err(missing) => Err(CublasError::Symbol { path, symbol: missing.symbol }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_names_what_was_tried() {
        let error = open(vec!["/nowhere/libcublasLt.so".into()]).unwrap_err().to_string();
        assert!(
            error.contains("/nowhere/libcublasLt.so") && error.contains("FLUX_CUBLASLT_LIB"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_is_no_library_is_the_error_though_others_are_missing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "not a library").unwrap();
        let error = open(vec![file.path().into(), "/nowhere/libcublasLt.so".into()])
            .unwrap_err()
            .to_string();
        // The loader's own words, which name the file, and not those of the call alone.
        assert!(error.contains(&format!("{}: file too short", file.path().display())), "{error}");
        assert!(!error.contains("nowhere") && !error.contains("dlopen"), "{error}");
    }

    #[test]
    fn a_library_that_is_not_cublas_is_named_with_the_missing_entry() {
        let error = open(vec!["libc.so.6".into()]).unwrap_err();
        assert_eq!(
            error,
            CublasError::Symbol { path: "libc.so.6".into(), symbol: "cublasLtGetVersion" }
        );
    }
}
