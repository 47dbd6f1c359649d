//! The baseline GEMM: cuBLASLt, with an algorithm chosen by timing.

mod algorithms;
mod gemm;
mod library;

pub use gemm::{Gemm, GemmOperands, GemmShape};
pub(crate) use library::CublasError;

use crate::machine::library_version;
use std::path::PathBuf;

/// The library's version, as in `13.1.0`.
pub(crate) fn version() -> Result<String, CublasError> {
    available().map(|(_, version)| library_version(version as u32))
}

/// The cuBLASLt of this process: its file, and its version as `10000 * major + 100 * minor +
/// patch`.
///
/// # Errors
/// `CublasError` lists what was tried.
pub fn available() -> Result<(PathBuf, usize), CublasError> {
    let (path, library) = library::loaded()?;
    // SAFETY: takes nothing and reads a constant.
    Ok((path.clone(), unsafe { (library.version)() }))
}
