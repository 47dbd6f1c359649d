//! The transport that `auto` takes: the first of nvlink, mixed, pcie, nccl that all ranks can use;
//! host where no rank has a GPU.
//!
//! Invariant: each decision is a pure function of what all ranks were told. GPUs are never left
//! idle in silence: if none of their transports works, connecting fails. Once peer access is
//! proven, nvlink or mixed is chosen, and a later failure is an error.
//!
//! The facts of all ranks give the candidates (`verdict.rs`). Then the first rank of each node has
//! peer access proven there and tells its verdict (`peers.rs`).

mod facts;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzz;
mod peers;
mod verdict;

pub(super) use facts::Facts;

use super::open::{host, mixed, nccl, nvlink, pcie};
use crate::ConnectError;
use crate::backends::Transport;
use crate::bootstrap::control::agree;
use crate::topology::probe::Verdict;
use crate::{ControlError, Options, Select, World};
use flux_core::{Nodes, Rank};
use peers::proven;
use std::fmt::Display;
use std::sync::Once;
use std::time::Instant;
use verdict::{Candidates, Evidence, judge};

/// What was passed over, and why.
#[derive(Debug, Default)]
struct Rejected(Vec<String>);

impl Rejected {
    fn add(&mut self, select: Select, why: impl Display) {
        self.0.push(format!("{select}: {why}"));
    }

    /// Passes over a transport that did not connect. Ranks that cannot talk try nothing more.
    fn failed(&mut self, select: Select, error: ConnectError) -> Result<(), ConnectError> {
        match error {
            ConnectError::Control(error) => Err(error.into()),
            ConnectError::Unusable { why, .. } => {
                self.add(select, why);
                Ok(())
            }
            other => {
                self.add(select, other);
                Ok(())
            }
        }
    }

    fn chosen(&self, why: &str) -> String {
        let chosen = format!("chosen by auto: {why}");
        [chosen]
            .into_iter()
            .chain(self.0.iter().map(|why| format!("not {why}")))
            .collect::<Vec<_>>()
            .join("; ")
    }
}

/// The first transport that all ranks can use, and why.
pub(super) fn automatic(
    world: &World,
    options: &Options,
) -> Result<(Box<dyn Transport>, String), ConnectError> {
    let facts = exchange(world, options)?;
    let candidates = match judge(&facts, world.size(), world.hosts(), options) {
        Evidence::Gpus(candidates) => candidates,
        Evidence::Host(why) => {
            static SAID: Once = Once::new();
            // The ranks know the same: one of them says it.
            if world.rank() == Rank::new(0) {
                SAID.call_once(|| {
                    tracing::warn!(
                        "no rank has a GPU, so all compute on the host's processors: {why}"
                    );
                });
            }
            return Ok((
                host(world, options)?,
                format!("chosen by auto, as no rank has a GPU: {why}"),
            ));
        }
        Evidence::Uneven(why) => return Err(none(&why)),
    };
    let connect = |select| match select {
        Select::NvLink => nvlink(world, options),
        Select::Mixed => mixed(world, options),
        Select::Pcie => pcie(world, options),
        _ => nccl(world, options),
    };
    take(candidates, |nodes| proven(world, options, &facts, nodes), connect)
}

/// The first of the candidates that `proven` and `connect` leave, and why.
fn take<T>(
    candidates: Candidates,
    proven: impl Fn(Nodes) -> Result<(Verdict, String), ConnectError>,
    connect: impl Fn(Select) -> Result<T, ConnectError>,
) -> Result<(T, String), ConnectError> {
    let Candidates { nvlink, mixed, pcie, nccl } = candidates;
    let mut rejected = Rejected::default();
    for (select, candidate) in [(Select::NvLink, nvlink), (Select::Mixed, mixed)] {
        let nodes = match candidate {
            Ok(nodes) => nodes,
            Err(why) => {
                rejected.add(select, why);
                continue;
            }
        };
        match proven(nodes)? {
            (Verdict::Works, words) => return Ok((connect(select)?, rejected.chosen(&words))),
            (Verdict::Fails, words) => rejected.add(select, words),
            // Connecting shows it: each rank reads what every other of its node wrote.
            (Verdict::Unknown, words) => match connect(select) {
                Ok(transport) => return Ok((transport, rejected.chosen(&words))),
                Err(error) => rejected.failed(select, error)?,
            },
        }
    }
    let others = [
        (Select::Pcie, pcie, "all ranks are on one host, with a GPU each"),
        (Select::Nccl, nccl, "every rank has a GPU of its own"),
    ];
    for (select, candidate, why) in others {
        match candidate.map(|()| connect(select)) {
            Ok(Ok(transport)) => return Ok((transport, rejected.chosen(why))),
            Ok(Err(error)) => rejected.failed(select, error)?,
            Err(why) => rejected.add(select, why),
        }
    }
    Err(none(&rejected.0.join("; ")))
}

fn none(why: &str) -> ConnectError {
    let why = format!(
        "there are GPUs, and no transport works on all ranks: {why}; the host transport, which \
         computes on processors, has to be asked for by name (FLUX_TRANSPORT=host)"
    );
    ConnectError::Unusable { select: Select::Auto, why }
}

/// All ranks' facts, by rank. Collective.
fn exchange(world: &World, options: &Options) -> Result<Vec<Facts>, ConnectError> {
    let mine = Ok::<_, &str>(Facts::here(world, options).encode());
    let answers = agree(world.steps(), &mine, Instant::now() + options.deadline)?;
    let decode = |(rank, answer): (u32, &Vec<u8>)| {
        let unknown = || ControlError::Protocol {
            rank: Rank::new(rank),
            detail: "its facts are not of this version".to_owned(),
        };
        Facts::decode(answer).ok_or_else(unknown)
    };
    Ok((0..).zip(&answers).map(decode).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::WorldSize;

    /// What ranks of two nodes take: peer access is found to be so, and what is among `broken` does
    /// not connect.
    fn taken(verdict: Verdict, broken: &[Select]) -> Result<(Select, String), ConnectError> {
        let no = || Err("no".to_owned());
        let nodes = Nodes::new(WorldSize::new(4).unwrap(), 2).unwrap();
        let candidates = Candidates {
            nvlink: Err("two hosts".to_owned()),
            mixed: Ok(nodes),
            pcie: no(),
            nccl: Ok(()),
        };
        let proven = |asked| {
            assert_eq!(asked, nodes);
            Ok((verdict, "the proof".to_owned()))
        };
        let connect = |select| match select {
            select if broken.contains(&select) => {
                Err(ConnectError::Unusable { select, why: "it breaks".to_owned() })
            }
            select => Ok(select),
        };
        take(candidates, proven, connect)
    }

    #[test]
    fn several_nodes_take_mixed_unless_peer_access_is_refuted() {
        for verdict in [Verdict::Works, Verdict::Unknown] {
            let words = "chosen by auto: the proof; not nvlink: two hosts".to_owned();
            assert_eq!(taken(verdict, &[]).unwrap(), (Select::Mixed, words));
        }
        let (select, words) = taken(Verdict::Fails, &[]).unwrap();
        assert!(
            select == Select::Nccl && words.contains("; not mixed: the proof; not pcie: no"),
            "{words}"
        );
    }

    #[test]
    fn what_fails_after_the_proof_is_an_error_and_without_one_the_next_is_tried() {
        let error = taken(Verdict::Works, &[Select::Mixed]).unwrap_err();
        assert!(matches!(error, ConnectError::Unusable { select: Select::Mixed, .. }), "{error}");
        let (select, words) = taken(Verdict::Unknown, &[Select::Mixed]).unwrap();
        assert!(select == Select::Nccl && words.contains("; not mixed: it breaks"), "{words}");
        let error = taken(Verdict::Fails, &[Select::Nccl]).unwrap_err().to_string();
        assert!(
            error.contains(
                "no transport works on all ranks: nvlink: two hosts; mixed: the proof; pcie: no; \
                 nccl: it breaks"
            ),
            "{error}"
        );
    }

    #[test]
    fn every_rejection_is_told_and_ranks_that_cannot_talk_go_no_further() {
        let mut rejected = Rejected::default();
        rejected.add(Select::NvLink, "no links");
        rejected
            .failed(
                Select::Pcie,
                ConnectError::Unusable { select: Select::Pcie, why: "no memory".to_owned() },
            )
            .unwrap();
        rejected
            .failed(
                Select::Nccl,
                ConnectError::PeerFailed { rank: Rank::new(1), reason: "no library".to_owned() },
            )
            .unwrap();
        let told = rejected.chosen("why");
        assert_eq!(
            told,
            "chosen by auto: why; not nvlink: no links; not pcie: no memory; not nccl: rank 1 \
             cannot connect: no library"
        );
        let lost = ConnectError::Control(ControlError::PeerLost { rank: Rank::new(1) });
        assert!(matches!(rejected.failed(Select::Nccl, lost), Err(ConnectError::Control(_))));
        let error = none("nvlink: no links").to_string();
        assert!(
            error.contains("nvlink: no links") && error.contains("FLUX_TRANSPORT=host"),
            "{error}"
        );
    }
}
