//! The order of events: what is injected when, and what must come of it.
//!
//! Invariant: every episode starts with a whole group of working ranks; where one ends otherwise, the group is killed and a new one started, and that
//! is counted against the run.

use super::Args;
use super::process::Process;
use super::talk::{How, Order, Report, Usage, now};
use super::tally::{Against, Injection, Tally};
use crate::data;
use anyhow::{Context, anyhow};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How late after its deadline a timeout may come.
const SLACK: Duration = Duration::from_millis(500);
/// How late after a kill a loss may be seen.
const LOSS: Duration = Duration::from_secs(1);
/// Calls of a short stop: some hundred milliseconds, the stop not counted.
const CALLS: u64 = 300;

/// A run of the suite.
struct Suite<'a> {
    args: &'a Args,
    words: Vec<String>,
    rendezvous: PathBuf,
    ranks: Vec<Process>,
    /// What each rank's process held when it was first ready in a whole world, and how often it was since.
    held: Vec<Option<(Usage, u32)>>,
    tally: Tally,
    random: u64,
}

/// Why an episode ended early: what is counted already, or what is not.
struct Spoilt(Option<anyhow::Error>);

impl From<anyhow::Error> for Spoilt {
    fn from(error: anyhow::Error) -> Self {
        Self(Some(error))
    }
}

/// Runs all episodes and says whether all passed.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    let start = Instant::now();
    let before = residue()?;
    let private = PermissionsExt::from_mode(0o700);
    let directory = tempfile::Builder::new().prefix("flux-faults-").permissions(private).tempdir().context("no directory to meet in")?;
    let own = Usage::now()?;
    let tally = {
        let mut suite = Suite::new(args, directory.path());
        suite.fill()?;
        for (number, injection) in plan(args).into_iter().enumerate() {
            if let Err(Spoilt(why)) = suite.episode(injection, number % 2 == 0) {
                if let Some(error) = why {
                    suite.tally.count(Against::Broken, &format!("{error:#}"));
                }
                println!("episode {number}, {injection:?}: spoilt, a new group is started");
                suite.ranks.clear();
                suite.fill()?;
            }
        }
        suite.end()?;
        suite.tally
    };
    let mut tally = tally;
    for left in std::fs::read_dir(directory.path())? {
        tally.count(Against::Residue, &format!("{} in the rendezvous directory", left?.path().display()));
    }
    drop(directory);
    let (own_after, after) = (Usage::now()?, residue()?);
    if own_after.exceeds(&own) {
        tally.count(Against::Residue, &format!("this process held {own:?} before and {own_after:?} after"));
    }
    for left in after.iter().filter(|path| !before.contains(path)) {
        tally.count(Against::Residue, &left.display().to_string());
    }
    println!("{} ranks, seed {}, {:.1} s: {tally}", args.ranks, args.seed, start.elapsed().as_secs_f64());
    Ok(tally.clean())
}

/// What is injected, in a random order.
fn plan(args: &Args) -> Vec<Injection> {
    let stops = (0..args.stops).map(|stop| if stop % 2 == 0 { Injection::LongStop } else { Injection::ShortStop });
    let kills = std::iter::repeat_n(Injection::Kill, args.kills as usize);
    let mut plan: Vec<_> = kills.chain(stops).chain(std::iter::repeat_n(Injection::Missing, args.missing as usize)).collect();
    for at in (1..plan.len()).rev() {
        plan.swap(at, (data::seed(args.seed, 90, at as u64) % (at as u64 + 1)) as usize);
    }
    plan
}

/// Files of this library where files are left behind.
fn residue() -> std::io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in [Path::new("/dev/shm"), &std::env::temp_dir()].into_iter().filter(|folder| folder.is_dir()) {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("flux-faults")) {
                found.push(path);
            }
        }
    }
    Ok(found)
}

impl<'a> Suite<'a> {
    fn new(args: &'a Args, rendezvous: &Path) -> Self {
        let mut words: Vec<String> = vec!["faults".into(), "--as-rank".into()];
        words.extend(["--ranks".into(), args.ranks.to_string(), "--transport".into(), args.transport.to_string()]);
        words.extend(["--seed".into(), args.seed.to_string(), "--deadline-ms".into(), args.deadline().as_millis().to_string()]);
        let (held, tally) = (vec![None; args.ranks as usize], Tally::default());
        Self { args, words, rendezvous: rendezvous.to_owned(), ranks: Vec::new(), held, tally, random: 0 }
    }

    /// A random number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.random += 1;
        data::seed(self.args.seed, 91, self.random) % end.max(1)
    }

    /// When something that takes its deadline, and no longer, must be over.
    fn limit(&self) -> Instant {
        let start = if self.args.on_gpus() { 60 } else { 20 };
        Instant::now() + self.args.deadline() * 3 + Duration::from_secs(start)
    }

    fn start(&mut self, rank: u32) -> anyhow::Result<Process> {
        self.held[rank as usize] = None;
        Process::start(rank, self.args.ranks, &self.rendezvous, &self.words)
    }

    /// Starts a whole group.
    fn fill(&mut self) -> anyhow::Result<()> {
        for rank in 0..self.args.ranks {
            let process = self.start(rank)?;
            self.ranks.push(process);
        }
        match self.all_ready(self.args.ranks) {
            Ok(()) => Ok(()),
            Err(Spoilt(error)) => Err(error.unwrap_or_else(|| anyhow!("see above")).context("a new group does not work")),
        }
    }

    /// One fault and what follows it; `survivors`: whether those go on by themselves before a replacement comes.
    fn episode(&mut self, injection: Injection, survivors: bool) -> Result<(), Spoilt> {
        let victim = self.below(u64::from(self.args.ranks)) as usize;
        let moment = Duration::from_micros(self.below(60_000));
        match injection {
            Injection::ShortStop => self.short_stop(victim, moment)?,
            _ => self.loss(injection, victim, moment, survivors)?,
        }
        self.tally.injected(injection);
        Ok(())
    }

    fn short_stop(&mut self, victim: usize, moment: Duration) -> Result<(), Spoilt> {
        self.order_all(Order::Run { calls: CALLS })?;
        std::thread::sleep(moment);
        self.ranks[victim].signal(Signal::STOP)?;
        let stop = self.args.deadline().mul_f64(0.1 + 0.4 * self.below(1000) as f64 / 1000.0);
        std::thread::sleep(stop);
        self.ranks[victim].signal(Signal::CONT)?;
        let limit = self.limit();
        for at in 0..self.ranks.len() {
            let report = self.hear(at, limit)?;
            match report {
                Report::Done { wrong: 0 } => {}
                Report::Done { wrong } => self.tally.count(Against::Wrong, &format!("rank {at}, {wrong} outputs around a short stop")),
                other => {
                    self.tally.count(Against::Misnamed, &format!("rank {at} after {stop:?} of a stop of rank {victim}: {other:?}"));
                    return Err(Spoilt(None));
                }
            }
        }
        Ok(())
    }

    /// A rank that is lost to the others, for good or for too long.
    fn loss(&mut self, injection: Injection, victim: usize, moment: Duration, survivors: bool) -> Result<(), Spoilt> {
        let away = self.below(20);
        for at in 0..self.ranks.len() {
            let calls = if injection == Injection::Missing && at == victim { away } else { u64::MAX };
            self.ranks[at].order(Order::Run { calls })?;
        }
        if injection == Injection::Missing {
            let limit = self.limit();
            match self.hear(victim, limit)? {
                Report::Done { wrong: 0 } => {}
                other => {
                    self.tally.count(Against::Broken, &format!("rank {victim}, which was to stay away, says {other:?}"));
                    return Err(Spoilt(None));
                }
            }
        } else {
            std::thread::sleep(moment);
        }
        let injected = now();
        match injection {
            Injection::Kill => self.ranks[victim].signal(Signal::KILL)?,
            Injection::LongStop => self.ranks[victim].signal(Signal::STOP)?,
            _ => {}
        }
        self.all_failed(injection, victim, injected)?;
        let late = self.ranks.remove(victim);
        if survivors {
            self.order_all(Order::Rebuild { whole: false })?;
            self.all_ready(self.args.ranks - 1)?;
            self.tally.rebuilt_with_survivors += 1;
        }
        let replacement = self.start(victim as u32)?;
        self.order_all(Order::Rebuild { whole: true })?;
        self.ranks.insert(victim, replacement);
        self.all_ready(self.args.ranks)?;
        self.tally.rebuilt_whole += 1;
        if injection != Injection::Kill {
            self.runs_on(injection, late)?;
        }
        Ok(())
    }

    /// Whether every rank but the victim fails as it must, in time.
    fn all_failed(&mut self, injection: Injection, victim: usize, injected: u64) -> Result<(), Spoilt> {
        let (limit, deadline) = (self.limit(), self.args.deadline());
        for at in (0..self.ranks.len()).filter(|&at| at != victim) {
            let report = self.hear(at, limit)?;
            let Report::Failed { how, began, ended, wrong, text } = report else {
                self.tally.count(Against::Misnamed, &format!("rank {at} after {injection:?} of rank {victim}: {report:?}"));
                return Err(Spoilt(None));
            };
            let lasted = Duration::from_nanos(ended - began);
            let after = Duration::from_nanos(ended.saturating_sub(injected.max(began)));
            let (named, timely) = if injection == Injection::Kill {
                self.tally.slowest_loss = self.tally.slowest_loss.max(after);
                (how == How::PeerLost { rank: victim as u32 }, after < LOSS)
            } else {
                self.tally.slowest_timeout = self.tally.slowest_timeout.max(after.saturating_sub(deadline));
                (how == How::Timeout { late: vec![victim as u32] }, lasted >= deadline && after <= deadline + SLACK)
            };
            if !named {
                self.tally.count(Against::Misnamed, &format!("rank {at} after {injection:?} of rank {victim}: {text}"));
            }
            if !timely {
                let words = format!("rank {at} after {injection:?} of rank {victim}: {after:?} later, in a call of {lasted:?}: {text}");
                self.tally.count(Against::Mistimed, &words);
            }
            if wrong > 0 {
                self.tally.count(Against::Wrong, &format!("rank {at}, {wrong} outputs before {injection:?} of rank {victim}"));
            }
        }
        Ok(())
    }

    /// A rank that the others have given up runs on: it fails, and the group computes right results.
    fn runs_on(&mut self, injection: Injection, mut late: Process) -> Result<(), Spoilt> {
        match injection {
            Injection::LongStop => late.signal(Signal::CONT)?,
            _ => late.order(Order::Run { calls: 1 })?,
        }
        self.order_all(Order::Run { calls: 20 })?;
        let limit = self.limit();
        match late.report(limit)? {
            Some(Report::Failed { wrong: 0, .. }) => {}
            None => self.tally.count(Against::Hang, &format!("rank {}, which ran on", late.rank)),
            Some(other) => self.tally.count(Against::Misnamed, &format!("rank {}, which ran on, says {other:?}", late.rank)),
        }
        late.order(Order::Quit)?;
        if !late.ended(limit)? {
            self.tally.count(Against::Hang, &format!("rank {}, which ran on, does not end", late.rank));
        }
        for at in 0..self.ranks.len() {
            match self.hear(at, limit)? {
                Report::Done { wrong: 0 } => {}
                Report::Done { wrong } => self.tally.count(Against::Wrong, &format!("rank {at}, {wrong} outputs beside a late rank")),
                other => {
                    self.tally.count(Against::Misnamed, &format!("rank {at}, beside a late rank: {other:?}"));
                    return Err(Spoilt(None));
                }
            }
        }
        Ok(())
    }

    /// Whether every rank says that it is ready, in a world of `world`, and holds no more than before.
    fn all_ready(&mut self, world: u32) -> Result<(), Spoilt> {
        let limit = self.limit();
        for at in 0..self.ranks.len() {
            let report = self.hear(at, limit)?;
            let rank = self.ranks[at].rank;
            match report {
                Report::Ready { world: of, wrong, usage } if of == world => {
                    if wrong > 0 {
                        self.tally.count(Against::Wrong, &format!("rank {rank}, {wrong} outputs of a new group"));
                    }
                    if world == self.args.ranks {
                        self.weigh(rank, usage);
                    }
                }
                other => {
                    self.tally.count(Against::Broken, &format!("rank {rank}, to be ready in a world of {world}: {other:?}"));
                    return Err(Spoilt(None));
                }
            }
        }
        Ok(())
    }

    /// Compares what a rank holds in a whole world with what it held at first; a driver keeps some of what the first rebuild needed.
    fn weigh(&mut self, rank: u32, usage: Usage) {
        let first = if self.args.on_gpus() { 2 } else { 1 };
        let held = self.held[rank as usize].get_or_insert((usage, 0));
        held.1 += 1;
        if held.1 <= first {
            held.0 = held.0.max(usage);
        } else if usage.exceeds(&held.0) {
            self.tally.count(Against::Residue, &format!("rank {rank} held {:?} at first and holds {usage:?}", held.0));
        }
    }

    /// A rank's next report. One that hangs or has ended is counted.
    fn hear(&mut self, at: usize, limit: Instant) -> Result<Report, Spoilt> {
        let rank = self.ranks[at].rank;
        match self.ranks[at].report(limit) {
            Ok(Some(report)) => return Ok(report),
            Ok(None) => self.tally.count(Against::Hang, &format!("rank {rank} does not answer")),
            Err(error) => self.tally.count(Against::Broken, &format!("{error:#}")),
        }
        Err(Spoilt(None))
    }

    fn order_all(&mut self, order: Order) -> anyhow::Result<()> {
        self.ranks.iter_mut().try_for_each(|rank| rank.order(order))
    }

    /// Ends the ranks, which must end by themselves.
    fn end(&mut self) -> anyhow::Result<()> {
        self.order_all(Order::Quit)?;
        let limit = self.limit();
        for mut rank in self.ranks.drain(..) {
            if !rank.ended(limit)? {
                self.tally.count(Against::Hang, &format!("rank {} does not end", rank.rank));
            }
        }
        Ok(())
    }
}
