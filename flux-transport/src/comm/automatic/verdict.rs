//! Which transports are worth trying.
//!
//! Invariant: a pure function of all ranks' facts and common options. What one rank rules out is
//! ruled out for all.

use super::facts::{Facts, RankGpu};
use crate::backends::grouped;
use crate::topology::hints;
use crate::{Hosts, Options};
use flux_core::{Nodes, Rank, WorldSize};

/// For each transport whether it may be tried, or why not; with peer memory, the nodes to prove. At
/// most one of those may be tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidates {
    pub(super) nvlink: Result<Nodes, String>,
    pub(super) mixed: Result<Nodes, String>,
    pub(super) pcie: Result<(), String>,
    pub(super) nccl: Result<(), String>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Evidence {
    /// No rank has a GPU, for this reason.
    Host(String),
    Gpus(Candidates),
    /// Some have none, or cannot use theirs; who and why.
    Uneven(String),
}

/// Judges all ranks' facts, by rank, under the options that all agreed on.
pub(super) fn judge(
    facts: &[Facts],
    world: WorldSize,
    hosts: &Hosts,
    options: &Options,
) -> Evidence {
    let lacking = |rank: usize, facts: &Facts| match &facts.gpu {
        RankGpu::Found(_) => None,
        RankGpu::Absent(why) => Some(format!("rank {rank} has no GPU: {why}")),
        RankGpu::Broken(why) => Some(format!("rank {rank} cannot use its GPU: {why}")),
    };
    let lacking: Vec<String> =
        facts.iter().enumerate().filter_map(|(rank, facts)| lacking(rank, facts)).collect();
    if let Some(first) = lacking.first() {
        if facts.iter().all(|facts| matches!(facts.gpu, RankGpu::Absent(_))) {
            return Evidence::Host(first.clone());
        }
        let others = if lacking.len() > 1 {
            format!("; and {} ranks more", lacking.len() - 1)
        } else {
            String::new()
        };
        return Evidence::Uneven(first.clone() + &others);
    }
    let one_node = match options.nodes {
        None | Some(1) => apart(facts, hosts).map_or(Ok(()), Err),
        Some(count) => Err(format!("{count} nodes are asked for (Options::nodes, FLUX_NODES)")),
    };
    let alone = double(facts).map_or(Ok(()), Err);
    let allowed = facts.iter().position(|facts| facts.p2p_disabled).map_or(Ok(()), |rank| {
        Err(format!("NCCL_P2P_DISABLE=1 on rank {rank} forbids peer access"))
    });
    let (may_share, alone) = match alone {
        Err(_) if options.shared_device => (Ok(()), Err(SHARED.to_owned())),
        alone => (alone.clone(), alone),
    };
    let nodes = mixed_nodes(world, hosts, options);
    Evidence::Gpus(Candidates {
        nvlink: one_node.clone().and(may_share).and(allowed.clone()).map(|()| Nodes::of_all(world)),
        mixed: nodes.and_then(|nodes| alone.clone().and(allowed).map(|()| nodes)),
        pcie: one_node.and(alone.clone()),
        nccl: alone,
    })
}

/// What is said of the transports that are not tried for ranks that agreed to share devices.
const SHARED: &str = "ranks share devices (Options::shared_device), for which auto takes nvlink \
                      alone: ask for another transport by name";

/// The nodes of ranks of which some share one and others do not.
fn mixed_nodes(world: WorldSize, hosts: &Hosts, options: &Options) -> Result<Nodes, String> {
    let nodes = grouped(world, options.nodes, hosts)?;
    match (nodes.count(), nodes.per_node()) {
        (1, _) => Err("all ranks are of one node".to_owned()),
        (_, 1) => Err("every node has one rank, so there is no peer memory to use".to_owned()),
        _ => Ok(nodes),
    }
}

/// Two ranks whose memory cannot be shared.
fn apart(facts: &[Facts], hosts: &Hosts) -> Option<String> {
    let ranks = || (0..).map(Rank::new).zip(facts);
    let (peer, other) = ranks().find(|&(peer, _)| !hosts.together(Rank::new(0), peer))?;
    let hint = hints::one_machine([&facts.first()?.boot, &other.boot]);
    Some(format!("ranks 0 and {peer} are on different hosts{hint}"))
}

fn double(facts: &[Facts]) -> Option<String> {
    for (rank, one) in facts.iter().enumerate() {
        let same = |other: &Facts| other.gpu == one.gpu;
        let (RankGpu::Found(uuid), Some(peer)) = (&one.gpu, facts[..rank].iter().position(same))
        else {
            continue;
        };
        let need = hints::own_device([&facts[peer].visible, &one.visible]);
        return Some(format!("ranks {peer} and {rank} are both on device {uuid}: {need}"));
    }
    None
}

#[cfg(test)]
mod tests;
