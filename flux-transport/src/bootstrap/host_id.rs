//! The identity of a host.
//!
//! Invariant: two processes have the same id only if they can meet in the private directory of a
//! Unix socket: same running kernel, same run-time directory, same user.

use std::ffi::OsStr;
use std::path::Path;

use sha2::{Digest, Sha256};

pub(super) const HOST_ID_BYTES: usize = 16;

/// A host, as far as processes on it can pass each other descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HostId(pub(super) [u8; HOST_ID_BYTES]);

impl HostId {
    /// Of this process, which meets others of its host below `directory`.
    pub(super) fn here(directory: &Path, said: Option<&OsStr>) -> Self {
        // Each part after its length. An unknown boot id or a missing directory leaves its part
        // empty.
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let directory = rustix::fs::stat(directory)
            .map(|stat| [stat.st_dev.to_le_bytes(), stat.st_ino.to_le_bytes()].concat());
        let uid = rustix::process::geteuid().as_raw().to_le_bytes();
        let parts = [
            &boot[..],
            &directory.unwrap_or_default(),
            &uid,
            said.unwrap_or_default().as_encoded_bytes(),
        ];
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let hash: [u8; 32] = hash.finalize().into();
        Self(std::array::from_fn(|at| hash[at]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_directory_and_what_is_said_of_it() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let here = HostId::here(a.path(), None);
        assert_eq!(here, HostId::here(a.path(), None));
        assert_ne!(here, HostId::here(b.path(), None));
        assert_ne!(here, HostId::here(a.path(), Some(OsStr::new("other"))));
        // The directory itself counts, not its name.
        let link = b.path().join("link");
        std::os::unix::fs::symlink(a.path(), &link).unwrap();
        assert_eq!(here, HostId::here(&link, None));
    }
}
