//! The GPUs that tests run on; for tests of any crate, beside its `skipped`.

/// How many there are, where the kernels run on all of them, or why there are none to test on.
pub(crate) fn count() -> Result<u32, String> {
    flux_cuda::available().map_err(|why| why.to_string())?;
    let count = flux_cuda::device_count().map_err(|why| why.to_string())?;
    for ordinal in 0..count {
        let info = flux_cuda::device_info(ordinal).map_err(|why| why.to_string())?;
        flux_kernels::KernelTarget::of(info.compute)
            .map_err(|why| format!("{}: {why}", info.name))?;
    }
    Ok(count)
}
