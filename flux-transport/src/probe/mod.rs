//! Whether devices reach each other's memory, proven by data, in a process of its own where there can be one.
//!
//! Invariant: an answer is found in bounded time whatever the driver does, and what is not proven does not pass for it: a probe that hangs, crashes or says
//! anything but a whole report has proven that peer access does not work here. Only a report is kept on disk, and only for this boot.
//!
//! ```text
//! disk, for these devices, driver, boot and version -> a child: FLUX_PROBE, this program if it calls `serve`, flux-probe -> a thread of this process
//! ```
//!
//! A library cannot start the program that uses it again: that would run its `main`. So a program that wants no second file calls [`serve`] first thing in its
//! `main`; others have `flux-probe` beside them or on the path. Without either the driver is asked on a thread of this process: a hang is then noticed in
//! time all the same, and a crash is not survived.

mod cache;
mod child;
mod devices;
mod program;
mod report;
mod request;

pub use report::{Direction, Report};

use crate::cuda::DeviceUuid;
use cache::Key;
use child::Silence;
use report::Answer;
use request::{REQUEST, Request};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a probe may take: contexts on all devices of a cold machine, and some.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Has a rank, and any probe, find that what peers write is not there, on machines where it is; for tests of what happens then.
const VETO: &str = "FLUX_VETO_PEER";

/// Whether `FLUX_VETO_PEER=1` has this process find that peer access does not work.
pub fn vetoed() -> bool {
    is_one(std::env::var_os(VETO).as_deref())
}

/// Whether `NCCL_P2P_DISABLE=1` forbids peer access to this process, as to NCCL.
pub fn forbidden() -> bool {
    is_one(std::env::var_os("NCCL_P2P_DISABLE").as_deref())
}

fn is_one(variable: Option<&OsStr>) -> bool {
    variable.and_then(OsStr::to_str).is_some_and(|value| value.trim().parse() == Ok(1))
}

/// Whether this program answers when it is started again.
static SERVES: AtomicBool = AtomicBool::new(false);

/// Makes this program its own probe: to be called first thing in `main`, before threads and output.
///
/// In a process that was started to be a probe it answers on stdout and ends the process; in any other it returns at once, and from then on the
/// program is started again where devices are to be asked.
///
/// ```
/// flux_transport::probe::serve();
/// // ... the program
/// ```
pub fn serve() {
    SERVES.store(true, Ordering::Relaxed);
    let Some(text) = std::env::var_os(REQUEST) else { return };
    // Whatever the driver does and whoever is left to wait, this process ends. Without the thread the parent ends it.
    let _ = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(LIMIT + Duration::from_secs(5));
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
    });
    let request = text.to_str().and_then(Request::decode);
    let unknown = || Answer::Cannot(format!("{REQUEST} is not a request of flux {}", env!("CARGO_PKG_VERSION")));
    let answer = request.map_or_else(unknown, |request| devices::ask(&request));
    let written = std::io::Write::write_all(&mut std::io::stdout(), answer.encode().as_bytes());
    #[allow(clippy::exit, reason = "a probe has nothing else to do, and what the driver left running ends with it")]
    std::process::exit(i32::from(written.is_err()))
}

/// What is known of peer access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Every device reaches every other, proven by data.
    Works,
    /// Some do not, or the probe did not survive.
    Fails,
    /// The devices could not be asked.
    Unknown,
}

/// An answer, and where it is from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The answer.
    pub verdict: Verdict,
    /// Who was asked, and why that was all that could be done.
    pub how: String,
    /// What was found between the devices; `None` where nobody answered.
    pub report: Option<Report>,
}

impl Proof {
    fn without(verdict: Verdict, how: String) -> Self {
        Self { verdict, how, report: None }
    }

    /// The whole in one sentence, with what a person can do about faults.
    pub fn words(&self) -> String {
        const SHOWN: usize = 2;
        let Some(report) = &self.report else { return self.how.clone() };
        let faults: Vec<String> = report.faults().collect();
        let found = match faults.len() {
            0 => format!("peer access works in both directions of every pair of {} GPUs", report.devices.len()),
            n if n <= SHOWN => format!("peer access does not work {}", faults.join("; ")),
            n => format!("peer access does not work {}; nor in {} more directions", faults[..SHOWN].join("; "), n - SHOWN),
        };
        [format!("{found} ({})", self.how)].iter().chain(&report.advice).map(String::as_str).collect::<Vec<_>>().join("; ")
    }
}

/// Whether these devices reach each other's memory. Takes at most a little more than `limit`, and usually no time, as the answer is kept on disk.
///
/// `veto` has a probe find that nothing arrives, for tests; that is not kept.
pub fn prove(devices: &[DeviceUuid], veto: bool, limit: Duration) -> Proof {
    let mut devices = devices.to_vec();
    devices.sort();
    devices.dedup();
    if devices.len() < 2 {
        return Proof::without(Verdict::Works, "one device has no peers".to_owned());
    }
    let env = |name: &str| std::env::var_os(name);
    let own = std::env::current_exe().ok();
    let ways = Ways {
        cache: if veto { None } else { cache::folder(env).zip(Key::here(&devices)) },
        program: program::find(env, own.as_deref(), SERVES.load(Ordering::Relaxed)),
        here: devices::ask,
    };
    ways.ask(&Request { devices, veto }, limit)
}

/// Whom to ask.
struct Ways {
    cache: Option<(PathBuf, Key)>,
    program: Option<PathBuf>,
    here: fn(&Request) -> Answer,
}

impl Ways {
    fn ask(&self, request: &Request, limit: Duration) -> Proof {
        if let Some((report, path)) = self.cache.as_ref().and_then(|(folder, key)| cache::read(folder, key))
            && report.devices == request.devices
        {
            return known(report, format!("proven earlier in this boot, {}; delete it to prove anew", path.display()));
        }
        let proof = match &self.program {
            None => in_process(
                self.here,
                request,
                limit,
                "there is no flux-probe beside this program or on the path, and it does not call probe::serve()",
            ),
            Some(program) => self.in_child(program, request, limit),
        };
        if let (Some((folder, key)), Some(report)) = (&self.cache, &proof.report) {
            cache::write(folder, key, report);
        }
        proof
    }

    fn in_child(&self, program: &Path, request: &Request, limit: Duration) -> Proof {
        let began = Instant::now();
        let rest = || limit.saturating_sub(began.elapsed());
        match child::run(program, request, limit) {
            Ok(Answer::Report(report)) if report.devices == request.devices => {
                known(report, format!("proven in a process of its own in {:.1} s", began.elapsed().as_secs_f64()))
            }
            Ok(Answer::Report(_)) => Proof::without(Verdict::Fails, format!("the probe {} answered for other devices", program.display())),
            Ok(Answer::Cannot(why)) => in_process(self.here, request, rest(), &format!("the probe could not ask: {why}")),
            Err(Silence::NotStarted(why)) => {
                in_process(self.here, request, rest(), &format!("the probe {} does not start: {why}", program.display()))
            }
            Err(silence) => {
                let why = format!("the probe {} proved nothing: {silence}; NCCL_P2P_DISABLE=1 passes it over", program.display());
                Proof::without(Verdict::Fails, why)
            }
        }
    }
}

fn known(report: Report, how: String) -> Proof {
    let verdict = if report.works() { Verdict::Works } else { Verdict::Fails };
    Proof { verdict, how, report: Some(report) }
}

/// Asks on a thread, which is left behind if the driver does not let it go.
fn in_process(here: fn(&Request) -> Answer, request: &Request, limit: Duration, why: &str) -> Proof {
    let (say, hear) = mpsc::channel();
    let for_thread = request.clone();
    let started = std::thread::Builder::new().name("flux-probe".to_owned()).spawn(move || {
        // Nobody listens any more where the limit has passed.
        let _ = say.send(here(&for_thread));
    });
    if let Err(error) = started {
        return Proof::without(Verdict::Unknown, format!("not proven: no thread to ask on: {error}; {why}"));
    }
    match hear.recv_timeout(limit) {
        Ok(Answer::Report(report)) => known(report, format!("proven within this process, as {why}")),
        Ok(Answer::Cannot(cannot)) => Proof::without(Verdict::Unknown, format!("not proven: {cannot}; {why}")),
        Err(_) => {
            let stuck = format!("no answer in {limit:?}, the driver of this process may be stuck; asked within this process, as {why}");
            Proof::without(Verdict::Fails, stuck)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::report::tests::{report, uuid};
    use super::*;

    fn request() -> Request {
        Request { devices: vec![uuid(0), uuid(1)], veto: false }
    }

    fn works(_: &Request) -> Answer {
        Answer::Report(report(2, &[]))
    }

    fn cannot(_: &Request) -> Answer {
        Answer::Cannot("no driver".to_owned())
    }

    fn hangs(_: &Request) -> Answer {
        std::thread::sleep(Duration::from_secs(20));
        works(&request())
    }

    fn ways(program: Option<&str>, here: fn(&Request) -> Answer) -> Ways {
        Ways { cache: None, program: program.map(PathBuf::from), here }
    }

    #[test]
    fn without_a_program_the_answer_is_this_process_s_and_says_so() {
        let proof = ways(None, works).ask(&request(), LIMIT);
        assert_eq!((proof.verdict, proof.report.is_some()), (Verdict::Works, true));
        assert!(proof.how.contains("within this process") && proof.how.contains("serve"), "{}", proof.how);
        let proof = ways(Some("/no/such/program"), works).ask(&request(), LIMIT);
        assert!(proof.verdict == Verdict::Works && proof.how.contains("does not start"), "{}", proof.how);
        let proof = ways(None, cannot).ask(&request(), LIMIT);
        assert!(proof.verdict == Verdict::Unknown && proof.words().contains("no driver"), "{proof:?}");
    }

    #[test]
    fn a_driver_that_hangs_in_this_process_is_a_no_in_time() {
        let start = Instant::now();
        let proof = ways(None, hangs).ask(&request(), Duration::from_millis(100));
        assert_eq!(proof.verdict, Verdict::Fails);
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_program_that_says_nothing_is_a_no_and_this_process_is_not_risked() {
        let proof = ways(Some("/bin/true"), works).ask(&request(), LIMIT);
        assert!(proof.verdict == Verdict::Fails && proof.how.contains("without an answer"), "{}", proof.how);
    }

    #[test]
    fn a_report_is_kept_and_silence_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::of(&request().devices, "boot", "driver");
        let ways = |program| Ways { cache: Some((folder.path().to_owned(), key.clone())), ..ways(program, works) };
        assert_eq!(ways(Some("/bin/true")).ask(&request(), LIMIT).verdict, Verdict::Fails);
        assert_eq!(ways(None).ask(&request(), LIMIT).verdict, Verdict::Works);
        let kept = ways(Some("/bin/true")).ask(&request(), LIMIT);
        assert!(kept.verdict == Verdict::Works && kept.how.contains("earlier"), "{}", kept.how);
    }

    #[test]
    fn a_switch_is_on_at_one_alone() {
        for (value, on) in
            [(None, false), (Some(""), false), (Some("0"), false), (Some("1"), true), (Some(" 1"), true), (Some("yes"), false)]
        {
            assert_eq!(is_one(value.map(OsStr::new)), on, "{value:?}");
        }
    }

    #[test]
    fn one_device_needs_no_proof() {
        assert_eq!(prove(&[uuid(3), uuid(3)], false, LIMIT).verdict, Verdict::Works);
    }

    #[test]
    fn words_name_faults_and_what_to_do() {
        let proof = known(report(3, &[(0, 1), (1, 2), (2, 0)]), "somehow".to_owned());
        let words = proof.words();
        assert!(words.contains(&uuid(1).to_string()) && words.contains("nor in 1 more directions"), "{words}");
        assert!(words.contains("(somehow)") && words.ends_with("some advice"), "{words}");
    }
}
