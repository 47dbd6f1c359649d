use super::*;
use flux_cuda::DeviceUuid;
use proptest::prelude::*;

fn on(device: u8) -> Facts {
    let gpu = RankGpu::Found(DeviceUuid([device; 16]));
    Facts { gpu, p2p_disabled: false, veto: false, boot: "boot".into(), visible: String::new() }
}

fn without(broken: bool) -> Facts {
    let why = "no driver".to_owned();
    Facts { gpu: if broken { RankGpu::Broken(why) } else { RankGpu::Absent(why) }, ..on(0) }
}

/// As `nodes` nodes, where it is said.
fn judged_in(nodes: Option<u32>, facts: &[Facts], hosts: &[u8], shared: bool) -> Evidence {
    let world = WorldSize::new(facts.len() as u32).unwrap();
    judge(
        facts,
        world,
        &Hosts::group(hosts),
        &Options { shared_device: shared, nodes, ..Options::default() },
    )
}

fn candidates_in(nodes: Option<u32>, facts: &[Facts], hosts: &[u8], shared: bool) -> Candidates {
    match judged_in(nodes, facts, hosts, shared) {
        Evidence::Gpus(candidates) => candidates,
        other => panic!("{other:?}"),
    }
}

fn candidates(facts: &[Facts], hosts: &[u8], shared: bool) -> Candidates {
    candidates_in(None, facts, hosts, shared)
}

/// A device for each rank of these hosts.
fn each(hosts: &[u8]) -> Vec<Facts> {
    (0..hosts.len())
        .map(|rank| Facts { boot: format!("host {}", hosts[rank]), ..on(rank as u8) })
        .collect()
}

fn nodes(world: u32, count: u32) -> Nodes {
    Nodes::new(WorldSize::new(world).unwrap(), count).unwrap()
}

#[test]
fn ranks_of_one_host_with_a_device_each_may_try_all() {
    let found = candidates(&[on(0), on(1)], &[0, 0], false);
    assert_eq!((found.nvlink, found.pcie, found.nccl), (Ok(nodes(2, 1)), Ok(()), Ok(())));
    assert_eq!(found.mixed.unwrap_err(), "all ranks are of one node");
}

#[test]
fn peer_access_that_one_rank_forbids_is_forbidden() {
    let found = candidates(&[on(0), on(1), Facts { p2p_disabled: true, ..on(2) }], &[0; 3], false);
    assert!(found.nvlink.unwrap_err().contains("NCCL_P2P_DISABLE=1 on rank 2"));
    assert_eq!((found.pcie, found.nccl), (Ok(()), Ok(())));
}

#[test]
fn a_rank_on_each_host_leaves_nccl_and_containers_are_told_what_keeps_them_apart() {
    let far = Facts { boot: "other".into(), ..on(1) };
    let found = candidates(&[on(0), far], &[0, 1], false);
    assert!(found.pcie.is_err() && found.nccl.is_ok());
    let why = found.nvlink.unwrap_err();
    assert!(why.contains("different hosts") && !why.contains("containers"), "{why}");
    assert!(found.mixed.unwrap_err().contains("every node has one rank"));
    assert!(candidates(&[on(0), on(1)], &[0, 1], false).nvlink.unwrap_err().contains("containers"));
}

#[test]
fn a_shared_device_is_named_with_what_the_ranks_see() {
    let facts = [on(3), on(1), Facts { visible: "3,1".into(), ..on(3) }];
    let found = candidates(&facts, &[0; 3], false);
    let why = found.nvlink.unwrap_err();
    assert!(why.contains("ranks 0 and 2") && why.contains("not set and `3,1`"), "{why}");
    assert!(found.pcie.is_err() && found.nccl.is_err());
    let found = candidates(&facts, &[0; 3], true);
    assert!(
        found.nvlink.is_ok() && found.pcie.is_err() && found.nccl.is_err(),
        "ranks that agreed to share a device do so on nvlink"
    );
}

#[test]
fn only_where_nobody_has_a_gpu_is_there_the_host() {
    let judged = |facts: &[Facts]| judged_in(None, facts, &[0; 2], false);
    assert!(
        matches!(judged(&[without(false), without(false)]), Evidence::Host(why) if why.contains(
            "no driver",
        ))
    );
    for facts in [[on(0), without(false)], [without(true), without(false)], [without(true), on(1)]]
    {
        let Evidence::Uneven(why) = judged(&facts) else { panic!("{facts:?}") };
        assert!(why.contains("no driver"), "{why}");
    }
}

#[test]
fn as_many_ranks_on_each_of_several_hosts_take_peer_memory_and_messages() {
    for (hosts, count) in
        [(&[0, 0, 1, 1][..], 2), (&[0, 0, 0, 0, 1, 1, 1, 1], 2), (&[0, 0, 1, 1, 2, 2], 3)]
    {
        let found = candidates(&each(hosts), hosts, false);
        assert_eq!(
            (found.mixed, found.nccl),
            (Ok(nodes(hosts.len() as u32, count)), Ok(())),
            "{hosts:?}"
        );
        assert!(found.nvlink.is_err() && found.pcie.is_err());
    }
}

#[test]
fn hosts_that_are_no_nodes_leave_nccl_and_are_told_what_to_do() {
    for (hosts, word) in [
        (&[0, 0, 0, 1][..], "host 0 has 3 ranks, host 1 has 1: start as many on each"),
        (&[0, 1, 0, 1], "number the ranks host by host"),
        (&[0, 0, 1, 1, 0, 1], "number the ranks host by host"),
        (&[0, 1, 2], "every node has one rank"),
    ] {
        let found = candidates(&each(hosts), hosts, false);
        assert_eq!(found.nccl, Ok(()), "{hosts:?}");
        let why = found.mixed.unwrap_err();
        assert!(why.contains(word), "{hosts:?}: {why}");
    }
}

#[test]
fn one_rank_keeps_all_hosts_from_peer_memory() {
    let hosts = [0, 0, 1, 1];
    let mut facts = each(&hosts);
    facts[3].p2p_disabled = true;
    let found = candidates(&facts, &hosts, false);
    assert_eq!(found.mixed.unwrap_err(), "NCCL_P2P_DISABLE=1 on rank 3 forbids peer access");
    assert_eq!(found.nccl, Ok(()));
    let mut facts = each(&hosts);
    facts[3].gpu = facts[2].gpu.clone();
    for (shared, word) in [
        (false, "ranks 2 and 3 are both on device"),
        (true, "auto takes nvlink alone: ask for another transport by name"),
    ] {
        let found = candidates(&facts, &hosts, shared);
        assert!(
            [found.mixed.unwrap_err(), found.nccl.unwrap_err()]
                .iter()
                .all(|why| why.contains(word))
        );
    }
}

#[test]
fn nodes_that_are_asked_for_are_taken_as_such() {
    let found = |count, hosts: &[u8]| candidates_in(Some(count), &each(hosts), hosts, false);
    let on_one = found(2, &[0; 4]);
    assert_eq!((on_one.mixed, on_one.nccl), (Ok(nodes(4, 2)), Ok(())));
    assert!(
        on_one.nvlink.unwrap_err().starts_with("2 nodes are asked for") && on_one.pcie.is_err()
    );
    let one = found(1, &[0; 4]);
    assert_eq!((one.nvlink, one.pcie), (Ok(nodes(4, 1)), Ok(())));
    // Hosts with four ranks and with two are three nodes of two, and a node for each rank is
    // nccl's.
    assert_eq!(found(3, &[0, 0, 0, 0, 1, 1]).mixed, Ok(nodes(6, 3)));
    for (count, word) in [
        (4, "every node has one rank"),
        (3, "cannot be dealt evenly to 3 nodes"),
        (1, "on different hosts"),
    ] {
        let found = found(count, &[0, 0, 1, 1]);
        let why = found.mixed.unwrap_err();
        assert!(
            why.contains(word) && found.nvlink.is_err() && found.nccl.is_ok(),
            "{count}: {why}"
        );
    }
}

/// What does not depend on which rank is which.
fn shape(ground: &Evidence) -> (u8, [bool; 3]) {
    match ground {
        Evidence::Host(_) => (0, [false; 3]),
        Evidence::Uneven(_) => (1, [false; 3]),
        Evidence::Gpus(Candidates { nvlink, pcie, nccl, .. }) => {
            (2, [nvlink.is_ok(), pcie.is_ok(), nccl.is_ok()])
        }
    }
}

prop_compose! {
    fn rank(
        )(device in 0..12_u8,
        p2p_disabled in prop::bool::weighted(0.1),
        host in 0..10_u8) -> (Facts,
        u8,
    ) {
        let facts = match device {
            10 => without(false),
            11 => without(true),
            device => on(device),
        };
        (Facts { p2p_disabled, ..facts }, host / 9)
    }
}

proptest! {
    #[test]
    fn the_order_of_the_ranks_decides_nothing(
        ranks in prop::collection::vec(rank(), 1..6),
        shared: bool,
        rotate: prop::sample::Index,
    ) {
        let mut rotated = ranks.clone();
        rotated.rotate_left(rotate.index(ranks.len()));
        let judged = |ranks: &[(Facts, u8)]| {
            let (facts, hosts): (Vec<Facts>, Vec<u8>) = ranks.iter().cloned().unzip();
            judged_in(None, &facts, &hosts, shared)
        };
        prop_assert_eq!(shape(&judged(&ranks)), shape(&judged(&rotated)));
        prop_assert_eq!(judged(&ranks), judged(&ranks), "all ranks judge the same facts alike");
    }

    #[test]
    fn what_one_rank_rules_out_no_other_brings_back(
        ranks in prop::collection::vec(rank(), 1..6),
        shared: bool,
        more in rank(),
    ) {
        let judged = |ranks: &[(Facts, u8)]| {
            let (facts, hosts): (Vec<Facts>, Vec<u8>) = ranks.iter().cloned().unzip();
            shape(&judged_in(None, &facts, &hosts, shared))
        };
        let (kind, before) = judged(&ranks);
        let (_, after) = judged(&[&ranks[..], &[more]].concat());
        if kind == 2 {
            for (before, after) in before.into_iter().zip(after) {
                prop_assert!(before || !after);
            }
        }
        // One veto is enough, wherever it is.
        if ranks.iter().any(|(facts, _)| facts.p2p_disabled) {
            prop_assert!(!after[0]);
        }
    }

    #[test]
    fn mixed_is_for_even_hosts_in_order_whose_ranks_have_a_device_each_and_may_reach_their_peers(
        mut hosts in prop_oneof![
            (1..4_u8, 1..4_usize).prop_map(|(hosts, each)| (0..hosts).flat_map(|host| vec![host; each]).collect()),
            prop::collection::vec(0..3_u8, 1..7),
        ],
        swap: Option<(prop::sample::Index, prop::sample::Index)>,
        doubled in prop::option::weighted(0.1, (any::<prop::sample::Index>(), any::<prop::sample::Index>())),
        forbids in prop::option::weighted(0.1, any::<prop::sample::Index>()),
        asked in prop::option::weighted(0.3, 1..7_u32),
    ) {
        let world = hosts.len();
        if let Some((a, b)) = swap {
            hosts.swap(a.index(world), b.index(world));
        }
        let mut facts = each(&hosts);
        let doubled = doubled.map(|(a, b)| (a.index(world), b.index(world))).filter(|(a, b)| a != b);
        if let Some((a, b)) = doubled {
            facts[a].gpu = facts[b].gpu.clone();
        }
        if let Some(rank) = forbids {
            facts[rank.index(world)].p2p_disabled = true;
        }
        let found = candidates_in(asked, &facts, &hosts, false);
        // Ranks of a node are neighbours on one host, and hosts are nodes unless something else is
        // asked for.
        let distinct = hosts.iter().collect::<std::collections::BTreeSet<_>>().len();
        let count = asked.map_or(distinct, |count| count as usize);
        let even = world.is_multiple_of(count) && count > 1 && count < world;
        let on_one_host = even && hosts.chunks(world / count).all(|node| node.iter().all(|host| *host == node[0]));
        prop_assert_eq!(found.mixed.is_ok(), on_one_host && doubled.is_none() && forbids.is_none(), "{:?}", found);
        prop_assert_eq!(found.nccl.is_ok(), doubled.is_none());
        if let Ok(nodes) = found.mixed {
            prop_assert_eq!(nodes.count() as usize, count);
            prop_assert!(found.nvlink.is_err() && found.pcie.is_err() && found.nccl.is_ok());
        }
    }
}
