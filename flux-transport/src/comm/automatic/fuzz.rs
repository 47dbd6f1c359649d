//! What a rank reads of its peers when a transport is chosen, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::peers::{decode, encode};

/// What a node's first rank says of peer access there: there is one reading of it.
pub fn verdict(bytes: &[u8]) -> bool {
    let said = decode(bytes);
    if let Some((verdict, words)) = &said {
        assert_eq!(encode(*verdict, words), bytes);
    }
    said.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    use super::facts::{Facts, RankGpu};
    use crate::topology::probe::Verdict;
    use flux_cuda::DeviceUuid;

    let facts = |gpu, p2p_disabled, veto| Facts {
        gpu,
        p2p_disabled,
        veto,
        boot: String::new(),
        visible: String::new(),
    };
    let boot = "c08cae48-2a2e-4a78-b003-910f476ae94c".to_owned();
    let found = Facts {
        boot,
        visible: "0,1".to_owned(),
        ..facts(RankGpu::Found(DeviceUuid([1; 16])), true, false)
    };
    let absent =
        facts(RankGpu::Absent("the NVIDIA driver is not on this machine".to_owned()), false, false);
    let broken = facts(RankGpu::Broken("device 3 does not exist".to_owned()), false, true);
    vec![
        ("facts", "found", found.encode()),
        ("facts", "absent", absent.encode()),
        ("facts", "broken", broken.encode()),
        ("verdict", "works", encode(Verdict::Works, "peer access works in both directions")),
        ("verdict", "fails", encode(Verdict::Fails, "peer access does not work")),
        ("verdict", "unknown", encode(Verdict::Unknown, "not proven")),
    ]
}
