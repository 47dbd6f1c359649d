//! Files that ranks leave behind: in their own folder, and in the system's folder of shared memory.
//!
//! Invariant: other programs' files do not count. Shared memory counts where it is new, of this
//! user, named as this library or NCCL would, and held by no live process.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::DirEntry;
use std::io;
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How often names are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// All that lies in a folder that is nobody's but the ranks'.
pub(super) fn all(folder: &Path) -> io::Result<Vec<PathBuf>> {
    std::fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path())).collect()
}

/// Names of shared memory, as they were when the ranks began.
pub(super) struct SharedMemory {
    folder: PathBuf,
    before: BTreeSet<(OsString, u64)>,
}

impl SharedMemory {
    /// As they are now; none where there is no such folder.
    pub(super) fn now(folder: &Path) -> Self {
        // With the file's number: who gives a name anew makes another file.
        let before = entries(folder).map(|entry| (entry.file_name(), entry.ino())).collect();
        Self { folder: folder.to_owned(), before }
    }

    /// What ended ranks have left. A name counts only if it stays, unheld, until the limit: another
    /// program may be about to map it.
    pub(super) fn left(&self, limit: Instant) -> Vec<PathBuf> {
        loop {
            let left = self.unheld();
            if left.is_empty() || Instant::now() >= limit {
                return left;
            }
            std::thread::sleep(LOOK);
        }
    }

    fn unheld(&self) -> Vec<PathBuf> {
        let user = rustix::process::geteuid().as_raw();
        let ours = |entry: &DirEntry| {
            is_ours(&entry.file_name().to_string_lossy())
                && entry.metadata().is_ok_and(|meta| meta.uid() == user)
        };
        let new = |entry: &DirEntry| !self.before.contains(&(entry.file_name(), entry.ino()));
        let mut left: Vec<PathBuf> = entries(&self.folder)
            .filter(|entry| ours(entry) && new(entry))
            .map(|entry| entry.path())
            .collect();
        if !left.is_empty() {
            let held = held_in(&self.folder);
            left.retain(|path| !held.contains(path));
        }
        left
    }
}

/// Whether this library or NCCL would call its memory so.
fn is_ours(name: &str) -> bool {
    name.contains("flux") || name.starts_with("nccl-")
}

/// What is there now. What goes between the listing and the look is not left behind.
fn entries(folder: &Path) -> impl Iterator<Item = DirEntry> {
    std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok)
}

/// Files of a folder that live processes have mapped or open, as far as this user may see them.
fn held_in(folder: &Path) -> BTreeSet<PathBuf> {
    let mut held = BTreeSet::new();
    for process in entries(Path::new("/proc")) {
        if !process.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let maps = std::fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        held.extend(
            maps.lines().filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..]))),
        );
        held.extend(
            entries(&process.path().join("fd"))
                .filter_map(|open| std::fs::read_link(open.path()).ok()),
        );
    }
    held.retain(|path| path.parent() == Some(folder));
    held
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;
    use std::fs::File;

    const SOON: Duration = Duration::from_millis(60);

    fn named(paths: &[PathBuf]) -> Vec<String> {
        let mut names: Vec<String> = paths
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn everything_in_a_folder_of_their_own_is_the_ranks() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(all(folder.path()).unwrap(), [""; 0].map(PathBuf::from));
        File::create(folder.path().join("a")).unwrap();
        std::fs::create_dir(folder.path().join("b")).unwrap();
        assert_eq!(named(&all(folder.path()).unwrap()), ["a", "b"]);
        assert!(all(&folder.path().join("gone")).is_err(), "who removes it has not been looked at");
    }

    #[test]
    fn shared_memory_of_flux_and_of_nccl_that_came_since_and_that_nobody_holds_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str| File::create(folder.path().join(name)).unwrap();
        drop([make("nccl-before"), make("nccl-again")]);
        let memory = SharedMemory::now(folder.path());
        drop([make("nccl-AbC1"), make("flux-7"), make("sem.other")]);
        // The old one stays open, so that the new one is another file for certain.
        let old = File::open(folder.path().join("nccl-again")).unwrap();
        std::fs::remove_file(folder.path().join("nccl-again")).unwrap();
        drop(make("nccl-again"));
        assert_eq!(
            named(&memory.left(Instant::now() + SOON)),
            ["flux-7", "nccl-AbC1", "nccl-again"]
        );
        drop(old);
    }

    #[test]
    fn what_a_live_process_has_open_or_mapped_is_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let memory = SharedMemory::now(folder.path());
        let open = File::create(folder.path().join("nccl-open")).unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("nccl-mapped"))
            .unwrap();
        file.set_len(4096).unwrap();
        let (access, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping, at no address in particular.
        let mapped =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, flags, &file, 0) }
                .unwrap();
        drop(file);
        assert_eq!(named(&memory.left(Instant::now() + SOON)), [""; 0]);
        drop(open);
        assert_eq!(named(&memory.left(Instant::now() + SOON)), ["nccl-open"]);
        // SAFETY: the mapping of above, of which nothing is used.
        unsafe { rustix::mm::munmap(mapped, 4096) }.unwrap();
        assert_eq!(named(&memory.left(Instant::now() + SOON)), ["nccl-mapped", "nccl-open"]);
    }

    #[test]
    fn a_name_that_goes_within_the_limit_is_not_left() {
        let folder = tempfile::tempdir().unwrap();
        let memory = SharedMemory::now(folder.path());
        let path = folder.path().join("nccl-AbC1");
        drop(File::create(&path).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(SOON);
                std::fs::remove_file(&path).unwrap();
            });
            assert_eq!(named(&memory.left(Instant::now() + AMPLE)), [""; 0]);
        });
    }
}
