//! The GPUs of a test.

#[path = "../../../flux-kernels/tests/skipped/mod.rs"]
pub(crate) mod skipped;

use flux_transport::cuda;

/// How many GPUs there are, where the kernels run on all of them; else the test is skipped.
pub(crate) fn gpus(test: &str) -> Option<u32> {
    found().map_err(|why| skipped::skip(test, &why)).ok()
}

fn found() -> Result<u32, String> {
    cuda::available().map_err(|why| why.to_string())?;
    let count = cuda::device_count().map_err(|why| why.to_string())?;
    for ordinal in 0..count {
        let info = cuda::device_info(ordinal).map_err(|why| why.to_string())?;
        skipped::suits(&info.name, info.compute)?;
    }
    Ok(count)
}
