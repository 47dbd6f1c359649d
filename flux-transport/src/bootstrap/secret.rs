//! The secret that the ranks of several hosts share.
//!
//! Invariant: it has at least [`MIN_BYTES`] bytes and never appears in a message or a log. It is
//! never derived from a job's number or name, which others can list.

use std::ffi::OsString;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::error::BootstrapError;
use super::names::{FLUX_SECRET, FLUX_SECRET_FILE};

/// Fewer could be tried out by who has seen one handshake.
const MIN_BYTES: usize = 16;
const MAX_BYTES: usize = 4096;

/// What the ranks of a launch know and nobody else does.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

impl Secret {
    /// Takes 16 to 4096 bytes, best 32 random ones.
    ///
    /// # Errors
    /// [`BootstrapError::Secret`] for another length.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self, BootstrapError> {
        Self::of("the secret", bytes.into())
    }

    /// Reads a file, without white space at its end.
    ///
    /// # Errors
    /// [`BootstrapError::Secret`] if it is unreadable, of another user, or readable by others.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, BootstrapError> {
        let path = path.as_ref();
        let problem = |problem: String| BootstrapError::Secret {
            origin: path.display().to_string(),
            problem,
        };
        // Without waiting: a pipe's other end may never come.
        let file = rustix::fs::open(
            path,
            OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY,
            Mode::empty(),
        )
        .map_err(|errno| problem(format!("cannot be opened: {errno}")))?;
        let stat = rustix::fs::fstat(&file)
            .map_err(|errno| problem(format!("cannot be looked at: {errno}")))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(problem("is not a regular file".to_owned()));
        }
        let (uid, mode) = (rustix::process::geteuid().as_raw(), stat.st_mode & 0o7777);
        if stat.st_uid != uid && stat.st_uid != 0 {
            return Err(problem(format!(
                "belongs to user {}, this process runs as {uid}",
                stat.st_uid
            )));
        }
        if mode & 0o077 != 0 {
            return Err(problem(format!("has mode {mode:04o}: others may read it, use 0600")));
        }
        let mut bytes = Vec::new();
        let file = std::fs::File::from(file);
        file.take(MAX_BYTES as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| problem(format!("cannot be read: {error}")))?;
        bytes.truncate(bytes.trim_ascii_end().len());
        Self::of(&path.display().to_string(), bytes)
    }

    /// From the variables of the launch; `None` where neither is set.
    pub(super) fn from_variables(
        lookup: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Self>, BootstrapError> {
        let set = |name| lookup(name).filter(|value| !value.is_empty());
        match (set(FLUX_SECRET), set(FLUX_SECRET_FILE)) {
            (None, None) => Ok(None),
            (Some(secret), None) => Self::of(FLUX_SECRET, secret.into_encoded_bytes()).map(Some),
            (None, Some(path)) => Self::read(PathBuf::from(path)).map(Some),
            (Some(_), Some(_)) => Err(BootstrapError::Secret {
                origin: FLUX_SECRET.to_owned(),
                problem: format!("and {FLUX_SECRET_FILE} are both set: set one"),
            }),
        }
    }

    fn of(origin: &str, bytes: Vec<u8>) -> Result<Self, BootstrapError> {
        let length = bytes.len();
        if (MIN_BYTES..=MAX_BYTES).contains(&length) {
            return Ok(Self(bytes.into()));
        }
        let length =
            if length > MAX_BYTES { format!("more than {MAX_BYTES}") } else { length.to_string() };
        let problem = format!(
            "has {length} bytes, {MIN_BYTES} to {MAX_BYTES} are possible and 32 random ones are \
             good"
        );
        Err(BootstrapError::Secret { origin: origin.to_owned(), problem })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const WORDS: &str = "thirty-two bytes nobody can know";

    fn file(content: &str, mode: u32) -> tempfile::TempPath {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        std::fs::set_permissions(file.path(), PermissionsExt::from_mode(mode)).unwrap();
        file.into_temp_path()
    }

    fn variables(set: &[(&str, &str)]) -> Result<Option<Secret>, String> {
        Secret::from_variables(&|name| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into())
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_and_a_variable_give_the_same_secret() {
        for mode in [0o600, 0o400] {
            let file = file(&format!("{WORDS}\n"), mode);
            let path = file.to_str().unwrap();
            assert_eq!(variables(&[(FLUX_SECRET_FILE, path)]), variables(&[(FLUX_SECRET, WORDS)]));
        }
        assert_eq!(variables(&[]), Ok(None));
        assert_eq!(variables(&[(FLUX_SECRET, "")]), Ok(None));
    }

    #[test]
    fn a_file_that_others_may_read_is_refused_with_its_mode() {
        for mode in [0o640, 0o604, 0o660, 0o777] {
            let file = file(WORDS, mode);
            let error = variables(&[(FLUX_SECRET_FILE, file.to_str().unwrap())]).unwrap_err();
            assert!(
                error.contains(&format!("{mode:04o}")) && error.contains(file.to_str().unwrap()),
                "{error}"
            );
        }
    }

    #[test]
    fn what_is_no_secret_is_refused_and_not_repeated() {
        let directory = tempfile::tempdir().unwrap();
        let error =
            variables(&[(FLUX_SECRET_FILE, directory.path().to_str().unwrap())]).unwrap_err();
        assert!(error.contains("not a regular file"), "{error}");
        assert!(
            variables(&[(FLUX_SECRET_FILE, "/no/such/file")])
                .unwrap_err()
                .contains("/no/such/file")
        );
        let error = variables(&[(FLUX_SECRET, "fifteen letters")]).unwrap_err();
        assert!(
            error.contains("FLUX_SECRET")
                && error.contains("has 15 bytes")
                && !error.contains("fifteen"),
            "{error}"
        );
        assert!(
            variables(&[(FLUX_SECRET, &"x".repeat(4097))]).unwrap_err().contains("more than 4096")
        );
        assert!(
            variables(&[(FLUX_SECRET_FILE, file(&"x".repeat(9000), 0o600).to_str().unwrap())])
                .unwrap_err()
                .contains("more than 4096")
        );
        let both = variables(&[(FLUX_SECRET, WORDS), (FLUX_SECRET_FILE, "/x")]).unwrap_err();
        assert!(both.contains("both set"), "{both}");
    }

    #[test]
    fn a_secret_does_not_show_itself() {
        assert_eq!(format!("{:?}", Secret::new(WORDS).unwrap()), "Secret(..)");
    }
}
