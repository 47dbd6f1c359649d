//! The NVRTC of tests: one that is installed, or the one that `cargo xtask kernels` has fetched.
//! Without either a test is skipped, and fails where `CI` is set: there `cargo xtask test` fetches
//! one first.

use crate::skipped;
use flux_kernels::nvrtc::Nvrtc;
use std::path::Path;
use std::sync::OnceLock;

/// The compiler; `None` where `test` is skipped.
pub(crate) fn nvrtc(test: &str) -> Option<&'static Nvrtc> {
    static NVRTC: OnceLock<Option<Nvrtc>> = OnceLock::new();
    let found = Nvrtc::get().ok().or_else(|| {
        let fetched =
            Path::new(env!("CARGO_TARGET_TMPDIR")).join("../nvrtc/nvidia/cu13/lib/libnvrtc.so.13");
        NVRTC.get_or_init(|| Nvrtc::open(&fetched).ok()).as_ref()
    });
    if found.is_none() {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI is set, and there is no NVRTC here; `cargo xtask kernels` fetches one"
        );
        skipped::skip(test, &"no NVRTC here; `cargo xtask kernels` fetches one");
    }
    found
}
