//! The path that a new file takes, and what it keeps of the file there.

use rustix::io::Errno;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// As many as the kernel follows.
const LINKS: usize = 40;

/// The path that `path` leads to, whether a file is there or not.
///
/// # Errors
/// The system's: links in a circle, or one that the kernel does not let this user follow.
pub fn behind_links(path: &Path) -> io::Result<PathBuf> {
    // The kernel refuses links that others planted in a folder for everybody.
    fs::metadata(path).map(drop).or_else(|error| {
        if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
    })?;
    let mut path = path.to_owned();
    for _ in 0..=LINKS {
        let Ok(to) = fs::read_link(&path) else { return Ok(path) };
        path = folder(&path).join(to);
    }
    Err(Errno::LOOP.into())
}

/// The folder that has the name.
pub(crate) fn folder(target: &Path) -> &Path {
    target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives a new file the owner and mode of the one that it replaces, as far as this user may.
pub(crate) fn take_after(file: &File, old: &Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    let mut mode = old.mode() & 0o777;
    if (own.uid(), own.gid()) != (old.uid(), old.gid())
        && fchown(file, Some(old.uid()), Some(old.gid())).is_err()
        && fchown(file, None, Some(old.gid())).is_err()
    {
        // Its group would be another one.
        mode &= !0o070;
    }
    file.set_permissions(fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_to_what_is_there_and_to_what_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("deep")).unwrap();
        symlink("deep/second", at("first")).unwrap();
        symlink("../file", at("deep/second")).unwrap();
        for there in [false, true] {
            assert_eq!(behind_links(&at("first")).unwrap(), at("deep/../file"), "{there}");
            fs::write(at("file"), "").unwrap();
        }
        assert_eq!(behind_links(&at("file")).unwrap(), at("file"));
    }

    #[test]
    fn links_in_a_circle_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        symlink(&a, &b).unwrap();
        symlink(&b, &a).unwrap();
        assert_eq!(behind_links(&a).unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
    }
}
