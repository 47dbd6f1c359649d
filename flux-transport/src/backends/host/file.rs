//! Memory that processes share: an anonymous file, mapped by every rank.
//!
//! Invariant: a file's length is sealed before its descriptor is shared, checked before mapping,
//! and all its pages are allocated. So no access can fail, and the memory goes with the last
//! mapping.

use crate::backends::error::TransportError;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Resource;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// What keeps a file as long as it is: no rank can cut it under another's feet, or make it grow.
const LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Allocated piece by piece: an interrupted call may give back what it had taken.
const PIECE: u64 = 4 << 20;

/// A whole file, mapped for reading and writing.
#[derive(Debug)]
pub(crate) struct MappedFile {
    memory: NonNull<c_void>,
    bytes: usize,
    address: u64,
}

// SAFETY: a mapping is only memory; access to its bytes is by address and under the signal
// protocol.
unsafe impl Send for MappedFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for MappedFile {}

/// A file of `bytes` zeros, all of them taken.
pub(crate) fn create(what: &'static str, bytes: u64) -> Result<OwnedFd, TransportError> {
    let refused = |errno: Errno| match errno {
        Errno::NOSPC | Errno::NOMEM | Errno::FBIG => TransportError::OutOfMemory { what, bytes },
        errno => TransportError::Io {
            what: "making memory that processes can share",
            source: errno.into(),
        },
    };
    within(rustix::process::getrlimit(Resource::Fsize).current, bytes)?;
    let file = rustix::fs::memfd_create("flux", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(refused)?;
    // A length that cannot be is refused before any memory is taken.
    rustix::fs::ftruncate(&file, bytes).map_err(refused)?;
    for first in (0..bytes).step_by(PIECE as usize) {
        let take = || {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), first, PIECE.min(bytes - first))
        };
        rustix::io::retry_on_intr(take).map_err(refused)?;
    }
    rustix::fs::fcntl_add_seals(&file, LENGTH | SealFlags::SEAL).map_err(refused)?;
    Ok(file)
}

/// Refuses a file beyond the process's limit, at which the system would kill the process.
fn within(limit: Option<u64>, bytes: u64) -> Result<(), TransportError> {
    let Some(limit) = limit.filter(|&limit| bytes > limit) else { return Ok(()) };
    let why =
        format!("it has {bytes} bytes, and the process's limit to files is {limit} (ulimit -f)");
    Err(TransportError::Io {
        what: "making memory that processes can share",
        source: std::io::Error::other(why),
    })
}

impl MappedFile {
    /// Maps the file of `bytes` that [`create`] made, here or in another process.
    ///
    /// # Errors
    /// In words, what is wrong with the descriptor.
    pub(crate) fn map(file: BorrowedFd<'_>, bytes: u64) -> Result<Self, String> {
        let stat = rustix::fs::fstat(file)
            .map_err(|errno| format!("its descriptor cannot be looked at: {errno}"))?;
        if u64::try_from(stat.st_size) != Ok(bytes) {
            return Err(format!("its memory has {} bytes, not {bytes}", stat.st_size));
        }
        // Only files in memory can be sealed: asking refuses all others.
        if !rustix::fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(LENGTH)) {
            return Err("its descriptor is not of memory with a sealed length".to_owned());
        }
        let length = usize::try_from(bytes)
            .map_err(|_| format!("{bytes} bytes are more than this process can map"))?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this
        // process.
        let memory = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, file.as_fd(), 0)
        };
        let memory = memory
            .map_err(|errno| format!("{bytes} bytes of its memory cannot be mapped: {errno}"))?;
        let address = memory.expose_provenance() as u64;
        let memory =
            NonNull::new(memory).ok_or_else(|| "its memory was mapped at address 0".to_owned())?;
        Ok(Self { memory, bytes: length, address })
    }

    /// Address of the first byte, on the border of a page.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length; whoever uses its address holds it.
        if let Err(error) = unsafe { rustix::mm::munmap(self.memory.as_ptr(), self.bytes) } {
            tracing::error!(%error, "shared memory cannot be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn refusal(file: &impl AsFd, bytes: u64) -> String {
        MappedFile::map(file.as_fd(), bytes).unwrap_err()
    }

    #[test]
    fn a_file_beyond_the_limit_is_refused_before_the_system_ends_the_process_for_it() {
        assert!(within(None, u64::MAX).is_ok() && within(Some(4096), 4096).is_ok());
        let error = within(Some(4096), 4097).unwrap_err();
        assert!(
            matches!(&error, TransportError::Io { .. })
                && error.to_string().contains("4096 (ulimit -f)"),
            "{error}"
        );
    }

    #[test]
    fn two_mappings_of_a_file_are_the_same_memory() {
        let file = create("test", 1 << 16).unwrap();
        let maps = [(); 2].map(|()| MappedFile::map(file.as_fd(), 1 << 16).unwrap());
        drop(file);
        let [a, b] = maps.each_ref().map(|map| super::super::block::pointer(map.address()));
        // SAFETY: both are mapped for 64 KiB.
        unsafe {
            assert_eq!(b.add(65535).read_volatile(), 0);
            a.add(65535).write_volatile(7);
            assert_eq!(b.add(65535).read_volatile(), 7);
        }
    }

    #[test]
    fn a_descriptor_that_another_could_cut_is_refused() {
        let open =
            rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&open, 4096).unwrap();
        assert!(refusal(&open, 4096).contains("sealed"));
        let mut on_disk = tempfile::tempfile().unwrap();
        on_disk.write_all(&[0; 4096]).unwrap();
        assert!(refusal(&on_disk, 4096).contains("sealed"));
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(refusal(&pipe, 4096).contains("0 bytes, not 4096"));
    }

    #[test]
    fn all_of_a_file_is_taken_when_it_is_made() {
        for bytes in [4096, PIECE, 2 * PIECE + 4096] {
            let stat = rustix::fs::fstat(create("test", bytes).unwrap()).unwrap();
            assert!(
                u64::try_from(stat.st_size) == Ok(bytes)
                    && stat.st_blocks.cast_unsigned() * 512 >= bytes,
                "{} blocks of {bytes} bytes",
                stat.st_blocks
            );
        }
    }

    #[test]
    fn a_file_keeps_its_length() {
        let file = create("test", 8192).unwrap();
        assert!(refusal(&file, 4096).contains("8192 bytes, not 4096"));
        for length in [4096, 16384] {
            assert_eq!(rustix::fs::ftruncate(&file, length), Err(Errno::PERM));
        }
    }
}
