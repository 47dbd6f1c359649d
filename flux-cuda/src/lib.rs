//! The CUDA driver, without a panic where it is missing.
//!
//! Invariant: nothing calls the driver before [`available`] succeeded. Results are plain integers:
//! a newer driver may return unknown codes.

mod context;
pub mod current;
mod driver;
mod error;
mod info;
pub mod library;
mod memory;
mod module;
mod near;
mod patience;
mod staging;
mod stream;
mod vmm;

pub use context::CudaDevice;
pub use context::Current;
pub use error::{CudaError, OLDEST_DRIVER, Unavailable};
pub use info::{
    ComputeCapability, DeviceInfo, DeviceUuid, ParseUuidError, can_access_peer, device_count,
    device_info, driver_version, peer_matrix,
};
pub use memory::{DeviceBlock, PinnedBlock};
pub use module::{Function, Launch, Module};
pub use near::near;
pub use stream::{Capture, capture};
pub use stream::{Event, SideStream, is_capturing};

pub use memory::{
    copy_async, copy_rows_async, fill_words, read, wait_value_async, write_value_async,
};
pub use patience::{done_by, is_by, keep, look, usable};
pub use staging::{
    Registration, RowCopy, Rows, WordOp, copy_in_async, copy_out_async, words_async,
};
pub use stream::stream_id;
pub use vmm::{Allocation, Handles, Mapping, round_up};

/// Whether this process can use CUDA: driver present, complete, initialised, with a device. The
/// first call decides for the process.
///
/// # Errors
/// [`Unavailable`] says what is missing.
pub fn available() -> Result<(), Unavailable> {
    driver::driver().map(|_| ())
}

/// A device size as the driver takes it; it fits on every platform with a driver.
pub fn host_size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    // What a machine without CUDA must do; on one with CUDA the same calls succeed.
    #[test]
    fn every_entry_answers_without_a_panic() {
        match available() {
            Ok(()) => {
                assert!(device_count().unwrap() > 0);
                assert!(driver_version().unwrap() > 0);
            }
            Err(why) => {
                assert!(!why.to_string().is_empty());
                assert_eq!(device_count(), Err(CudaError::Unavailable(why.clone())));
                assert_eq!(driver_version(), Err(CudaError::Unavailable(why.clone())));
                assert_eq!(device_info(0), Err(CudaError::Unavailable(why.clone())));
                assert_eq!(can_access_peer(0, 1), Err(CudaError::Unavailable(why.clone())));
                assert_eq!(peer_matrix(), Err(CudaError::Unavailable(why.clone())));
                assert_eq!(CudaDevice::open(0).unwrap_err(), CudaError::Unavailable(why.clone()));
                assert_eq!(capture(0), Err(CudaError::Unavailable(why)));
            }
        }
    }
}
