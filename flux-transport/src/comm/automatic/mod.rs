//! The transport that `auto` takes: nvlink, pcie, nccl, in this order, the first that all ranks can use; host where no rank has a GPU.
//!
//! Invariant: every rank takes the same steps, for each decision is a pure function of what all ranks were told, or one rank's word that all take. GPUs are never
//! left idle in silence: ranks that have some and can use none of the transports get an error. Once peer access is proven, nvlink is chosen, and what
//! fails then is an error too.
//!
//! ```text
//! facts of all ranks -> candidates (verdict.rs) -> rank 0 has peer access proven (probe), tells the verdict -> nvlink | pcie | nccl | why none
//! ```

mod facts;
mod verdict;

pub(super) use facts::Facts;

use super::ConnectError;
use super::connect::{host, nccl, nvlink, pcie};
use crate::control::agree;
use crate::cuda::DeviceUuid;
use crate::probe::{self, Verdict};
use crate::{ControlError, Options, Select, Transport, World};
use facts::Gpu;
use flux_core::Rank;
use std::fmt::Display;
use std::sync::Once;
use std::time::{Duration, Instant};
use verdict::{Candidates, Ground, judge};

/// How long a probe's end may take beyond its limit.
const SLACK: Duration = Duration::from_secs(5);

type Connect = fn(&World, &Options) -> Result<Box<dyn Transport>, ConnectError>;

/// What was passed over, and why.
#[derive(Debug, Default)]
struct Rejected(Vec<String>);

impl Rejected {
    fn add(&mut self, select: Select, why: impl Display) {
        self.0.push(format!("{select}: {why}"));
    }

    /// Passes over a transport that did not connect. Ranks that cannot talk are out of step, and try nothing more.
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
        [chosen].into_iter().chain(self.0.iter().map(|why| format!("not {why}"))).collect::<Vec<_>>().join("; ")
    }
}

/// The first transport that all ranks can use, and why.
pub(super) fn automatic(world: &World, options: &Options) -> Result<(Box<dyn Transport>, String), ConnectError> {
    let facts = exchange(world, options)?;
    let Candidates { nvlink: peers, pcie: staged, nccl: messages } = match judge(&facts, world.hosts(), options.shared_device) {
        Ground::Gpus(candidates) => candidates,
        Ground::Host(why) => {
            static SAID: Once = Once::new();
            SAID.call_once(|| tracing::warn!("no rank has a GPU, so all compute on the host's processors: {why}"));
            return Ok((host(world, options)?, format!("chosen by auto, as no rank has a GPU: {why}")));
        }
        Ground::Uneven(why) => return Err(none(&why)),
    };
    let mut rejected = Rejected::default();
    match peers {
        Err(why) => rejected.add(Select::NvLink, why),
        Ok(()) => match proven(world, options, &facts)? {
            (Verdict::Works, words) => return Ok((nvlink(world, options)?, rejected.chosen(&words))),
            (Verdict::Fails, words) => rejected.add(Select::NvLink, words),
            // What was not asked beforehand is shown when ranks connect: each reads what every other wrote.
            (Verdict::Unknown, words) => match nvlink(world, options) {
                Ok(transport) => return Ok((transport, rejected.chosen(&words))),
                Err(error) => rejected.failed(Select::NvLink, error)?,
            },
        },
    }
    let others: [(Select, Result<(), String>, Connect, &str); 2] = [
        (Select::Pcie, staged, pcie, "all ranks are on one host, with a GPU each"),
        (Select::Nccl, messages, nccl, "every rank has a GPU of its own"),
    ];
    for (select, candidate, connect, why) in others {
        match candidate.map(|()| connect(world, options)) {
            Ok(Ok(transport)) => return Ok((transport, rejected.chosen(why))),
            Ok(Err(error)) => rejected.failed(select, error)?,
            Err(why) => rejected.add(select, why),
        }
    }
    Err(none(&rejected.0.join("; ")))
}

fn none(why: &str) -> ConnectError {
    let why = format!(
        "there are GPUs, and no transport works on all ranks: {why}; the host transport, which computes on processors, has to be asked for by name (FLUX_TRANSPORT=host)"
    );
    ConnectError::Unusable { select: Select::Auto, why }
}

/// All ranks' facts, by rank. Collective.
fn exchange(world: &World, options: &Options) -> Result<Vec<Facts>, ConnectError> {
    let mine = Ok::<_, &str>(Facts::here(world, options).encode());
    let answers = agree(world.control(), &mine, Instant::now() + options.deadline)?;
    let decode = |(rank, answer): (u32, &Vec<u8>)| {
        let unknown = || ControlError::Protocol { rank: Rank::new(rank), detail: "its facts are not of this version".to_owned() };
        Facts::decode(answer).ok_or_else(unknown)
    };
    Ok((0..).zip(&answers).map(decode).collect::<Result<_, _>>()?)
}

/// Whether the ranks' devices reach each other: rank 0 asks, for all. Collective.
fn proven(world: &World, options: &Options, facts: &[Facts]) -> Result<(Verdict, String), ConnectError> {
    let until = Instant::now() + options.deadline + probe::LIMIT + SLACK;
    let own = if world.rank().get() == 0 {
        let devices: Vec<DeviceUuid> =
            facts.iter().filter_map(|facts| if let Gpu::Found(uuid) = facts.gpu { Some(uuid) } else { None }).collect();
        let proof = probe::prove(&devices, facts.iter().any(|facts| facts.veto), probe::LIMIT);
        encode(proof.verdict, &proof.words())
    } else {
        Vec::new()
    };
    let answers = agree(world.control(), &Ok::<_, &str>(own), until)?;
    let unknown = || ControlError::Protocol { rank: Rank::new(0), detail: "its verdict is not of this version".to_owned() };
    Ok(answers.first().and_then(|answer| decode(answer)).ok_or_else(unknown)?)
}

const VERDICTS: [(u8, Verdict); 3] = [(b'w', Verdict::Works), (b'f', Verdict::Fails), (b'u', Verdict::Unknown)];

fn encode(verdict: Verdict, words: &str) -> Vec<u8> {
    let tag = VERDICTS.iter().find(|(_, known)| *known == verdict).map_or(b'f', |(tag, _)| *tag);
    [&[tag], words.as_bytes()].concat()
}

fn decode(message: &[u8]) -> Option<(Verdict, String)> {
    let (tag, words) = message.split_first()?;
    let (_, verdict) = VERDICTS.iter().find(|(known, _)| known == tag)?;
    Some((*verdict, std::str::from_utf8(words).ok()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_comes_back() {
        for (_, verdict) in VERDICTS {
            assert_eq!(decode(&encode(verdict, "words")), Some((verdict, "words".to_owned())));
        }
        assert_eq!((decode(b""), decode(b"x")), (None, None));
    }

    #[test]
    fn rank_0_asks_and_every_rank_takes_its_word() {
        // No machine has these devices, so nobody can say anything about them.
        let on = |device| Facts {
            gpu: Gpu::Found(DeviceUuid([device; 16])),
            p2p_disabled: false,
            veto: false,
            boot: String::new(),
            visible: String::new(),
        };
        let facts = [on(0), on(1), on(2)];
        let worlds = World::local(3).unwrap();
        let options = Options { deadline: Duration::from_secs(20), ..Options::default() };
        let told: Vec<(Verdict, String)> = std::thread::scope(|scope| {
            let ranks: Vec<_> = worlds.iter().map(|world| scope.spawn(|| proven(world, &options, &facts).unwrap())).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(told[0].0 == Verdict::Unknown && told[0].1.contains("not proven"), "{told:?}");
        assert!(told.iter().all(|verdict| *verdict == told[0]), "{told:?}");
    }

    #[test]
    fn every_rejection_is_told_and_ranks_that_cannot_talk_go_no_further() {
        let mut rejected = Rejected::default();
        rejected.add(Select::NvLink, "no links");
        rejected.failed(Select::Pcie, ConnectError::Unusable { select: Select::Pcie, why: "no memory".to_owned() }).unwrap();
        rejected.failed(Select::Nccl, ConnectError::PeerFailed { rank: Rank::new(1), reason: "no library".to_owned() }).unwrap();
        let told = rejected.chosen("why");
        assert_eq!(told, "chosen by auto: why; not nvlink: no links; not pcie: no memory; not nccl: rank 1 cannot connect: no library");
        let lost = ConnectError::Control(ControlError::PeerLost { rank: Rank::new(1) });
        assert!(matches!(rejected.failed(Select::Nccl, lost), Err(ConnectError::Control(_))));
        let error = none("nvlink: no links").to_string();
        assert!(error.contains("nvlink: no links") && error.contains("FLUX_TRANSPORT=host"), "{error}");
    }
}
