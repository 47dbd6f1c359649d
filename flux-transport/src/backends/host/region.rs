//! What a rank's peers write to: its data region and its pad.
//!
//! Invariant: whoever has a region's address holds the region, so it outlives a peer's last write.
//! Threads share one region by its key; each process has its own mapping.

use super::block::Block;
use super::file::{self, MappedFile};
use crate::backends::error::TransportError;
use crate::backends::registry::Registry;
use crate::backends::view::checked_bytes;
use flux_core::layout::WorkspaceSize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A data region and, behind it, a pad.
#[derive(Debug)]
pub(super) struct Region {
    memory: Memory,
    data_bytes: u64,
    /// Under which threads find it, or 0.
    key: u64,
}

#[derive(Debug)]
enum Memory {
    Heap(Block),
    File(MappedFile),
}

/// The regions of this process that its threads share, by key.
static REGIONS: Registry<Region> = Registry::new();

impl Region {
    /// A region of zeros that the threads of this process can find.
    pub(super) fn for_threads(size: WorkspaceSize) -> Result<Arc<Self>, TransportError> {
        let (data_bytes, bytes) = checked_bytes(&size)?;
        let memory = Memory::Heap(Block::new("workspace", bytes)?);
        let key = REGIONS.next_key();
        let region = Arc::new(Self { memory, data_bytes, key });
        REGIONS.insert(key, &region);
        Ok(region)
    }

    /// A region of zeros, and the descriptor that makes it another process's too.
    pub(super) fn for_processes(
        size: WorkspaceSize,
    ) -> Result<(Arc<Self>, OwnedFd), TransportError> {
        let file = file::create("workspace", checked_bytes(&size)?.1)?;
        let what = "mapping the workspace";
        let region = Self::open(file.as_fd(), size)
            .map_err(|why| TransportError::Io { what, source: std::io::Error::other(why) })?;
        Ok((region, file))
    }

    /// Under which threads find it; 0 where they do not.
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    /// The region with this key, if its owner holds it.
    pub(super) fn find(key: u64) -> Option<Arc<Self>> {
        REGIONS.find(key)
    }

    /// The region of `size` that a descriptor is of; in words, what is wrong with it.
    pub(super) fn open(file: BorrowedFd<'_>, size: WorkspaceSize) -> Result<Arc<Self>, String> {
        let (data_bytes, bytes) = checked_bytes(&size).map_err(|error| error.to_string())?;
        Ok(Arc::new(Self {
            memory: Memory::File(MappedFile::map(file, bytes)?),
            data_bytes,
            key: 0,
        }))
    }

    pub(super) fn data(&self) -> u64 {
        match &self.memory {
            Memory::Heap(block) => block.address(),
            Memory::File(file) => file.address(),
        }
    }

    pub(super) fn pad(&self) -> u64 {
        self.data() + self.data_bytes
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        REGIONS.remove(self.key);
    }
}
