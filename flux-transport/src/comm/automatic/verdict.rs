//! Which transports are worth trying, from what all ranks know.
//!
//! Invariant: a pure function of all ranks' facts, so every rank comes to the same; the order of the ranks decides nothing but which of them are named. What one
//! rank rules out is ruled out for all.

use super::facts::{Facts, Gpu};
use crate::Hosts;
use flux_core::Rank;

/// For each transport whether it may be tried, or why not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidates {
    pub(super) nvlink: Result<(), String>,
    pub(super) pcie: Result<(), String>,
    pub(super) nccl: Result<(), String>,
}

/// What the ranks have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ground {
    /// No rank has a GPU, for this reason.
    Host(String),
    /// Every rank has one.
    Gpus(Candidates),
    /// Some have none, or cannot use theirs; who and why.
    Uneven(String),
}

/// Judges all ranks' facts, by rank. `shared` is whether the ranks agreed to share devices.
pub(super) fn judge(facts: &[Facts], hosts: &Hosts, shared: bool) -> Ground {
    let lacking = |rank: usize, facts: &Facts| match &facts.gpu {
        Gpu::Found(_) => None,
        Gpu::Absent(why) => Some(format!("rank {rank} has no GPU: {why}")),
        Gpu::Broken(why) => Some(format!("rank {rank} cannot use its GPU: {why}")),
    };
    let lacking: Vec<String> = facts.iter().enumerate().filter_map(|(rank, facts)| lacking(rank, facts)).collect();
    if let Some(first) = lacking.first() {
        if facts.iter().all(|facts| matches!(facts.gpu, Gpu::Absent(_))) {
            return Ground::Host(first.clone());
        }
        let others = if lacking.len() > 1 { format!("; and {} ranks more", lacking.len() - 1) } else { String::new() };
        return Ground::Uneven(first.clone() + &others);
    }
    let apart = apart(facts, hosts).map_or(Ok(()), Err);
    let double = double(facts);
    let alone = match &double {
        Some(why) => Err(why.clone()),
        None => Ok(()),
    };
    let forbidden = facts
        .iter()
        .position(|facts| facts.p2p_disabled)
        .map_or(Ok(()), |rank| Err(format!("NCCL_P2P_DISABLE=1 on rank {rank} forbids peer access")));
    let may_share = if shared { Ok(()) } else { alone.clone() };
    Ground::Gpus(Candidates { nvlink: apart.clone().and(may_share).and(forbidden), pcie: apart.and(alone.clone()), nccl: alone })
}

/// Two ranks whose memory cannot be shared.
fn apart(facts: &[Facts], hosts: &Hosts) -> Option<String> {
    let ranks = || (0..).map(Rank::new).zip(facts);
    let (peer, other) = ranks().find(|&(peer, _)| !hosts.together(Rank::new(0), peer))?;
    let one_machine = !other.boot.is_empty() && other.boot == facts.first()?.boot;
    let hint = if one_machine {
        ": they are containers or users of one machine; to count as one host they need the same user and run-time directory (XDG_RUNTIME_DIR, or /tmp) and FLUX_HOST_ID"
    } else {
        ""
    };
    Some(format!("ranks 0 and {peer} are on different hosts{hint}"))
}

/// Two ranks on one device.
fn double(facts: &[Facts]) -> Option<String> {
    for (rank, one) in facts.iter().enumerate() {
        let same = |other: &Facts| other.gpu == one.gpu;
        let (Gpu::Found(uuid), Some(peer)) = (&one.gpu, facts[..rank].iter().position(same)) else { continue };
        let visible = |facts: &Facts| if facts.visible.is_empty() { "not set".to_owned() } else { format!("`{}`", facts.visible) };
        return Some(format!(
            "ranks {peer} and {rank} are both on device {uuid}: give each a device of its own (CUDA_VISIBLE_DEVICES is {} and {})",
            visible(&facts[peer]),
            visible(one)
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::DeviceUuid;
    use proptest::prelude::*;

    fn on(device: u8) -> Facts {
        let gpu = Gpu::Found(DeviceUuid([device; 16]));
        Facts { gpu, p2p_disabled: false, veto: false, boot: "boot".into(), visible: String::new() }
    }

    fn without(broken: bool) -> Facts {
        let why = "no driver".to_owned();
        Facts { gpu: if broken { Gpu::Broken(why) } else { Gpu::Absent(why) }, ..on(0) }
    }

    fn candidates(facts: &[Facts], hosts: &[u8], shared: bool) -> Candidates {
        match judge(facts, &Hosts::group(hosts), shared) {
            Ground::Gpus(candidates) => candidates,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn ranks_of_one_host_with_a_device_each_may_try_all() {
        assert_eq!(candidates(&[on(0), on(1)], &[0, 0], false), Candidates { nvlink: Ok(()), pcie: Ok(()), nccl: Ok(()) });
    }

    #[test]
    fn peer_access_that_one_rank_forbids_is_forbidden() {
        let found = candidates(&[on(0), on(1), Facts { p2p_disabled: true, ..on(2) }], &[0; 3], false);
        assert!(found.nvlink.unwrap_err().contains("NCCL_P2P_DISABLE=1 on rank 2"));
        assert_eq!((found.pcie, found.nccl), (Ok(()), Ok(())));
    }

    #[test]
    fn several_hosts_leave_nccl_and_containers_are_told_what_keeps_them_apart() {
        let far = Facts { boot: "other".into(), ..on(1) };
        let found = candidates(&[on(0), far], &[0, 1], false);
        assert_eq!((found.nvlink.clone(), found.nccl), (found.pcie, Ok(())));
        let why = found.nvlink.unwrap_err();
        assert!(why.contains("different hosts") && !why.contains("containers"), "{why}");
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
        assert!(found.nvlink.is_ok() && found.pcie.is_err() && found.nccl.is_err(), "ranks that agreed to share a device do so on nvlink");
    }

    #[test]
    fn only_where_nobody_has_a_gpu_is_there_the_host() {
        let hosts = Hosts::group(&[0; 2]);
        assert!(matches!(judge(&[without(false), without(false)], &hosts, false), Ground::Host(why) if why.contains("no driver")));
        for facts in [[on(0), without(false)], [without(true), without(false)], [without(true), on(1)]] {
            let Ground::Uneven(why) = judge(&facts, &hosts, false) else { panic!("{facts:?}") };
            assert!(why.contains("no driver"), "{why}");
        }
    }

    /// What does not depend on which rank is which.
    fn shape(ground: &Ground) -> (u8, [bool; 3]) {
        match ground {
            Ground::Host(_) => (0, [false; 3]),
            Ground::Uneven(_) => (1, [false; 3]),
            Ground::Gpus(Candidates { nvlink, pcie, nccl }) => (2, [nvlink.is_ok(), pcie.is_ok(), nccl.is_ok()]),
        }
    }

    prop_compose! {
        fn rank()(device in 0..12_u8, p2p_disabled in prop::bool::weighted(0.1), host in 0..10_u8) -> (Facts, u8) {
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
        fn the_order_of_the_ranks_decides_nothing(ranks in prop::collection::vec(rank(), 1..6), shared: bool, rotate: prop::sample::Index) {
            let mut turned = ranks.clone();
            turned.rotate_left(rotate.index(ranks.len()));
            let judged = |ranks: &[(Facts, u8)]| {
                let (facts, hosts): (Vec<Facts>, Vec<u8>) = ranks.iter().cloned().unzip();
                judge(&facts, &Hosts::group(&hosts), shared)
            };
            prop_assert_eq!(shape(&judged(&ranks)), shape(&judged(&turned)));
            prop_assert_eq!(judged(&ranks), judged(&ranks), "all ranks judge the same facts alike");
        }

        #[test]
        fn what_one_rank_rules_out_no_other_brings_back(ranks in prop::collection::vec(rank(), 1..6), shared: bool, more in rank()) {
            let judged = |ranks: &[(Facts, u8)]| {
                let (facts, hosts): (Vec<Facts>, Vec<u8>) = ranks.iter().cloned().unzip();
                shape(&judge(&facts, &Hosts::group(&hosts), shared))
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
    }
}
