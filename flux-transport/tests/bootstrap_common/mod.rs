//! What the tests of the bootstrap share.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is a failed test")]

#[path = "../loopback/mod.rs"]
pub(crate) mod loopback;
pub(crate) mod network;
pub(crate) mod process;
pub(crate) mod raw_client;

use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::lateness::{AMPLE, scaled};
use flux_transport::internal::control::ControlPlane;
use flux_transport::internal::control::{HostPlace, Place, join};
use flux_transport::{BootstrapError, Environment};

/// Long enough for anything that works, on a slow machine.
pub(crate) fn ample() -> Instant {
    Instant::now() + AMPLE
}

/// A deadline that passes in a test, later on a late machine.
pub(crate) fn after(millis: u64) -> Instant {
    Instant::now() + scaled(Duration::from_millis(millis))
}

/// A private directory to meet in, removed with what is in it.
pub(crate) fn private() -> tempfile::TempDir {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    tempfile::Builder::new().prefix("flux-test-").permissions(mode).tempdir().unwrap()
}

/// A directory with a mode of its own.
pub(crate) fn with_mode(within: &Path, mode: u32) -> std::path::PathBuf {
    let path = within.join(format!("mode-{mode:o}"));
    std::fs::DirBuilder::new().mode(mode).create(&path).unwrap();
    // The process's mask may have removed bits.
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    path
}

pub(crate) fn environment(directory: &Path, rank: u32, world: u32) -> Environment {
    let set = [
        ("FLUX_RANK", OsString::from(rank.to_string())),
        ("FLUX_WORLD_SIZE", world.to_string().into()),
        ("FLUX_LOCAL_RANK", rank.to_string().into()),
        ("FLUX_RENDEZVOUS", directory.as_os_str().to_owned()),
    ];
    Environment::parse(&|name| {
        set.iter().find(|(key, _)| *key == name).map(|(_, value)| value.clone())
    })
    .unwrap()
}

/// Where a rank meets those of its host.
pub(crate) fn place(environment: &Environment) -> &HostPlace {
    let Place::Host(place) = &environment.place else {
        panic!("{environment:?} is on several hosts")
    };
    place
}

/// Each environment's rank on a thread of its own; what each got, in the order given.
pub(crate) fn join_all(
    environments: &[Environment],
    deadline: Instant,
) -> Vec<Result<Arc<dyn ControlPlane>, BootstrapError>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = environments
            .iter()
            .map(|environment| scope.spawn(move || join(environment, deadline)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A formed group, by rank.
pub(crate) fn group(world: u32) -> Vec<Arc<dyn ControlPlane>> {
    let directory = private();
    let environments: Vec<_> =
        (0..world).map(|rank| environment(directory.path(), rank, world)).collect();
    let planes = join_all(&environments, ample()).into_iter().map(Result::unwrap).collect();
    assert_empty(directory.path());
    planes
}

pub(crate) fn assert_empty(directory: &Path) {
    let left: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// Runs `f` for every plane on a thread of its own; results by rank.
pub(crate) fn each<R: Send>(
    planes: &[Arc<dyn ControlPlane>],
    f: impl Fn(&dyn ControlPlane) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = planes.iter().map(|plane| scope.spawn(|| f(&**plane))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
