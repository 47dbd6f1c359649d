//! NCCL's variables: from the environment, else from NCCL's files.
//!
//! Invariant: the files are read as NCCL reads them (`setEnvFile`, `initEnvFunc`), before NCCL
//! copies them to the environment of some ranks.

use std::ffi::{CStr, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Names the file that stands in the place of the user's.
const FILE: &str = "NCCL_CONF_FILE";
/// The user's, in the home folder.
const OF_USER: &str = ".nccl.conf";
const OF_MACHINE: &str = "/etc/nccl.conf";

/// What there is besides the environment.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The first that names a variable counts.
    files: Vec<Vec<u8>>,
}

impl Settings {
    /// What the files of this user and machine say.
    pub(crate) fn read() -> Self {
        let named = std::env::var_os(FILE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let of_user = named.or_else(|| Some(home()?.join(OF_USER)));
        Self::of([of_user.as_deref(), Some(Path::new(OF_MACHINE))].into_iter().flatten())
    }

    /// Those that are there and can be read.
    fn of<'a>(paths: impl Iterator<Item = &'a Path>) -> Self {
        Self { files: paths.filter_map(|path| std::fs::read(path).ok()).collect() }
    }

    pub(crate) fn get(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name).or_else(|| self.in_files(name))
    }

    fn in_files(&self, name: &str) -> Option<OsString> {
        self.files.iter().find_map(|file| value(file, name)).map(OsStr::to_os_string)
    }
}

/// What the first line that names it says, up to the end of the line.
fn value<'a>(file: &'a [u8], name: &str) -> Option<&'a OsStr> {
    file.split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
        .map(OsStr::from_bytes)
}

/// The user's home folder by the user database, whatever `HOME` says.
fn home() -> Option<PathBuf> {
    // What it takes of an entry is a few hundred bytes.
    let mut strings = [0; 4096];
    // SAFETY: all zeros are a `passwd` without strings.
    let mut user: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let uid = rustix::process::getuid().as_raw();
    // SAFETY: places for an entry, its strings and the result, as long as is said.
    let code = unsafe {
        libc::getpwuid_r(uid, &raw mut user, strings.as_mut_ptr(), strings.len(), &raw mut found)
    };
    if code != 0 || found.is_null() || user.pw_dir.is_null() {
        return None;
    }
    // SAFETY: a string of the entry, in `strings`.
    let folder = unsafe { CStr::from_ptr(user.pw_dir) };
    Some(PathBuf::from(OsString::from_vec(folder.to_bytes().to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_say_what_the_environment_does_not_and_the_first_counts() {
        let folder = tempfile::tempdir().unwrap();
        let [user, machine, absent] =
            ["user", "machine", "absent"].map(|name| folder.path().join(name));
        std::fs::write(&user, "# \
                               NCCL_FLUX_A=0\nNCCL_FLUX_A=1\nNCCL_FLUX_A=2\nNCCL_FLUX_AB=3\nnonsense\nNCCL_FLUX_C=a=b").unwrap();
        std::fs::write(&machine, "NCCL_FLUX_A=4\nNCCL_FLUX_D= 5 \nPATH=6\n").unwrap();
        let settings = Settings::of([&*absent, &*user, &*machine].into_iter());
        let get = |name: &str| settings.get(name).map(|value| value.into_string().unwrap());
        assert_eq!(
            [get("NCCL_FLUX_A"), get("NCCL_FLUX_AB")],
            [Some("1".to_owned()), Some("3".to_owned())]
        );
        assert_eq!(
            [get("NCCL_FLUX_C"), get("NCCL_FLUX_D")],
            [Some("a=b".to_owned()), Some(" 5 ".to_owned())]
        );
        assert_eq!((get("NCCL_FLUX"), get("nonsense")), (None, None));
        assert_eq!(settings.get("PATH"), std::env::var_os("PATH"), "the environment counts first");
        assert_eq!(settings.in_files("PATH").unwrap(), "6");
    }

    #[test]
    fn a_user_has_a_home() {
        assert!(home().is_some_and(|home| home.is_absolute()));
    }
}
