//! Verdicts on disk, so that a machine is asked once a boot.
//!
//! Invariant: an entry counts only if it is whole, of this user, and for the same devices, driver,
//! boot and version. Files appear whole.

use super::report::{ChildReport, Report};
use flux_cuda::DeviceUuid;
use flux_files::NewFile;
use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

const LIMIT: u64 = 1 << 20;
const OTHERS_WRITE: u32 = 0o022;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CacheKey(String);

impl CacheKey {
    /// The key of these devices; `None` if the boot or the driver is unknown.
    pub(super) fn here(devices: &[DeviceUuid]) -> Option<Self> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        // The kernel's part of the driver, where it shows; the library's always.
        let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        let library = flux_cuda::driver_version().ok()?;
        Some(Self::of(
            devices,
            boot.trim(),
            &format!("{library} {}", module.lines().next().unwrap_or_default()),
        ))
    }

    pub(super) fn of(devices: &[DeviceUuid], boot: &str, driver: &str) -> Self {
        let mut devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
        devices.sort();
        // The empty line ends it: no key is how another begins.
        Self(format!(
            "flux {}\nboot {boot}\ndriver {driver}\n{}\n\n",
            env!("CARGO_PKG_VERSION"),
            devices.join("\n")
        ))
    }

    /// The file's place in the folder of the cache.
    fn file(&self, folder: &Path) -> PathBuf {
        let digest = Sha256::digest(&self.0);
        folder.join("peers").join(hex(&digest[..8]))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _infallible = write!(text, "{byte:02x}");
        text
    })
}

/// The folder of the cache: `FLUX_CACHE_DIR`, else `flux` of the user's cache folder.
pub(super) fn folder(env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || {
        folder("XDG_CACHE_HOME")
            .or_else(|| Some(folder("HOME")?.join(".cache")))
            .map(|cache| cache.join("flux"))
    };
    folder("FLUX_CACHE_DIR").or_else(user)
}

/// The verdict for `key`, and its file.
pub(super) fn read(folder: &Path, key: &CacheKey) -> Option<(Report, PathBuf)> {
    let path = key.file(folder);
    let text = own(&path).inspect_err(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            tracing::warn!(path = %path.display(), %error, "a verdict on disk is not used");
        }
    });
    let rest = text.ok()?;
    let (sum, rest) = rest.split_once('\n')?;
    if sum != hex(&Sha256::digest(rest)) {
        return None;
    }
    match ChildReport::decode(rest.strip_prefix(&key.0)?)? {
        ChildReport::Report(report) => Some((report, path)),
        ChildReport::Cannot(_) => None,
    }
}

/// The text of a plain file that this user, and nobody else, can write.
fn own(path: &Path) -> io::Result<String> {
    let fd = rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )?;
    let file = File::from(fd);
    let meta = file.metadata()?;
    let own = meta.is_file()
        && meta.uid() == rustix::process::geteuid().as_raw()
        && meta.mode() & OTHERS_WRITE == 0;
    if !own || meta.len() > LIMIT {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "it is not a file that only this user can write",
        ));
    }
    let mut text = String::new();
    file.take(LIMIT).read_to_string(&mut text)?;
    Ok(text)
}

/// Keeps a verdict. A folder that cannot be written costs time only.
pub(super) fn write(folder: &Path, key: &CacheKey, report: &Report) {
    let path = key.file(folder);
    if let Err(error) =
        place(&path, &(key.0.clone() + &ChildReport::Report(report.clone()).encode()))
    {
        tracing::warn!(
            path = %path.display(),
            %error,
            "the verdict is not kept, the next process proves again",
        );
    }
}

fn place(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::create_dir_all(folder)?;
    let new = NewFile::create(path)?;
    // Whatever the umask is, the verdict is its owner's alone.
    new.file().set_permissions(Permissions::from_mode(0o600))?;
    new.file().write_all(format!("{}\n{text}", hex(&Sha256::digest(text))).as_bytes())?;
    new.commit()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::probe::report::tests::{report, uuid};

    fn key() -> CacheKey {
        CacheKey::of(&[uuid(0), uuid(1)], "boot", "driver")
    }

    fn kept() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &key(), &report(2, &[(0, 1)]));
        let (found, path) = read(folder.path(), &key()).unwrap();
        assert_eq!(found, report(2, &[(0, 1)]));
        (folder, path)
    }

    #[test]
    fn a_verdict_is_of_its_devices_driver_boot_and_in_any_order() {
        let (folder, path) = kept();
        assert!(
            read(folder.path(), &CacheKey::of(&[uuid(1), uuid(0)], "boot", "driver")).is_some(),
            "whatever rank has which"
        );
        let others = [
            CacheKey::of(&[uuid(0), uuid(2)], "boot", "driver"),
            CacheKey::of(&[uuid(0)], "boot", "driver"),
            CacheKey::of(&[uuid(0), uuid(1)], "reboot", "driver"),
            CacheKey::of(&[uuid(0), uuid(1)], "boot", "other"),
        ];
        for other in others {
            assert!(read(folder.path(), &other).is_none(), "{other:?}");
            // Nor under its name.
            std::fs::copy(&path, other.file(folder.path())).unwrap();
            assert!(read(folder.path(), &other).is_none(), "{other:?}");
        }
    }

    #[test]
    fn any_changed_byte_and_any_cut_is_noticed() {
        let (folder, path) = kept();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut broken = whole.clone();
            broken[at] ^= 1;
            for bytes in [&broken[..], &whole[..at]] {
                std::fs::write(&path, bytes).unwrap();
                assert!(read(folder.path(), &key()).is_none(), "byte {at} of {}", whole.len());
            }
        }
        std::fs::write(&path, whole).unwrap();
        assert!(read(folder.path(), &key()).is_some());
    }

    #[test]
    fn what_others_can_write_is_not_believed() {
        let (folder, path) = kept();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        assert!(read(folder.path(), &key()).is_none(), "others can write it");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        assert!(read(folder.path(), &key()).is_some());
        let real = folder.path().join("real");
        std::fs::rename(&path, &real).unwrap();
        std::os::unix::fs::symlink(&real, &path).unwrap();
        assert!(read(folder.path(), &key()).is_none(), "a link leads anywhere");
    }

    #[test]
    fn nothing_but_the_verdict_stays_and_the_last_one_counts() {
        let (folder, path) = kept();
        write(folder.path(), &key(), &report(2, &[]));
        assert_eq!(read(folder.path(), &key()).unwrap().0, report(2, &[]));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn the_folder_is_that_of_the_kernels_cache() {
        let env = |pairs: &'static [(&str, &str)]| {
            move |key: &str| {
                pairs.iter().find(|(name, _)| *name == key).map(|(_, value)| OsString::from(value))
            }
        };
        assert_eq!(
            folder(env(&[("FLUX_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/b")])),
            Some("/a".into())
        );
        assert_eq!(
            folder(env(&[("FLUX_CACHE_DIR", ""), ("XDG_CACHE_HOME", "/b")])),
            Some("/b/flux".into())
        );
        assert_eq!(folder(env(&[("HOME", "/c")])), Some("/c/.cache/flux".into()));
        assert_eq!(folder(env(&[])), None);
    }
}
