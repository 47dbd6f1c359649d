//! Whether devices reach each other within their nodes.
//!
//! Invariant: the first rank of each node asks; the verdict is a pure function of their answers.
//! One node's no is everybody's.

use super::facts::{Facts, RankGpu};
use crate::ConnectError;
use crate::bootstrap::control::agree;
use crate::topology::probe::{self, Verdict};
use crate::{ControlError, Hosts, Options, World};
use flux_core::Nodes;
use flux_cuda::DeviceUuid;
use std::time::{Duration, Instant};

/// How long a probe's end may take beyond its limit.
const SLACK: Duration = Duration::from_secs(5);

/// Whether the devices of each node reach each other. All nodes ask at once. Collective.
pub(super) fn proven(
    world: &World,
    options: &Options,
    facts: &[Facts],
    nodes: Nodes,
) -> Result<(Verdict, String), ConnectError> {
    let until = Instant::now() + options.deadline + probe::LIMIT + SLACK;
    let rank = world.rank();
    let own = if nodes.local_of(rank) == 0 {
        let node_peers: Vec<&Facts> = world
            .size()
            .ranks()
            .zip(facts)
            .filter(|&(node_peer, _)| nodes.together(rank, node_peer))
            .map(|(_, facts)| facts)
            .collect();
        let devices: Vec<DeviceUuid> = node_peers
            .iter()
            .filter_map(
                |facts| if let RankGpu::Found(uuid) = facts.gpu { Some(uuid) } else { None },
            )
            .collect();
        let proof = probe::prove(&devices, node_peers.iter().any(|facts| facts.veto));
        encode(proof.verdict, &proof.words())
    } else {
        Vec::new()
    };
    let answers = agree(world.steps(), &Ok::<_, &str>(own), until)?;
    let firsts = (0..nodes.count()).map(|node| nodes.rank(node, 0));
    let said = firsts.map(|rank| {
        let unknown = || ControlError::Protocol {
            rank,
            detail: "its verdict is not of this version".to_owned(),
        };
        answers.get(rank.index()).and_then(|answer| decode(answer)).ok_or_else(unknown)
    });
    Ok(unanimous(&said.collect::<Result<Vec<_>, _>>()?, nodes, world.hosts()))
}

/// Combines the nodes' verdicts; the words are those of the deciding nodes.
fn unanimous(said: &[(Verdict, String)], nodes: Nodes, hosts: &Hosts) -> (Verdict, String) {
    let any = |wanted| said.iter().any(|&(verdict, _)| verdict == wanted);
    let verdict = [Verdict::Fails, Verdict::Unknown]
        .into_iter()
        .find(|&verdict| any(verdict))
        .unwrap_or(Verdict::Works);
    if let [(_, words)] = said {
        return (verdict, words.clone());
    }
    let deciding = (0..).zip(said).filter(|(_, (said, _))| *said == verdict);
    let words: Vec<String> = deciding
        .map(|(node, (_, words))| format!("{}: {words}", name(node, nodes, hosts)))
        .collect();
    (verdict, words.join("; "))
}

/// A node as a person knows it: by its ranks, and as a host where every node is one.
fn name(node: u32, nodes: Nodes, hosts: &Hosts) -> String {
    let what = if nodes.count() == hosts.count() { "host" } else { "node" };
    format!(
        "{what} {node} (ranks {} to {})",
        nodes.rank(node, 0),
        nodes.rank(node, nodes.per_node() - 1)
    )
}

const VERDICTS: [(u8, Verdict); 3] =
    [(b'w', Verdict::Works), (b'f', Verdict::Fails), (b'u', Verdict::Unknown)];

pub(super) fn encode(verdict: Verdict, words: &str) -> Vec<u8> {
    let tag = VERDICTS.iter().find(|(_, known)| *known == verdict).map_or(b'f', |(tag, _)| *tag);
    [&[tag], words.as_bytes()].concat()
}

pub(super) fn decode(message: &[u8]) -> Option<(Verdict, String)> {
    let (tag, words) = message.split_first()?;
    let (_, verdict) = VERDICTS.iter().find(|(known, _)| known == tag)?;
    Some((*verdict, std::str::from_utf8(words).ok()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;
    use proptest::prelude::*;

    fn nodes(world: u32, count: u32) -> Nodes {
        Nodes::new(WorldSize::new(world).unwrap(), count).unwrap()
    }

    #[test]
    fn a_verdict_comes_back() {
        for (_, verdict) in VERDICTS {
            assert_eq!(decode(&encode(verdict, "words")), Some((verdict, "words".to_owned())));
        }
        assert_eq!((decode(b""), decode(b"x")), (None, None));
    }

    /// What the ranks hear whose devices no machine has. Those of `shared` have one and the same.
    fn told(nodes: Nodes, shared: &[u32]) -> Vec<(Verdict, String)> {
        let on = |rank: u32| Facts {
            gpu: RankGpu::Found(DeviceUuid(
                [if shared.contains(&rank) { 0 } else { rank as u8 }; 16],
            )),
            p2p_disabled: false,
            veto: false,
            boot: String::new(),
            visible: String::new(),
        };
        let facts: Vec<Facts> = (0..nodes.world().get()).map(on).collect();
        let worlds = World::local(nodes.world().get()).unwrap();
        let options = Options { deadline: AMPLE, ..Options::default() };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds
                .iter()
                .map(|world| scope.spawn(|| proven(world, &options, &facts, nodes).unwrap()))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_first_rank_asks_and_every_rank_takes_its_word() {
        let told = told(nodes(3, 1), &[]);
        assert!(told[0].0 == Verdict::Unknown && told[0].1.contains("not proven"), "{told:?}");
        assert!(told.iter().all(|verdict| *verdict == told[0]), "{told:?}");
    }

    #[test]
    fn the_first_rank_of_each_node_asks_for_its_own_and_all_take_one_verdict() {
        // The devices of the last node are one, which needs no proof; of the others nobody can say
        // anything.
        let told = told(nodes(6, 3), &[4, 5]);
        let (verdict, words) = &told[0];
        assert_eq!(*verdict, Verdict::Unknown, "{words}");
        assert!(
            words.contains("node 0 (ranks 0 to 1): not proven")
                && words.contains("node 1 (ranks 2 to 3): "),
            "{words}"
        );
        assert!(!words.contains("node 2"), "{words}");
        assert!(told.iter().all(|verdict| *verdict == told[0]), "{told:?}");
    }

    #[test]
    fn words_name_the_hosts_that_decide() {
        let said = |verdict| (verdict, format!("{verdict:?}"));
        let (works, fails, unknown) =
            (said(Verdict::Works), said(Verdict::Fails), said(Verdict::Unknown));
        let hosts = Hosts::group(&[0, 0, 1, 1, 2, 2]);
        let judged =
            |said: [&(Verdict, String); 3]| unanimous(&said.map(Clone::clone), nodes(6, 3), &hosts);
        assert_eq!(
            judged([&works, &fails, &unknown]),
            (Verdict::Fails, "host 1 (ranks 2 to 3): Fails".to_owned())
        );
        assert_eq!(
            judged([&works, &works, &unknown]),
            (Verdict::Unknown, "host 2 (ranks 4 to 5): Unknown".to_owned())
        );
        let (verdict, words) = judged([&works, &works, &works]);
        assert_eq!(verdict, Verdict::Works);
        assert_eq!(
            words,
            "host 0 (ranks 0 to 1): Works; host 1 (ranks 2 to 3): Works; host 2 (ranks 4 to 5): \
             Works"
        );
        // One node is all ranks, and needs no name.
        let one = Hosts::one(WorldSize::new(6).unwrap());
        assert_eq!(unanimous(std::slice::from_ref(&fails), nodes(6, 1), &one), fails);
    }

    proptest! {
        #[test]
        fn it_is_proven_only_where_every_node_proved_it(
            said in prop::collection::vec(0..3_usize, 2..8),
        ) {
            let count = said.len() as u32;
            let said: Vec<_> = said.into_iter().map(|at| (VERDICTS[at].1, "why".to_owned())).collect();
            let (verdict, _) = unanimous(&said, nodes(2 * count, count), &Hosts::one(WorldSize::new(2 * count).unwrap()));
            let all = |wanted| said.iter().all(|&(verdict, _)| verdict == wanted);
            let any = |wanted| said.iter().any(|&(verdict, _)| verdict == wanted);
            prop_assert_eq!(verdict == Verdict::Works, all(Verdict::Works));
            prop_assert_eq!(verdict == Verdict::Fails, any(Verdict::Fails));
        }
    }
}
