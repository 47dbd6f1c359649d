use super::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, Stdio};

type Make = fn(&Path) -> io::Result<NewFile>;

/// Both ways, whatever this file system has.
const WAYS: [(&str, Make); 2] =
    [("unnamed", |target| NewFile::unnamed(target, NEW)), ("named", NewFile::named)];

fn names(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_file_has_its_name_when_it_is_whole_and_no_other() {
    for (way, make) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("y");
        for content in ["first", "second"] {
            let before = fs::read(&target).ok();
            let new = make(&target).unwrap();
            assert_eq!(new.name().is_some(), way == "named");
            new.file().write_all(content.as_bytes()).unwrap();
            assert_eq!(fs::read(&target).ok(), before, "{way}");
            new.commit().unwrap();
            assert_eq!(fs::read_to_string(&target).unwrap(), content, "{way}");
            assert_eq!(names(dir.path()), ["y"], "{way}");
        }
        drop(make(&target).unwrap());
        assert_eq!(
            (fs::read_to_string(&target).unwrap().as_str(), names(dir.path())),
            ("second", vec!["y".to_owned()]),
            "{way}"
        );
    }
}

#[test]
fn a_target_that_appears_while_it_is_written_is_replaced_and_a_folder_is_not() {
    for (way, make) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("y");
        let new = make(&target).unwrap();
        fs::write(&target, "another's").unwrap();
        new.commit().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), "", "{way}");
        let new = make(&target).unwrap();
        fs::remove_file(&target).unwrap();
        fs::create_dir(&target).unwrap();
        assert!(new.commit().is_err(), "{way}");
        assert_eq!(names(dir.path()), ["y"], "{way}");
    }
}

#[test]
fn a_link_is_replaced_and_its_target_stays() {
    let dir = tempfile::tempdir().unwrap();
    let (link, file) = (dir.path().join("link"), dir.path().join("file"));
    fs::write(&file, "file").unwrap();
    symlink(&file, &link).unwrap();
    crate::write(&link, b"new").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_file());
    assert_eq!(
        (fs::read_to_string(&link).unwrap().as_str(), fs::read_to_string(&file).unwrap().as_str()),
        ("new", "file")
    );
}

#[test]
fn a_mode_and_an_owner_are_kept_and_a_new_file_has_the_umasks() {
    let dir = tempfile::tempdir().unwrap();
    let (target, plain) = (dir.path().join("y"), dir.path().join("plain"));
    File::create(&plain).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    crate::write(&target, b"").unwrap();
    assert_eq!(mode(&target), mode(&plain));
    for kept in [0o600, 0o640, 0o444, 0o755] {
        fs::set_permissions(&target, fs::Permissions::from_mode(kept)).unwrap();
        crate::write(&target, b"").unwrap();
        assert_eq!(mode(&target), kept);
    }
    // Only root may give a file away.
    if std::os::unix::fs::chown(&target, Some(4711), Some(4712)).is_ok() {
        crate::write(&target, b"").unwrap();
        let meta = fs::metadata(&target).unwrap();
        assert_eq!((meta.uid(), meta.gid(), mode(&target)), (4711, 4712, 0o755));
    }
}

#[test]
fn the_longest_name_can_be_written() {
    for (way, make) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("y".repeat(255));
        for _ in 0..2 {
            make(&target).unwrap().commit().unwrap();
        }
        assert_eq!(names(dir.path()).len(), 1, "{way}");
    }
}

/// Says which way this process is to write, and where.
const ROLE: &str = "FLUX_TEST_WRITER";

/// Run again as another process, it writes until it is killed.
#[test]
fn a_killed_writer_leaves_nothing_or_what_the_next_one_removes() {
    if let Some(role) = std::env::var_os(ROLE) {
        let role = role.into_string().unwrap();
        let (way, target) = role.split_once(':').unwrap();
        let make = WAYS.into_iter().find(|(name, _)| *name == way).unwrap().1;
        let new = make(Path::new(target)).unwrap();
        new.file().write_all(&[1; 4096]).unwrap();
        io::stdout().write_all(b"\nit writes\n").unwrap();
        loop {
            std::thread::park();
        }
    }
    for (way, make) in WAYS {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("y");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "new_file::tests::a_killed_writer_leaves_nothing_or_what_the_next_one_removes",
            "--nocapture",
        ]);
        command.env(ROLE, format!("{way}:{}", target.display())).stdout(Stdio::piped());
        let mut writer = command.spawn().unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "it writes"), "{way}");
        let left = names(dir.path()).len();
        assert_eq!(left, usize::from(way == "named"));
        // A live writer's file stays.
        drop(NewFile::create(&target).unwrap());
        assert_eq!(names(dir.path()).len(), left);
        writer.kill().unwrap();
        writer.wait().unwrap();
        drop(make(&dir.path().join("z")).unwrap());
        assert_eq!(names(dir.path()).len(), left, "{way}");
        NewFile::create(&target).unwrap().commit().unwrap();
        assert_eq!(names(dir.path()), ["y"], "{way}");
    }
}
