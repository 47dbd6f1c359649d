//! What all ranks must ask for alike when they connect, as text.
//!
//! Invariant: terms stand in one order, so ranks' texts are compared part by part.

use crate::{Options, Select};

const SEPARATOR: &str = " | ";

/// Of which lineage a communicator is to be, before its number.
const REBUILD: &str = "rebuild of communicator ";

/// What all ranks must ask for alike, in words that an error can show.
pub(super) fn terms(select: Select, options: &Options, lineage: Option<u32>) -> String {
    let Options { deadline, first_epoch, shared_device, nodes, reserve, .. } = options;
    let version = env!("CARGO_PKG_VERSION");
    let mut terms = vec![
        format!("flux {version}"),
        // Named by the program, or by FLUX_TRANSPORT where that leaves it open.
        format!("transport {select}"),
        format!("deadline {deadline:?}"),
        format!("first epoch {first_epoch}"),
        format!("shared device {shared_device}"),
        nodes.map_or_else(|| "nodes by host".to_owned(), |count| format!("{count} nodes")),
        format!("{reserve:?}"),
    ];
    // Last: a replacement says nothing of what it does not know.
    terms.extend(lineage.map(|lineage| format!("{REBUILD}{lineage}")));
    terms.join(SEPARATOR)
}

/// The lineage that an answer names.
pub(super) fn lineage_of(answer: &str) -> Option<u32> {
    answer.rsplit(SEPARATOR).next()?.strip_prefix(REBUILD)?.parse().ok()
}

/// What is not the same on all ranks that say it, rank by rank, where there is such a thing.
pub(super) fn differences(answers: &[String]) -> Option<String> {
    let terms: Vec<Vec<&str>> =
        answers.iter().map(|answer| answer.split(SEPARATOR).collect()).collect();
    let said = |at: usize| terms.iter().filter_map(move |terms| terms.get(at));
    let differs = |&at: &usize| said(at).zip(said(at).skip(1)).any(|(one, other)| one != other);
    let most = terms.iter().map(Vec::len).max().unwrap_or(0);
    let differing: Vec<usize> = (0..most).filter(differs).collect();
    if differing.is_empty() {
        return None;
    }
    let values = |terms: &Vec<&str>| {
        differing
            .iter()
            .filter_map(|&at| terms.get(at).copied())
            .collect::<Vec<_>>()
            .join(SEPARATOR)
    };
    Some(
        terms
            .iter()
            .enumerate()
            .map(|(rank, terms)| format!("rank {rank}: {}", values(terms)))
            .collect::<Vec<_>>()
            .join("; "),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn ranks_that_ask_for_different_things_are_told_these_alone() {
        let options = Options::default();
        let answers = [Select::NvLink, Select::Host, Select::NvLink]
            .map(|select| terms(select, &options, None));
        assert_eq!(
            differences(&answers).unwrap(),
            "rank 0: transport nvlink; rank 1: transport host; rank 2: transport nvlink"
        );
        let late = Options { deadline: Duration::from_secs(1), ..options };
        let answers = [terms(Select::Auto, &options, None), terms(Select::Host, &late, None)];
        assert_eq!(
            differences(&answers).unwrap(),
            "rank 0: transport auto | deadline 30s; rank 1: transport host | deadline 1s"
        );
        // A replacement, the second here, does not know what the others rebuild.
        let rebuild = |predecessors: [Option<u32>; 3]| {
            differences(&predecessors.map(|number| terms(Select::Host, &options, number)))
        };
        assert_eq!(rebuild([Some(1), None, Some(1)]), None);
        let differ =
            "rank 0: rebuild of communicator 1; rank 1: ; rank 2: rebuild of communicator 0";
        assert_eq!(rebuild([Some(1), None, Some(0)]).unwrap(), differ);
    }
}
