//! Whom to ask, in which order.
//!
//! Invariant: [`Ways::ask`] returns soon after its limit. Silence of a started program is a no:
//! this process is not risked. A program that could not ask says nothing, and this process asks.

use super::cache::{self, CacheKey};
use super::child::{self, Silence};
use super::proof::{Proof, Verdict};
use super::report::ChildReport;
use super::request::Request;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub(super) struct Ways {
    pub(super) cache: Option<(PathBuf, CacheKey)>,
    pub(super) program: Option<PathBuf>,
    pub(super) here: fn(&Request) -> ChildReport,
}

impl Ways {
    pub(super) fn ask(&self, request: &Request, limit: Duration) -> Proof {
        if let Some((report, path)) =
            self.cache.as_ref().and_then(|(folder, key)| cache::read(folder, key))
            && report.devices == request.devices
        {
            return Proof::of(
                report,
                format!("proven earlier in this boot, {}; delete it to prove anew", path.display()),
            );
        }
        let proof = match &self.program {
            None => in_process(
                self.here,
                request,
                limit,
                "there is no flux-probe beside this program or on the path, and it does not call \
                 probe::serve()",
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
            Ok(ChildReport::Report(report)) if report.devices == request.devices => Proof::of(
                report,
                format!("proven in a process of its own in {:.1} s", began.elapsed().as_secs_f64()),
            ),
            Ok(ChildReport::Report(_)) => Proof::without(
                Verdict::Fails,
                format!("the probe {} answered for other devices", program.display()),
            ),
            Ok(ChildReport::Cannot(why)) => {
                in_process(self.here, request, rest(), &format!("the probe could not ask: {why}"))
            }
            Err(Silence::NotStarted(why)) => in_process(
                self.here,
                request,
                rest(),
                &format!("the probe {} does not start: {why}", program.display()),
            ),
            Err(silence) => {
                let why = format!(
                    "the probe {} proved nothing: {silence}; NCCL_P2P_DISABLE=1 passes it over",
                    program.display()
                );
                Proof::without(Verdict::Fails, why)
            }
        }
    }
}

/// Asks on a thread, which is left behind if the driver does not let it go.
fn in_process(
    here: fn(&Request) -> ChildReport,
    request: &Request,
    limit: Duration,
    why: &str,
) -> Proof {
    let (say, hear) = mpsc::channel();
    let for_thread = request.clone();
    let started = std::thread::Builder::new().name("flux-probe".to_owned()).spawn(move || {
        // Nobody listens any more where the limit has passed.
        let _ = say.send(here(&for_thread));
    });
    if let Err(error) = started {
        return Proof::without(
            Verdict::Unknown,
            format!("not proven: no thread to ask on: {error}; {why}"),
        );
    }
    match hear.recv_timeout(limit) {
        Ok(ChildReport::Report(report)) => {
            Proof::of(report, format!("proven within this process, as {why}"))
        }
        Ok(ChildReport::Cannot(cannot)) => {
            Proof::without(Verdict::Unknown, format!("not proven: {cannot}; {why}"))
        }
        Err(_) => {
            let stuck = format!(
                "no answer in {limit:?}, the driver of this process may be stuck; asked within \
                 this process, as {why}"
            );
            Proof::without(Verdict::Fails, stuck)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::assert_soon;
    use crate::topology::probe::LIMIT;
    use crate::topology::probe::report::tests::{report, uuid};

    fn request() -> Request {
        Request { devices: vec![uuid(0), uuid(1)], veto: false }
    }

    fn works(_: &Request) -> ChildReport {
        ChildReport::Report(report(2, &[]))
    }

    fn cannot(_: &Request) -> ChildReport {
        ChildReport::Cannot("no driver".to_owned())
    }

    fn hangs(_: &Request) -> ChildReport {
        std::thread::sleep(Duration::from_secs(20));
        works(&request())
    }

    fn ways(program: Option<&str>, here: fn(&Request) -> ChildReport) -> Ways {
        Ways { cache: None, program: program.map(PathBuf::from), here }
    }

    #[test]
    fn without_a_program_the_answer_is_this_process_s_and_says_so() {
        let proof = ways(None, works).ask(&request(), LIMIT);
        assert_eq!((proof.verdict, proof.report.is_some()), (Verdict::Works, true));
        assert!(
            proof.how.contains("within this process") && proof.how.contains("serve"),
            "{}",
            proof.how
        );
        let proof = ways(Some("/no/such/program"), works).ask(&request(), LIMIT);
        assert!(
            proof.verdict == Verdict::Works && proof.how.contains("does not start"),
            "{}",
            proof.how
        );
        let proof = ways(None, cannot).ask(&request(), LIMIT);
        assert!(
            proof.verdict == Verdict::Unknown && proof.words().contains("no driver"),
            "{proof:?}"
        );
    }

    #[test]
    fn a_driver_that_hangs_in_this_process_is_a_no_in_time() {
        let start = Instant::now();
        let proof = ways(None, hangs).ask(&request(), Duration::from_millis(100));
        assert_eq!(proof.verdict, Verdict::Fails);
        assert_soon(start.elapsed(), Duration::from_secs(10));
    }

    #[test]
    fn a_program_that_says_nothing_is_a_no_and_this_process_is_not_risked() {
        let proof = ways(Some("/bin/true"), works).ask(&request(), LIMIT);
        assert!(
            proof.verdict == Verdict::Fails && proof.how.contains("without an answer"),
            "{}",
            proof.how
        );
    }

    #[test]
    fn a_report_is_kept_and_silence_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let key = CacheKey::of(&request().devices, "boot", "driver");
        let ways = |program| Ways {
            cache: Some((folder.path().to_owned(), key.clone())),
            ..ways(program, works)
        };
        assert_eq!(ways(Some("/bin/true")).ask(&request(), LIMIT).verdict, Verdict::Fails);
        assert_eq!(ways(None).ask(&request(), LIMIT).verdict, Verdict::Works);
        let kept = ways(Some("/bin/true")).ask(&request(), LIMIT);
        assert!(kept.verdict == Verdict::Works && kept.how.contains("earlier"), "{}", kept.how);
    }
}
