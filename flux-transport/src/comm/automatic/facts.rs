//! What each rank tells for the choice of a transport.
//!
//! Invariant: decoding accepts exactly what [`Facts::encode`] of this version gives.

use crate::backends::Options;
use crate::backends::device::peer_memory::own_device;
use crate::bootstrap::world::World;
use crate::topology;
use crate::topology::probe::line;
use crate::topology::{hints, probe};
use flux_cuda::{CudaError, DeviceUuid, Unavailable};
use std::fmt::Display;
use std::path::Path;

const HEADER: &str = concat!("flux-facts ", env!("CARGO_PKG_VERSION"));

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RankGpu {
    Found(DeviceUuid),
    /// There is none, and this rank would not have expected one.
    Absent(String),
    /// There should be one, and it cannot be used.
    Broken(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub(super) gpu: RankGpu,
    /// Whether its environment forbids peer access.
    pub(super) p2p_disabled: bool,
    /// Whether it is to find that peer access does not work.
    pub(super) veto: bool,
    /// Which boot of which kernel it runs on; empty where that is not known.
    pub(super) boot: String,
    pub(super) visible: String,
}

impl Facts {
    pub(super) fn here(world: &World, options: &Options) -> Self {
        Self {
            gpu: gpu(world, options),
            p2p_disabled: probe::forbidden(),
            veto: probe::vetoed(),
            boot: hints::boot(),
            visible: hints::visible(),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let Self { gpu, p2p_disabled, veto, boot, visible } = self;
        let gpu = match gpu {
            RankGpu::Found(uuid) => format!("found {uuid}"),
            RankGpu::Absent(why) => format!("absent {}", line(why)),
            RankGpu::Broken(why) => format!("broken {}", line(why)),
        };
        format!("{HEADER}\n{gpu}\n{p2p_disabled} {veto}\n{}\n{}", line(boot), line(visible))
            .into_bytes()
    }

    pub(crate) fn decode(message: &[u8]) -> Option<Self> {
        let mut lines = std::str::from_utf8(message).ok()?.split('\n');
        let (header, gpu, flags, boot, visible) =
            (lines.next()?, lines.next()?, lines.next()?, lines.next()?, lines.next()?);
        let gpu = match gpu.split_once(' ')? {
            ("found", uuid) => RankGpu::Found(uuid.parse().ok()?),
            ("absent", why) => RankGpu::Absent(why.to_owned()),
            ("broken", why) => RankGpu::Broken(why.to_owned()),
            _ => return None,
        };
        let (p2p_disabled, veto) = flags.split_once(' ')?;
        let (p2p_disabled, veto) = (p2p_disabled.parse().ok()?, veto.parse().ok()?);
        let facts =
            Self { gpu, p2p_disabled, veto, boot: boot.to_owned(), visible: visible.to_owned() };
        (header == HEADER && lines.next().is_none() && facts.encode() == message).then_some(facts)
    }
}

fn gpu(world: &World, options: &Options) -> RankGpu {
    match own_device(world, options) {
        Ok(info) => RankGpu::Found(info.uuid),
        Err(CudaError::Unavailable(why)) => {
            without(&why, &topology::nvidia_gpus(Path::new("/")), topology::unseen)
        }
        Err(error) => RankGpu::Broken(format!(
            "{error}{}",
            clause(error.is_too_few().then(topology::unseen).flatten())
        )),
    }
}

/// What a person can do, after what is wrong.
fn clause(advice: Option<impl Display>) -> String {
    advice.map_or_else(String::new, |advice| format!(": {advice}"))
}

/// Judges an unusable driver. Without GPUs on the bus, or none shown, the rank computes on the
/// host; a driver that does not start beside GPUs is broken.
fn without(why: &Unavailable, on_bus: &[String], unseen: fn() -> Option<String>) -> RankGpu {
    let bus = if on_bus.is_empty() {
        String::new()
    } else {
        format!("; the PCI bus has {}", on_bus.join(", "))
    };
    if why.is_fault() && !on_bus.is_empty() {
        return RankGpu::Broken(format!("{why}{}", clause(why.advice())));
    }
    let hidden = *why == Unavailable::NoDevice && !on_bus.is_empty();
    RankGpu::Absent(format!("{why}{bus}{}", clause(hidden.then(unseen).flatten())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_driver_that_does_not_start_is_broken_only_where_there_are_gpus() {
        let bus = ["0000:17:00.0".to_owned()];
        let init = Unavailable::Init {
            call: "cuInit",
            code: 802,
            name: "CUDA_ERROR_SYSTEM_NOT_READY".into(),
        };
        let library =
            Unavailable::Library { tried: "libcuda.so.1".into(), reason: "not found".into() };
        let without = |why: &Unavailable, on_bus: &[String]| {
            without(why, on_bus, || Some("advice".to_owned()))
        };
        assert!(matches!(without(&init, &bus), RankGpu::Broken(why)
                if why.contains("802") && why.contains("nvidia-fabricmanager")));
        assert!(
            matches!(without(&Unavailable::Symbol { symbol: "cu_new" }, &bus), RankGpu::Broken(why)
                if why.contains("update the driver"))
        );
        assert!(matches!(without(&init, &[]), RankGpu::Absent(_)));
        for (why, hidden) in [(library, false), (Unavailable::NoDevice, true)] {
            assert!(
                matches!(without(&why, &[]), RankGpu::Absent(words) if !words.contains("advice"))
            );
            // Only a driver that is there may hide GPUs.
            assert!(matches!(without(&why, &bus), RankGpu::Absent(words)
                    if words.contains("advice") == hidden));
            assert!(
                matches!(without(&why, &bus), RankGpu::Absent(words) if words.contains(&bus[0]))
            );
        }
    }

    proptest! {
        #[test]
        fn facts_come_back_and_no_part_of_them_does(
            kind in 0..3_u8,
            uuid: [u8; 16],
            why in "[a-z\n ]{0,20}",
            p2p_disabled: bool,
            veto: bool,
            boot in "[0-9a-f-]{0,36}",
            cut: prop::sample::Index,
        ) {
            let why = line(&why);
            let gpu = match kind {
                0 => RankGpu::Found(DeviceUuid(uuid)),
                1 => RankGpu::Absent(why),
                _ => RankGpu::Broken(why),
            };
            // The last field ends with the message.
            let facts = Facts { gpu, p2p_disabled, veto, boot, visible: String::new() };
            let message = facts.encode();
            prop_assert_eq!(Facts::decode(&message), Some(facts));
            prop_assert_eq!(Facts::decode(&message[..cut.index(message.len())]), None);
            prop_assert_eq!(Facts::decode(&[&message[..], b"\nmore"].concat()), None);
        }
    }
}
