//! What a probe is asked, as a variable of its process.
//!
//! Invariant: decoding accepts exactly what [`Request::encode`] of this version gives.

use flux_cuda::DeviceUuid;

/// Makes a process that calls [`serve`](super::serve) a probe, which answers on stdout and ends.
pub(super) const REQUEST: &str = "FLUX_PROBE_REQUEST";
/// Which devices are to reach each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// The devices, at least two, each once.
    pub(super) devices: Vec<DeviceUuid>,
    /// Whether the probe is to find that nothing arrives.
    pub(super) veto: bool,
}

impl Request {
    pub(super) fn encode(&self) -> String {
        let Self { veto, .. } = self;
        format!(
            "{} {} {}",
            env!("CARGO_PKG_VERSION"),
            if *veto { "veto" } else { "prove" },
            self.visible()
        )
    }

    pub(super) fn decode(text: &str) -> Option<Self> {
        let rest = text.strip_prefix(env!("CARGO_PKG_VERSION"))?.strip_prefix(' ')?;
        let (word, list) = rest.split_once(' ')?;
        let veto = match word {
            "veto" => true,
            "prove" => false,
            _ => return None,
        };
        let devices = list.split(',').map(|uuid| uuid.parse().ok()).collect::<Option<_>>()?;
        Some(Self { devices, veto })
    }

    /// The devices as `CUDA_VISIBLE_DEVICES` takes them.
    pub(super) fn visible(&self) -> String {
        self.devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::probe::report::tests::uuid;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_request_comes_back_and_no_part_of_it_does(
            count in 1..6_u8,
            veto: bool,
            cut: prop::sample::Index,
        ) {
            let request = Request { devices: (0..count).map(uuid).collect(), veto };
            let text = request.encode();
            prop_assert_eq!(Request::decode(&text), Some(request.clone()));
            // Cut at a comma it is another request; the variable comes whole or not at all.
            let cut = cut.index(text.len());
            prop_assert!(text[cut..].starts_with(',') || Request::decode(&text[..cut]).is_none());
        }
    }
}
