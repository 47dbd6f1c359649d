//! A run of the suite: its group of ranks, and one episode after another.
//!
//! Invariant: every episode starts with a whole group of working ranks. An episode that ends early
//! counts against the run and is followed by a new group.

use super::device_memory::DeviceMemory;
use super::interrupt::Interrupt;
use super::leaks::LeakDetector;
use super::messages::{Reply, Request};
use super::process::Process;
use super::residue::{self, SharedMemory};
use super::tally::{Finding, Injection, Tally};
use super::usage::Usage;
use super::{Args, Defects};
use crate::harness::data;
use crate::{end, out};
use anyhow::{Context, anyhow};
use flux_transport::Select;
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where named shared memory would be left behind.
const SHARED_MEMORY: &str = "/dev/shm";
/// For a process to come to its GPU.
const START: Duration = Duration::from_secs(40);
/// For other programs that name shared memory to map it, or to remove it.
const SETTLES: Duration = Duration::from_secs(5);
/// For the last words of ranks that do not answer.
const LAST_WORDS: Duration = Duration::from_millis(700);

pub(super) struct Suite<'a> {
    pub(super) args: &'a Args,
    words: Vec<String>,
    rendezvous: PathBuf,
    temporary: PathBuf,
    pub(super) ranks: Vec<Process>,
    /// What each rank's process held, each time it was ready in a whole world.
    held: Vec<LeakDetector>,
    /// How much of its GPU was in use then, where each rank has one of its own.
    on_device: Vec<DeviceMemory>,
    pub(super) tally: Tally,
    random: u64,
    interrupt: Interrupt,
}

/// Why an episode ended early: what is counted already, or what is not.
pub(super) struct EarlyEnd(pub(super) Option<anyhow::Error>);

impl From<anyhow::Error> for EarlyEnd {
    fn from(error: anyhow::Error) -> Self {
        Self(Some(error))
    }
}

/// Runs all episodes and says whether all passed. A signal ends the run after clean-up.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    let interrupt = Interrupt::catch().context("signals cannot be caught")?;
    let passed = run_until(args, &interrupt);
    match interrupt.came() {
        Some(signal) => end::by(signal),
        None => passed,
    }
}

fn run_until(args: &Args, interrupt: &Interrupt) -> anyhow::Result<bool> {
    let start = Instant::now();
    let shared = SharedMemory::now(Path::new(SHARED_MEMORY));
    let private = PermissionsExt::from_mode(0o700);
    let directory = tempfile::Builder::new()
        .prefix("flux-faults-")
        .permissions(private)
        .tempdir()
        .context("no directory to meet in")?;
    // Everything that is left in the ranks' temporary folder is theirs.
    let temporary = directory.path().join("temporary");
    std::fs::create_dir(&temporary)?;
    let own = Usage::now()?;
    let mut tally = {
        let mut suite = Suite::new(args, directory.path(), &temporary, interrupt);
        suite.fill()?;
        // Nodes have as many ranks each, so there is no group without one of them.
        let may_go_on = args.nodes.is_none_or(|nodes| nodes == 1);
        for (number, injection) in plan(args).into_iter().enumerate() {
            if let Err(EarlyEnd(why)) = suite.episode(injection, may_go_on && number % 2 == 0) {
                interrupt.check()?;
                if let Some(error) = why {
                    suite.tally.count(Finding::Broken, &end::words(&error));
                }
                out::line(&format_args!(
                    "episode {number}, {injection:?}: ended early, a new group is started"
                ));
                suite.ranks.clear();
                suite.fill()?;
            }
        }
        suite.end()?;
        suite.tally
    };
    let met = residue::all(directory.path())?.into_iter().filter(|path| *path != temporary);
    for left in met.chain(residue::all(&temporary)?).chain(shared.left(Instant::now() + SETTLES)) {
        tally.count(Finding::Residue, &left.display().to_string());
    }
    drop(directory);
    for more in Usage::now()?.beyond(&own) {
        tally.count(Finding::Residue, &format!("this process holds more than before: {more}"));
    }
    out::line(&format_args!(
        "{} ranks, seed {}, {:.1} s: {tally}",
        args.ranks,
        args.seed,
        start.elapsed().as_secs_f64()
    ));
    Ok(tally.clean())
}

/// What is injected, in a random order.
fn plan(args: &Args) -> Vec<Injection> {
    let stops = (0..args.stops)
        .map(|stop| if stop % 2 == 0 { Injection::LongStop } else { Injection::ShortStop });
    let kills = std::iter::repeat_n(Injection::Kill, args.kills as usize);
    let mut plan: Vec<_> = kills
        .chain(stops)
        .chain(std::iter::repeat_n(Injection::Missing, args.missing as usize))
        .collect();
    for at in (1..plan.len()).rev() {
        plan.swap(at, (data::seed(args.seed, 90, at as u64) % (at as u64 + 1)) as usize);
    }
    plan
}

impl<'a> Suite<'a> {
    fn new(args: &'a Args, rendezvous: &Path, temporary: &Path, interrupt: &Interrupt) -> Self {
        // Each new rank 0 of `auto` would say again that there are no GPUs.
        let transport = if args.on_gpus() { args.transport } else { Select::Host };
        let mut line = format!(
            "lab faults --as-rank --ranks {} --transport {transport} --seed {} --deadline-ms {} \
             --ranks-per-gpu {}",
            args.ranks,
            args.seed,
            args.deadline().as_millis(),
            args.ranks_per_gpu
        );
        line += &args.nodes.map_or_else(String::new, |nodes| format!(" --nodes {nodes}"));
        let Defects { stall, leak, litter } = args.defects;
        for (wanted, word) in [(stall, " --stall"), (leak, " --leak"), (litter, " --litter")] {
            line += if wanted { word } else { "" };
        }
        Self {
            args,
            words: line.split(' ').map(str::to_owned).collect(),
            rendezvous: rendezvous.to_owned(),
            temporary: temporary.to_owned(),
            ranks: Vec::new(),
            held: vec![LeakDetector::default(); args.ranks as usize],
            on_device: vec![DeviceMemory::default(); args.ranks as usize],
            tally: Tally::until(interrupt.clone()),
            random: 0,
            interrupt: interrupt.clone(),
        }
    }

    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.random += 1;
        data::seed(self.args.seed, 91, self.random) % end.max(1)
    }

    /// When something that takes its deadline, and no longer, must be over.
    pub(super) fn limit(&self) -> Instant {
        Instant::now() + self.args.deadline() * 3 + Duration::from_secs(self.args.patience)
    }

    /// The same where a process may have to come to its device first.
    fn start_limit(&self) -> Instant {
        self.limit() + if self.args.on_gpus() { START } else { Duration::ZERO }
    }

    pub(super) fn start(&mut self, rank: u32) -> anyhow::Result<Process> {
        self.held[rank as usize] = LeakDetector::default();
        self.on_device[rank as usize] = DeviceMemory::default();
        let sharing = self.args.ranks_per_gpu > 1;
        Process::start(
            rank,
            self.args.ranks,
            sharing,
            &self.rendezvous,
            &self.temporary,
            &self.words,
            self.interrupt.clone(),
        )
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        for rank in 0..self.args.ranks {
            let process = self.start(rank)?;
            self.ranks.push(process);
        }
        match self.all_ready(self.args.ranks, true) {
            Ok(()) => Ok(()),
            Err(EarlyEnd(error)) => Err(error
                .unwrap_or_else(|| anyhow!("see above"))
                .context("a new group does not work")),
        }
    }

    /// Checks that every rank is ready in a world of `world` and leaks nothing. `alone`: whether no
    /// given-up rank still lives.
    pub(super) fn all_ready(&mut self, world: u32, alone: bool) -> Result<(), EarlyEnd> {
        let limit = self.start_limit();
        for at in 0..self.ranks.len() {
            let report = self.next_reply(at, limit)?;
            let rank = self.ranks[at].rank;
            match report {
                Reply::Ready { world: of, wrong, usage, device } if of == world => {
                    self.tally.count_wrong(rank, wrong, "of a new group");
                    if world == self.args.ranks {
                        self.check(rank, usage, device.filter(|_| alone));
                    }
                }
                other => {
                    let words =
                        format!("rank {rank}, to be ready in a world of {world}: {other:?}");
                    return Err(self.early(Finding::Broken, &words));
                }
            }
        }
        Ok(())
    }

    /// Counts what a rank's process leaks.
    fn check(&mut self, rank: u32, usage: Usage, device: Option<u64>) {
        let on_device = device.and_then(|used| self.on_device[rank as usize].check(used));
        for leak in self.held[rank as usize].check(usage).into_iter().chain(on_device) {
            let words = format!("rank {rank} holds more after each rebuild: {leak}");
            self.tally.count(Finding::Residue, &words);
        }
    }

    /// A rank's next report. One that hangs or has ended is counted.
    pub(super) fn next_reply(&mut self, at: usize, limit: Instant) -> Result<Reply, EarlyEnd> {
        let rank = self.ranks[at].rank;
        match self.ranks[at].reply(limit) {
            Ok(Some(report)) => Ok(report),
            Ok(None) => {
                let early = self.early(Finding::Hang, &format!("rank {rank} does not answer"));
                self.show();
                Err(early)
            }
            Err(error) => Err(self.early(Finding::Broken, &end::words(&error))),
        }
    }

    /// Counts what ends an episode early.
    pub(super) fn early(&mut self, finding: Finding, words: &str) -> EarlyEnd {
        self.tally.count(finding, words);
        EarlyEnd(None)
    }

    /// Shows what every rank does: its threads, and its own report on the standard error.
    fn show(&self) {
        for rank in &self.ranks {
            rank.threads()
                .iter()
                .for_each(|thread| out::line(&format_args!("  rank {}: {thread}", rank.rank)));
        }
        let asked = self.ranks.iter().filter(|rank| rank.signal(Signal::USR1).is_ok()).count();
        if asked > 0 {
            std::thread::sleep(LAST_WORDS);
        }
    }

    pub(super) fn request_all(&mut self, order: Request) -> anyhow::Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.request(order))
    }

    /// Ends the ranks, which must end by themselves.
    fn end(&mut self) -> anyhow::Result<()> {
        self.request_all(Request::Quit)?;
        let limit = self.limit();
        for mut rank in self.ranks.drain(..) {
            if !rank.ended(limit)? {
                self.tally.count(Finding::Hang, &format!("rank {} does not end", rank.rank));
            }
        }
        Ok(())
    }
}
