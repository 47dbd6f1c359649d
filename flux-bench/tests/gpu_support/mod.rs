//! The GPUs of a test.

#[path = "../../../flux-ops/tests/common/gpus.rs"]
mod all;
#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
pub(crate) mod skipped;

/// How many GPUs there are, where the kernels run on all of them; else the test is skipped.
pub(crate) fn gpus(test: &str) -> Option<u32> {
    all::count().map_err(|why| skipped::skip(test, &why)).ok()
}
