//! A probe's report as text: between processes and on disk.
//!
//! Invariant: decoding accepts exactly what [`ChildReport::encode`] of this version gives, so cut
//! output never passes for a proof.

use flux_cuda::DeviceUuid;

/// First line of a message, whatever the version.
const FAMILY: &str = "flux-probe ";
/// First line of a message of this one.
const HEADER: &str = concat!("flux-probe 1 ", env!("CARGO_PKG_VERSION"));
const END: &str = "end";
/// More devices than a host has.
const MOST: usize = 64;

/// One direction between two devices of a [`Report`], by their places in its list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Direction {
    /// The device that writes.
    pub from: usize,
    /// The device whose memory is written, and which reads.
    pub to: usize,
    /// Why it does not work; `None` where it was proven.
    pub fault: Option<String>,
}

/// What was found between some devices of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The devices, each once.
    pub devices: Vec<DeviceUuid>,
    /// Every ordered pair, by writer, then by owner.
    pub directions: Vec<Direction>,
    /// How the machine connects them, for a person.
    pub notes: Vec<String>,
    /// What a person can do about faults.
    pub advice: Vec<String>,
}

impl Report {
    /// Whether every device reaches every other.
    pub fn works(&self) -> bool {
        self.directions.iter().all(|direction| direction.fault.is_none())
    }

    /// The directions that do not work, in words.
    pub fn faults(&self) -> impl Iterator<Item = String> {
        self.directions.iter().filter_map(|Direction { from, to, fault }| {
            let fault = fault.as_ref()?;
            Some(format!("from {} to {}: {fault}", self.devices[*from], self.devices[*to]))
        })
    }
}

/// All ordered pairs of `count` devices, in the order of a report.
pub(super) fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count)
        .flat_map(move |from| (0..count).filter(move |&to| to != from).map(move |to| (from, to)))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChildReport {
    Report(Report),
    /// It could not, so nothing is known.
    Cannot(String),
}

pub(crate) fn line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl ChildReport {
    pub(super) fn encode(&self) -> String {
        let mut lines = vec![HEADER.to_owned()];
        match self {
            Self::Cannot(why) => lines.push(format!("cannot {}", line(why))),
            Self::Report(Report { devices, directions, notes, advice }) => {
                lines.extend(devices.iter().map(|uuid| format!("device {uuid}")));
                lines.extend(directions.iter().map(|Direction { from, to, fault }| match fault {
                    None => format!("works {from} {to}"),
                    Some(why) => format!("fails {from} {to} {}", line(why)),
                }));
                lines.extend(notes.iter().map(|note| format!("note {}", line(note))));
                lines.extend(advice.iter().map(|advice| format!("advice {}", line(advice))));
            }
        }
        lines.push(END.to_owned());
        lines.join("\n") + "\n"
    }

    /// The message in `text`, after anything that libraries printed before it.
    pub(super) fn decode(text: &str) -> Option<Self> {
        Self::read(text).filter(Self::is_tidy)
    }

    /// Whether its texts are as they are written.
    fn is_tidy(&self) -> bool {
        let tidy = |text: &String| line(text) == *text;
        match self {
            Self::Cannot(why) => tidy(why),
            Self::Report(Report { directions, notes, advice, .. }) => directions
                .iter()
                .filter_map(|direction| direction.fault.as_ref())
                .chain(notes)
                .chain(advice)
                .all(tidy),
        }
    }

    fn read(text: &str) -> Option<Self> {
        let mut whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        if let Some(other) = whole.find(|line| line.starts_with(FAMILY) && *line != HEADER) {
            return Some(Self::Cannot(format!(
                "the probe is of another version: `{other}` in place of `{HEADER}`"
            )));
        }
        let mut lines = text
            .strip_suffix('\n')?
            .split('\n')
            .skip_while(|&line| line != HEADER)
            .skip(1)
            .peekable();
        if let Some(why) = lines.peek().and_then(|line| line.strip_prefix("cannot ")) {
            let rest: Vec<&str> = lines.skip(1).collect();
            return (rest == [END]).then(|| Self::Cannot(why.to_owned()));
        }
        let mut report = Report {
            devices: Vec::new(),
            directions: Vec::new(),
            notes: Vec::new(),
            advice: Vec::new(),
        };
        let mut ended = false;
        for line in lines {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                _ if ended => return None,
                "device" if report.directions.is_empty() => report.devices.push(rest.parse().ok()?),
                "works" | "fails" if report.notes.is_empty() && report.advice.is_empty() => {
                    report.directions.push(direction(word, rest)?);
                }
                "note" if report.advice.is_empty() => report.notes.push(rest.to_owned()),
                "advice" => report.advice.push(rest.to_owned()),
                END => ended = true,
                _ => return None,
            }
        }
        let found = report.directions.iter().map(|direction| (direction.from, direction.to));
        let whole = ended && report.devices.len() <= MOST && found.eq(pairs(report.devices.len()));
        (whole && distinct(&report.devices)).then_some(Self::Report(report))
    }
}

fn direction(word: &str, rest: &str) -> Option<Direction> {
    let mut parts = rest.splitn(3, ' ');
    let (from, to) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let fault = match (word, parts.next()) {
        ("works", None) => None,
        ("fails", Some(why)) => Some(why.to_owned()),
        _ => return None,
    };
    Some(Direction { from, to, fault })
}

fn distinct(devices: &[DeviceUuid]) -> bool {
    devices.iter().enumerate().all(|(at, uuid)| !devices[..at].contains(uuid))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn uuid(number: u8) -> DeviceUuid {
        DeviceUuid([number; 16])
    }

    /// A report of `count` devices in which these directions fail.
    pub(crate) fn report(count: u8, failing: &[(usize, usize)]) -> Report {
        let direction = |(from, to)| {
            let fault =
                failing.contains(&(from, to)).then(|| "what was written is not there".to_owned());
            Direction { from, to, fault }
        };
        let directions = pairs(count.into()).map(direction).collect();
        Report {
            devices: (0..count).map(uuid).collect(),
            directions,
            notes: vec!["a note".to_owned()],
            advice: vec!["some advice".to_owned()],
        }
    }

    #[test]
    fn faults_name_the_direction() {
        let report = report(3, &[(2, 0)]);
        assert!(!report.works());
        let faults: Vec<String> = report.faults().collect();
        assert_eq!(
            faults,
            [format!("from {} to {}: what was written is not there", uuid(2), uuid(0))]
        );
        assert!(self::report(3, &[]).works() && self::report(1, &[]).works());
    }

    #[test]
    fn what_libraries_print_before_the_answer_is_passed_over_and_after_it_is_not() {
        let answer = ChildReport::Report(report(2, &[(0, 1)]));
        assert_eq!(
            ChildReport::decode(&format!("a banner\n{}", answer.encode())),
            Some(answer.clone())
        );
        assert_eq!(ChildReport::decode(&format!("{}more\n", answer.encode())), None);
        let other = answer.encode().replacen(env!("CARGO_PKG_VERSION"), "0.0.0", 1);
        assert!(
            matches!(ChildReport::decode(&other), Some(ChildReport::Cannot(why))
                if why.contains("0.0.0")),
            "another version's answer is none"
        );
    }

    proptest! {
        #[test]
        fn an_answer_comes_back_and_no_part_of_it_does(
            count in 0..5_u8,
            failing: [bool; 20],
            why in "[a-z\n ]{0,12}",
            cannot: bool,
            cut: prop::sample::Index,
        ) {
            let answer = if cannot {
                ChildReport::Cannot(line(&why))
            } else {
                let failing: Vec<_> = pairs(count.into()).zip(failing).filter_map(|(pair, fails)| fails.then_some(pair)).collect();
                let words = vec![line(&why); count.into()];
                ChildReport::Report(Report { notes: words.clone(), advice: words, ..report(count, &failing) })
            };
            let text = answer.encode();
            prop_assert_eq!(ChildReport::decode(&text), Some(answer));
            prop_assert_eq!(ChildReport::decode(&text[..cut.index(text.len())]), None);
        }

        #[test]
        fn a_report_that_lacks_a_line_is_none(count in 2..5_u8, line: prop::sample::Index) {
            let text = ChildReport::Report(report(count, &[])).encode();
            let mut lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("note") && !line.starts_with("advice")).collect();
            lines.remove(line.index(lines.len()));
            prop_assert_eq!(ChildReport::decode(&(lines.join("\n") + "\n")), None);
        }
    }
}
