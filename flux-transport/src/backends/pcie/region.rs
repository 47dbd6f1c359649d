//! A rank's shared region of pinned host memory, through which all its traffic goes.
//!
//! Invariant: a region is mapped and registered once in its own process, and once for each rank of
//! another that opens it. Its pages are near the owner's device if possible: on a host all GPUs
//! write slower than they read.

use super::layout::{Layout, OP_HASHES, POISONED};
use crate::backends::device::calls::OpHashes;
use crate::backends::error::TransportError;
use crate::backends::host::file::{self, MappedFile};
use crate::backends::registry::Registry;
use flux_core::layout::BROKEN_BYTES;
use flux_cuda::{CudaDevice, CudaError, Registration, host_size, near};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

#[derive(Debug)]
pub(super) struct PinnedRegion {
    key: u64,
    pinned: Registration<MappedFile>,
    pub(super) layout: Layout,
}

static REGIONS: Registry<PinnedRegion> = Registry::new();

impl PinnedRegion {
    /// Takes memory for the region of a rank on `device`, all words at `initial`, and its
    /// descriptor for other processes.
    pub(super) fn create(
        device: &CudaDevice,
        layout: Layout,
        initial: u32,
    ) -> Result<(Arc<Self>, OwnedFd), TransportError> {
        let what = "pinned memory of the host";
        let bytes = layout.bytes().ok_or(TransportError::OutOfMemory { what, bytes: u64::MAX })?;
        let file = near(&device.info().pci, || file::create(what, bytes))?;
        let key = REGIONS.next_key();
        let failed = |why| TransportError::Io {
            what: "mapping memory of the host",
            source: std::io::Error::other(why),
        };
        let map = MappedFile::map(file.as_fd(), bytes).map_err(failed)?;
        let region = Arc::new(Self::pin(device, key, layout, map)?);
        // What ranks say on the pad about themselves begins as 0, as the first two words of all.
        let said = layout.pad()..layout.pad() + BROKEN_BYTES;
        for offset in
            (POISONED + 4..layout.words_bytes()).step_by(4).filter(|offset| !said.contains(offset))
        {
            region.word(offset).store(initial, Ordering::Relaxed);
        }
        REGIONS.insert(key, &region);
        Ok((region, file))
    }

    /// The region of a rank of this process.
    pub(super) fn find(key: u64) -> Option<Arc<Self>> {
        REGIONS.find(key)
    }

    /// Opens the region of a rank of another process.
    ///
    /// # Errors
    /// In words.
    pub(super) fn open(
        device: &CudaDevice,
        file: BorrowedFd<'_>,
        layout: Layout,
    ) -> Result<Arc<Self>, String> {
        let bytes =
            layout.bytes().ok_or_else(|| "its memory is larger than there can be".to_owned())?;
        let map = MappedFile::map(file, bytes)?;
        Ok(Arc::new(Self::pin(device, 0, layout, map).map_err(|error| error.to_string())?))
    }

    fn pin(
        device: &CudaDevice,
        key: u64,
        layout: Layout,
        map: MappedFile,
    ) -> Result<Self, CudaError> {
        let (host, bytes) = (map.address(), layout.bytes().map_or(0, host_size));
        // SAFETY: a file's mapping begins and ends on borders of pages and lives as long as it.
        Ok(Self { key, pinned: unsafe { Registration::new(device, map, host, bytes) }?, layout })
    }

    /// Names the region within this process.
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    /// The first byte, for the host.
    pub(super) fn host(&self) -> u64 {
        self.pinned.memory().address()
    }

    pub(super) fn address(&self, device: &CudaDevice) -> Result<u64, CudaError> {
        self.pinned.address(device)
    }

    /// What the owner's host says of its calls.
    pub(super) fn op_hashes(&self) -> OpHashes<'_> {
        let first =
            std::ptr::with_exposed_provenance::<AtomicU64>(host_size(self.host() + OP_HASHES));
        // SAFETY: in bounds by the layout, aligned to a line, mapped as long as `self`; these bytes
        // are accessed by these words only.
        OpHashes::new(unsafe { std::slice::from_raw_parts(first, OpHashes::WORDS) })
    }

    pub(super) fn word(&self, offset: u64) -> &AtomicU32 {
        assert!(offset < self.layout.words_bytes(), "{offset} is no offset of a word");
        let address = std::ptr::with_exposed_provenance_mut::<u32>(host_size(self.host() + offset));
        // SAFETY: in bounds, aligned, and mapped as long as `self`; every access to these bytes is
        // by whole words.
        unsafe { AtomicU32::from_ptr(address) }
    }
}

impl Drop for PinnedRegion {
    fn drop(&mut self) {
        REGIONS.remove(self.key);
    }
}
