//! What is known of peer access, and from where.
//!
//! Invariant: without a report a proof is never [`Verdict::Works`], unless there was nothing to
//! prove.

use super::report::Report;

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
    pub(super) fn without(verdict: Verdict, how: String) -> Self {
        Self { verdict, how, report: None }
    }

    pub(super) fn of(report: Report, how: String) -> Self {
        let verdict = if report.works() { Verdict::Works } else { Verdict::Fails };
        Self { verdict, how, report: Some(report) }
    }

    /// The whole in one sentence, with what a person can do about faults.
    pub fn words(&self) -> String {
        const SHOWN: usize = 2;
        let Some(report) = &self.report else { return self.how.clone() };
        let faults: Vec<String> = report.faults().collect();
        let found = match faults.len() {
            0 => format!(
                "peer access works in both directions of every pair of {} GPUs",
                report.devices.len()
            ),
            n if n <= SHOWN => format!("peer access does not work {}", faults.join("; ")),
            n => format!(
                "peer access does not work {}; nor in {} more directions",
                faults[..SHOWN].join("; "),
                n - SHOWN
            ),
        };
        [format!("{found} ({})", self.how)]
            .iter()
            .chain(&report.advice)
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::probe::report::tests::{report, uuid};

    #[test]
    fn words_name_faults_and_what_to_do() {
        let proof = Proof::of(report(3, &[(0, 1), (1, 2), (2, 0)]), "somehow".to_owned());
        let words = proof.words();
        assert!(
            words.contains(&uuid(1).to_string()) && words.contains("nor in 1 more directions"),
            "{words}"
        );
        assert!(words.contains("(somehow)") && words.ends_with("some advice"), "{words}");
    }
}
