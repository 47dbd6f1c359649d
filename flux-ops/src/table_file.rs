//! The user's table of measured plans: one file, shared by many processes.
//!
//! Invariant: a reader sees a whole table. A writer reads, adds its row and replaces the file while
//! it holds the lock, and leaves a file alone that is no table of this version.

use flux_core::plan::{PlanRow, PlanTable, PlanTableError};
use flux_files::NewFile;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait for another writer, who holds the lock for one small file.
const LOCK_WAIT: Duration = Duration::from_secs(10);
const LOCK_RETRY: Duration = Duration::from_millis(2);

/// Why a plan table's file was not read or written; it is as it was.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableFileError {
    /// The file holds something else, or a table of another version.
    #[error("{path} is no plan table: {source}; move it away, or name another file in \
             FLUX_PLAN_TABLE", path = path.display())]
    NoTable {
        /// The file.
        path: PathBuf,
        /// The first line that is wrong.
        source: PlanTableError,
    },
    /// The system refuses.
    #[error(
        "the plan table {path}: {reason}; name another file in FLUX_PLAN_TABLE",
        path = path.display()
    )]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: String,
    },
    /// Neither FLUX_PLAN_TABLE nor HOME says where the table is.
    #[error("there is no place for a plan table: set FLUX_PLAN_TABLE or HOME")]
    NoPath,
}

flux_core::debug_is_text!(TableFileError);

/// Where the environment has the table: `FLUX_PLAN_TABLE`, else `flux/plans.csv` of the user's data
/// folder.
pub(crate) fn path_from_env() -> Option<PathBuf> {
    let path =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let data = || path("XDG_DATA_HOME").or_else(|| Some(path("HOME")?.join(".local/share")));
    path("FLUX_PLAN_TABLE").or_else(|| Some(data()?.join("flux/plans.csv")))
}

fn refused(path: &Path) -> impl Fn(io::Error) -> TableFileError {
    move |error| TableFileError::Io { path: path.to_owned(), reason: error.to_string() }
}

fn text(path: &Path) -> Result<Option<String>, TableFileError> {
    match fs::read(path) {
        // A line that is no UTF-8 is no row either.
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(refused(path)(error)),
    }
}

fn no_table(path: &Path) -> impl Fn(PlanTableError) -> TableFileError {
    move |source| TableFileError::NoTable { path: path.to_owned(), source }
}

/// The table in a file; `None` where there is no file. An empty file is a table without rows.
///
/// # Errors
/// [`TableFileError`]: the file cannot be read or is no table.
pub(crate) fn read(path: &Path) -> Result<Option<PlanTable>, TableFileError> {
    match text(path)? {
        Some(text) if text.is_empty() => Ok(Some(PlanTable::default())),
        Some(text) => PlanTable::parse(&text).map(Some).map_err(no_table(path)),
        None => Ok(None),
    }
}

/// Whether [`add`] could write, as far as can be told beforehand. Creates the folder.
///
/// # Errors
/// As [`add`].
pub(crate) fn check(path: &Path) -> Result<(), TableFileError> {
    let lock = Lock::take(path)?;
    read(&lock.file)?;
    NewFile::create(&lock.file).map(drop).map_err(refused(path))
}

/// Adds a row to the table in a file, in place of one with the same key and `m`. A link keeps its
/// name: the file that it leads to is replaced.
///
/// # Errors
/// [`TableFileError`]: the file is no table, or cannot be written.
pub(crate) fn add(path: &Path, row: &PlanRow) -> Result<(), TableFileError> {
    let lock = Lock::take(path)?;
    let old = text(&lock.file)?.unwrap_or_default();
    let new = PlanTable::with_row(&old, row).map_err(no_table(path))?;
    flux_files::write(&lock.file, new.as_bytes()).map_err(refused(path))
}

/// The right to replace a table's file, until it is dropped.
struct Lock {
    /// The file itself, behind all links.
    file: PathBuf,
    // Closing it releases the lock. It is never removed: two writers could lock two files.
    _lock: File,
}

impl Lock {
    fn take(path: &Path) -> Result<Self, TableFileError> {
        let refuse =
            |reason: &str| TableFileError::Io { path: path.to_owned(), reason: reason.to_owned() };
        let file = match (fs::canonicalize(path), fs::symlink_metadata(path)) {
            (Ok(file), _) if file.is_file() => file,
            (Ok(_), _) => return Err(refuse("not a regular file")),
            (Err(_), Ok(found)) if found.is_symlink() => {
                return Err(refuse("a link that leads to no file"));
            }
            // Another process may have made it between the two looks.
            (Err(error), _) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            (Err(error), _) => return Err(refused(path)(error)),
        };
        let mut name = file.file_name().ok_or_else(|| refuse("it names no file"))?.to_owned();
        name.push(".lock");
        let lock_path = file.with_file_name(name);
        fs::create_dir_all(folder(&file)).map_err(refused(path))?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(lock_path)
            .map_err(refused(path))?;
        let end = Instant::now() + LOCK_WAIT;
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(Self { file, _lock: lock }),
                Err(TryLockError::WouldBlock) if Instant::now() < end => sleep(LOCK_RETRY),
                Err(TryLockError::WouldBlock) => {
                    return Err(refuse("another process has held its lock for 10 s"));
                }
                Err(TryLockError::Error(error)) => return Err(refused(path)(error)),
            }
        }
    }
}

fn folder(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::plan::PlanKey;
    use flux_core::tile::Generation;
    use flux_core::{DType, OpKind, Problem, WorldSize};
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    fn row(m: u32, us: f64) -> PlanRow {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            64,
            256,
            256,
            DType::Bf16,
            WorldSize::new(2).unwrap(),
        )
        .unwrap();
        PlanRow {
            key: PlanKey::new(&problem, "host", Generation::Hopper, "host", "host"),
            m,
            plan: "tile=128x256x64".parse().unwrap(),
            us,
        }
    }

    #[test]
    fn a_row_that_was_added_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/plans.csv");
        assert_eq!(read(&path), Ok(None));
        check(&path).unwrap();
        assert_eq!(read(&path), Ok(None), "a check writes no table");
        for us in [2.0, 1.0] {
            add(&path, &row(64, us)).unwrap();
            assert_eq!(read(&path).unwrap().unwrap().rows(), [row(64, us)]);
        }
        let left: Vec<_> = fs::read_dir(path.parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "table and lock: {left:?}");
    }

    #[test]
    fn concurrent_writers_lose_no_row_and_readers_see_whole_tables() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plans.csv");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    (0..25).for_each(|i| add(path, &row(1 + writer * 100 + i, 1.0)).unwrap());
                });
            }
            for _ in 0..200 {
                read(&path).unwrap();
            }
        });
        assert_eq!(read(&path).unwrap().unwrap().rows().len(), 100);
    }

    /// Run again as several processes, it is each of them.
    #[test]
    fn processes_that_write_at_once_lose_no_row() {
        const ROLE: &str = "FLUX_TEST_TABLE_WRITER";
        if let Some(role) = std::env::var_os(ROLE) {
            let role = role.into_string().unwrap();
            let (first, path) = role.split_once(':').unwrap();
            return (0..20).for_each(|i| {
                add(Path::new(path), &row(first.parse::<u32>().unwrap() + i, 1.0)).unwrap();
            });
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plans.csv");
        let start = |writer: u32| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "table_file::tests::processes_that_write_at_once_lose_no_row"]);
            command.env(ROLE, format!("{}:{}", 1 + writer * 100, path.display())).spawn().unwrap()
        };
        let writers: Vec<_> = (0..3).map(start).collect();
        assert!(writers.into_iter().all(|mut writer| writer.wait().unwrap().success()));
        assert_eq!(read(&path).unwrap().unwrap().rows().len(), 60);
    }

    #[test]
    fn what_is_no_table_is_named_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plans.csv");
        let table = PlanTable::with_row("", &row(64, 1.0)).unwrap();
        let older = table.replacen("table 1", "table 0", 1);
        for damaged in ["hello", &older, &table[..table.len() - 6], "\u{0}\u{1}"] {
            fs::write(&path, damaged).unwrap();
            let refused = read(&path).unwrap_err();
            assert!(
                refused.to_string().starts_with(&format!("{} is no plan table: ", path.display())),
                "{refused}"
            );
            assert_eq!(
                (check(&path), add(&path, &row(1, 1.0))),
                (Err(refused.clone()), Err(refused))
            );
            assert_eq!(fs::read_to_string(&path).unwrap(), damaged);
        }
        fs::write(&path, [0xFF, 0xFE]).unwrap();
        assert!(matches!(read(&path), Err(TableFileError::NoTable { .. })));
        // An empty one is what `touch` makes.
        fs::write(&path, "").unwrap();
        assert_eq!(read(&path), Ok(Some(PlanTable::default())));
        add(&path, &row(64, 1.0)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), table);
    }

    #[test]
    fn a_link_stays_and_one_that_leads_nowhere_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (link, target) =
            (folder.path().join("link.csv"), folder.path().join("there/plans.csv"));
        symlink(&target, &link).unwrap();
        assert!(
            add(&link, &row(1, 1.0))
                .unwrap_err()
                .to_string()
                .contains("a link that leads to no file")
        );
        fs::create_dir(target.parent().unwrap()).unwrap();
        fs::write(&target, "").unwrap();
        add(&link, &row(1, 1.0)).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(read(&target).unwrap().unwrap().rows().len(), 1);
    }

    #[test]
    fn where_nothing_can_be_written_the_check_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let mut places = vec![
            file.join("plans.csv"),
            folder.path().to_owned(),
            PathBuf::from("/dev/null"),
            PathBuf::from("/proc/plans.csv"),
        ];
        let sealed = folder.path().join("sealed");
        fs::create_dir(&sealed).unwrap();
        fs::set_permissions(&sealed, fs::Permissions::from_mode(0o555)).unwrap();
        // Root writes everywhere.
        if File::create(sealed.join("probe")).is_err() {
            places.push(sealed.join("plans.csv"));
        }
        for place in places {
            let error = check(&place).unwrap_err();
            assert!(matches!(&error, TableFileError::Io { path, .. } if *path == place), "{error}");
            assert_eq!(add(&place, &row(1, 1.0)), Err(error));
        }
        assert_eq!(
            read(Path::new("/dev/null")),
            Ok(Some(PlanTable::default())),
            "which turns the user's table off"
        );
    }

    #[test]
    fn a_lock_is_free_once_its_writer_is_done() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plans.csv");
        let lock = Lock::take(&path).unwrap();
        std::thread::scope(|scope| {
            let begun = Instant::now();
            let waits = scope.spawn(|| add(&path, &row(1, 1.0)));
            sleep(Duration::from_millis(100));
            assert_eq!(read(&path), Ok(None));
            drop(lock);
            waits.join().unwrap().unwrap();
            assert!(begun.elapsed() >= Duration::from_millis(100));
        });
    }
}
