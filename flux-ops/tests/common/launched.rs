//! Ranks as processes: each runs the same tests of the binary, one by one in the same order, and has
//! its own part in every test.
//!
//! `flux-bench launch --ranks 4 --sharing-devices -- ops gpu_messages::
//! --test-threads=1` has four ranks on the GPUs that there are, of which NCCL takes one for each
//! rank where they are threads. A rank that fails ends its process, and the launch with it.

use super::lateness;
use flux_core::{Rank, WorldSize};
use flux_transport::{FLUX_RANK, FLUX_RENDEZVOUS, FLUX_WORLD_SIZE};
use flux_transport::{Options, World};
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longer than any rank computes what it expects while the others wait, where no machine is late.
const LONGEST: Duration = Duration::from_mins(3);

/// This process, as one of the ranks of a launch.
#[derive(Debug)]
pub struct Launched {
    rank: Rank,
    pub ranks: u32,
    /// Private to the launch, which removes it.
    directory: PathBuf,
    /// Runs and meetings so far: the same on all ranks, as they take the same tests in the same
    /// order.
    numbers: AtomicU32,
}

/// The launch that this process is of, if there is one.
///
/// # Panics
/// If its variables make no sense.
pub fn launched() -> Option<&'static Launched> {
    static LAUNCHED: OnceLock<Option<Launched>> = OnceLock::new();
    let find = || {
        let rank = std::env::var(FLUX_RANK).ok()?.parse().unwrap();
        let ranks = std::env::var(FLUX_WORLD_SIZE).unwrap().parse().unwrap();
        let directory = std::env::var_os(FLUX_RENDEZVOUS).unwrap().into();
        // The other ranks would wait for it in vain, whichever step of a test it was at. Past the
        // capture of the test's output, as the process ends.
        std::panic::set_hook(Box::new(move |panic| {
            let _ = std::io::stderr().write_all(format!("\nrank {rank}: {panic}\n").as_bytes());
            end();
        }));
        Some(Launched { rank: Rank::new(rank), ranks, directory, numbers: AtomicU32::new(0) })
    };
    LAUNCHED.get_or_init(find).as_ref()
}

/// How many ranks there can be: those of the launch, if there is one, or a thread for each of so
/// many GPUs.
pub fn places(gpus: u32) -> u32 {
    launched().map_or(gpus, |launch| launch.ranks)
}

#[allow(clippy::exit, reason = "a rank that has failed takes its launch with it")]
fn end() {
    std::process::exit(101);
}

impl Launched {
    /// A number that is the same on all ranks, and new.
    pub(super) fn number(&self) -> u32 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Options of this rank: on the device that it has, or shares with its neighbours.
    pub(super) fn place(&self, options: &mut Options) {
        let devices = flux_cuda::device_count().unwrap();
        options.device = Some(self.rank.get() * devices.min(self.ranks) / self.ranks);
        options.shared_device = self.ranks > devices;
    }

    /// Runs `body` as one rank of the first `ranks`, if this is one. Every rank of the launch calls
    /// it.
    pub(super) fn run<R>(&self, ranks: u32, body: impl FnOnce(&World) -> R) -> Option<R> {
        let run = format!("run-{}", self.number());
        // Ranks that have no part in a run do not go on to the next before it is over.
        self.gather(&run, self.ranks);
        if self.rank.get() >= ranks {
            return None;
        }
        let directory = self.directory.join(run).with_extension("world");
        DirBuilder::new().recursive(true).mode(0o700).create(&directory).unwrap();
        let world = World::builder(self.rank, WorldSize::new(ranks).unwrap())
            .local_rank(self.rank.get())
            .on_host(directory)
            .unwrap();
        Some(body(&world))
    }

    /// `time`, or as many times longer as the machine is late for the latest rank.
    pub(super) fn scaled(&self, time: Duration) -> Duration {
        let name = format!("late-{}", self.number());
        let said = |rank| self.directory.join(format!("{name}-by-{rank}"));
        std::fs::write(said(self.rank.get()), lateness::of_process().to_string()).unwrap();
        self.gather(&name, self.ranks);
        let late = |rank| -> f64 { std::fs::read_to_string(said(rank)).unwrap().parse().unwrap() };
        time.mul_f64((0..self.ranks).map(late).fold(1.0, f64::max))
    }

    /// Returns when the first `ranks` ranks have come to what `name` names.
    ///
    /// # Panics
    /// If one does not come.
    pub(super) fn gather(&self, name: &str, ranks: u32) {
        let sign = |rank| self.directory.join(format!("{name}-{rank}"));
        File::create(sign(self.rank.get())).unwrap();
        let until = Instant::now() + lateness::scaled(LONGEST);
        for rank in 0..ranks {
            while !sign(rank).exists() {
                assert!(
                    Instant::now() < until,
                    "rank {rank} has not come to {name}: see why it failed"
                );
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
