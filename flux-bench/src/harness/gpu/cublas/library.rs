//! The table of cuBLASLt entry points, loaded once.
//!
//! Invariant: a [`Library`] has every entry point and stays loaded. Results are plain integers, as
//! a newer library may return unknown codes.

use flux_transport::internal::loading;
use std::ffi::{OsString, c_int, c_void};
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
    #[error(transparent)]
    Device(#[from] flux_transport::internal::cuda::CudaError),
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

macro_rules! table {
    ($($name:ident = $symbol:literal ($($type:ty),* $(,)?);)*) => {
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            pub(super) version: unsafe extern "C" fn() -> usize,
            pub(super) path: PathBuf,
            _loaded: libloading::Library,
        }

        impl Library {
            fn bind(path: PathBuf, library: libloading::Library) -> Result<Self, CublasError> {
                let missing = |symbol| CublasError::Symbol { path: path.clone(), symbol };
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the entry point's declaration in cublasLt.h, with
                        // handles as `usize` and enums as integers; `_loaded` outlives the table.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) -> c_int>($symbol) };
                        *symbol.map_err(|_| missing(stringify!($name)))?
                    },)*
                    version: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0") };
                        *symbol.map_err(|_| missing("version"))?
                    },
                    path,
                    _loaded: library,
                })
            }
        }
    };
}

table! {
    create = b"cublasLtCreate\0" (*mut usize);
    destroy = b"cublasLtDestroy\0" (usize);
    layout_create = b"cublasLtMatrixLayoutCreate\0" (*mut usize, c_int, u64, u64, i64);
    layout_destroy = b"cublasLtMatrixLayoutDestroy\0" (usize);
    desc_create = b"cublasLtMatmulDescCreate\0" (*mut usize, c_int, c_int);
    desc_destroy = b"cublasLtMatmulDescDestroy\0" (usize);
    desc_set = b"cublasLtMatmulDescSetAttribute\0" (usize, c_int, *const c_void, usize);
    preference_create = b"cublasLtMatmulPreferenceCreate\0" (*mut usize);
    preference_destroy = b"cublasLtMatmulPreferenceDestroy\0" (usize);
    preference_set = b"cublasLtMatmulPreferenceSetAttribute\0" (usize, c_int, *const c_void, usize);
    heuristic = b"cublasLtMatmulAlgoGetHeuristic\0"
        (usize, usize, usize, usize, usize, usize, usize, c_int, *mut Candidate, *mut c_int);
    algo_ids = b"cublasLtMatmulAlgoGetIds\0" (usize, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut c_int, *mut c_int);
    algo_init = b"cublasLtMatmulAlgoInit\0" (usize, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut Algo);
    algo_capability = b"cublasLtMatmulAlgoCapGetAttribute\0" (*const Algo, c_int, *mut c_void, usize, *mut usize);
    algo_configure = b"cublasLtMatmulAlgoConfigSetAttribute\0" (*mut Algo, c_int, *const c_void, usize);
    algo_check = b"cublasLtMatmulAlgoCheck\0" (usize, usize, usize, usize, usize, usize, *const Algo, *mut Candidate);
    matmul = b"cublasLtMatmul\0"
        (usize, usize, *const c_void, *const c_void, usize, *const c_void, usize, *const c_void, *const c_void, usize, *mut c_void, usize,
         *const Algo, *mut c_void, usize, usize);
}

/// Turns a status into an error that names the call.
pub(super) fn check(call: &'static str, status: c_int) -> Result<(), CublasError> {
    if status == 0 { Ok(()) } else { Err(CublasError::Call { call, status }) }
}

/// The library of this process, loaded at the first call.
pub(super) fn library() -> Result<&'static Library, CublasError> {
    static LIBRARY: OnceLock<Result<Library, CublasError>> = OnceLock::new();
    LIBRARY
        .get_or_init(|| open(candidates(|key| std::env::var_os(key))))
        .as_ref()
        .map_err(Clone::clone)
}

/// Names of the library, the newest first: wheels have only one with a major version.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so", "libcublasLt.so.12"];

/// Paths to try: the user's, then for each name the loader's, toolkits' and wheels'.
fn candidates(env: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let folder = |key: &str| env(key).filter(|v| !v.is_empty()).map(PathBuf::from);
    if let Some(named) = folder("FLUX_CUBLASLT_LIB") {
        return if named.is_dir() {
            NAMES.map(|name| named.join(name)).to_vec()
        } else {
            vec![named]
        };
    }
    let toolkits =
        [folder("CUDA_HOME"), folder("CUDA_PATH"), Some(PathBuf::from("/usr/local/cuda"))]
            .into_iter()
            .flatten();
    let mut folders: Vec<PathBuf> = toolkits.map(|toolkit| toolkit.join("lib64")).collect();
    let wheels = loading::site_packages(&env).into_iter();
    folders.extend(
        wheels
            .flat_map(|site| ["nvidia/cu13/lib", "nvidia/cublas/lib"].map(|lib| site.join(lib)))
            .filter(|lib| lib.is_dir()),
    );
    let mut found: Vec<PathBuf> = folder("FLUX_CUDA_LIB_DIR")
        .into_iter()
        .flat_map(|own| NAMES.map(|name| own.join(name)))
        .collect();
    for name in NAMES {
        // Without a slash the loader searches: LD_LIBRARY_PATH, its cache, what is loaded already.
        found.push(PathBuf::from(name));
        found.extend(folders.iter().map(|folder| folder.join(name)));
    }
    found
}

fn open(candidates: Vec<PathBuf>) -> Result<Library, CublasError> {
    // cuBLASLt's initialisers are made to run in any process at any time.
    let (path, library) = loading::first(candidates)
        .map_err(|none| CublasError::Library { reason: none.to_string() })?;
    Library::bind(path, library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_name_is_tried_everywhere_before_the_next() {
        let venv = tempfile::tempdir().unwrap();
        let wheel = venv.path().join("lib/python3.12/site-packages/nvidia/cublas/lib");
        std::fs::create_dir_all(&wheel).unwrap();
        let (own, toolkit) = (PathBuf::from("/own"), PathBuf::from("/usr/local/cuda/lib64"));
        let found = candidates(|key| match key {
            "VIRTUAL_ENV" => Some(venv.path().into()),
            "FLUX_CUDA_LIB_DIR" => Some(own.clone().into()),
            _ => None,
        });
        let of = |name: &str| [PathBuf::from(name), toolkit.join(name), wheel.join(name)];
        let expected: Vec<PathBuf> = NAMES
            .map(|name| own.join(name))
            .into_iter()
            .chain(NAMES.iter().flat_map(|name| of(name)))
            .collect();
        assert_eq!(found, expected);
        let named = candidates(|key| (key == "FLUX_CUBLASLT_LIB").then(|| venv.path().into()));
        assert_eq!(named, NAMES.map(|name| venv.path().join(name)));
    }

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
        assert_eq!(error, CublasError::Symbol { path: "libc.so.6".into(), symbol: "create" });
    }
}
