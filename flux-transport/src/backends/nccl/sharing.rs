//! How NCCL's multiprocessors are shared among messages that go at once.
//!
//! Invariant: a group of messages never takes more multiprocessors than [`Sharing::channels`] say,
//! of NCCL 2.18 to 2.30, whatever its variables are. NCCL launches a CTA for each channel that a
//! message of the group uses (`scheduleP2pTasksToPlan`, `addP2pToPlan`,
//! `ncclTopoComputeP2pChannels`):
//!
//! - a message has as many of `all` channels as leave each rank as many, a power of two;
//! - twice as many, again and again, while its parts are larger than 32 chunks;
//! - over a network, as many as it has for a peer.

use flux_core::program::Channels;
use std::fmt;

/// Multiprocessors of a message, unless `FLUX_NCCL_CTAS` says otherwise: with 4 an H200 keeps 128.
pub(super) const LANES: u32 = 4;
/// Most of them.
pub(super) const MOST_LANES: u32 = 32;
/// Least bytes of a message: some 40 us of an NVLink, as long as it takes NCCL to begin one.
const MESSAGE_BYTES: u64 = 4 << 20;
/// Chunks that one channel carries of a message, and the smallest that NCCL's own are.
const PART_CHUNKS: u64 = 32;
const CHUNK_BYTES: u64 = 128 << 10;
/// From this version on a communicator says how many channels a message has over a network, and
/// later ones.
pub(super) const SAYS_NET_CHANNELS: u32 = 22_800;
/// From this version on there are 64 channels.
const MORE_CHANNELS: u32 = 22_600;

/// What would have NCCL make more channels.
const MORE: [&str; 5] = [
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MIN_NRINGS",
    "NCCL_MIN_P2P_NCHANNELS",
];
/// What would have it send smaller chunks, and of how many of them the bytes are.
const SMALLER: [(&str, u64); 3] =
    [("NCCL_P2P_NVL_CHUNKSIZE", 1), ("NCCL_P2P_PCI_CHUNKSIZE", 1), ("NCCL_BUFFSIZE", 8)];
/// What has it use more channels for a message over a network.
const NET: &str = "NCCL_NCHANNELS_PER_NET_PEER";

/// Channels that a communicator has at most.
const MOST: u32 = 64;

/// The same of NCCL's `version`.
pub(super) const fn most(version: u32) -> u32 {
    if version < MORE_CHANNELS { MOST / 2 } else { MOST }
}

/// Those of messages beside a kernel. The same on all ranks of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    /// Channels that a message is to have.
    pub(super) lanes: u32,
    /// Channels that the communicator is asked for.
    pub(super) asked: u32,
    /// Channels that it has, at most.
    pub(super) all: u32,
    /// Those of a message that is not too large.
    pub(super) each: u32,
    pub(super) part_bytes: u64,
}

impl Sharing {
    /// Of `ranks` ranks of a communicator that want `lanes` for a message, with NCCL's `version`
    /// and what its variables are.
    pub(super) fn new(
        lanes: u32,
        ranks: u32,
        hosts: u32,
        version: u32,
        variable: impl Fn(&str) -> Option<u64>,
    ) -> Self {
        let most = most(version);
        let set =
            |name: &str| variable(name).and_then(|value| u32::try_from(value).ok()).unwrap_or(0);
        let shares = ranks.max(1).next_power_of_two();
        let asked = lanes.saturating_mul(shares).min(most);
        let all =
            MORE.iter().map(|name| set(name)).fold(asked, u32::max).min(most).next_power_of_two();
        let each = (all / shares).max(1);
        let each = match hosts {
            0 | 1 => each,
            _ if version < SAYS_NET_CHANNELS => all,
            _ => each.max(lanes).max(set(NET).min(most)).next_power_of_two().min(all),
        };
        let chunk = SMALLER
            .iter()
            .filter_map(|&(name, of)| variable(name).map(|bytes| bytes / of))
            .fold(CHUNK_BYTES, u64::min);
        Self { lanes, asked, all, each, part_bytes: (PART_CHUNKS * chunk).max(1) }
    }

    /// As the ops see it, of so many hosts.
    pub(super) const fn channels(&self, hosts: u32) -> Channels {
        Channels {
            all: self.all,
            each: self.each,
            part_bytes: self.part_bytes,
            least_bytes: MESSAGE_BYTES,
            network: hosts > 1,
        }
    }
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { all, each, .. } = self;
        write!(
            f,
            "NCCL takes {each} multiprocessors for a message beside the kernel, {all} at most for \
             all that go at once"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As NCCL counts, from the channels that it has for a peer at most.
    fn taken(all: u32, of_a_peer: u32, ranks: u32, bytes: u64, part_bytes: u64) -> u32 {
        let mut least = of_a_peer.min(all);
        while least * ranks > all && least > 1 {
            least /= 2;
        }
        let mut taken = least;
        while bytes.div_ceil(taken.into()) > part_bytes && taken <= of_a_peer.min(all) / 2 {
            taken *= 2;
        }
        taken
    }

    fn sharing(lanes: u32, ranks: u32) -> Sharing {
        Sharing::new(lanes, ranks, 1, 22_803, |_| None)
    }

    proptest! {
        #[test]
        fn no_message_takes_more_than_is_said(
            lanes in 0..=5_u32, ranks in 2..=64_u32, of_a_peer in 0..=6_u32, bytes in 1..1_u64 << 30, chunk in 17..=19_u32, version in 21_800..23_100_u32
        ) {
            let sharing = Sharing::new(1 << lanes, ranks, 1, version, |_| None);
            let taken = taken(sharing.all, 1 << of_a_peer, ranks, bytes, PART_CHUNKS << chunk);
            prop_assert!(taken <= sharing.channels(1).of_message(bytes), "{} of {:?}", taken, sharing);
        }
    }

    #[test]
    fn a_message_has_the_lanes_that_are_asked_for() {
        for (ranks, all) in [(2, 8), (3, 16), (4, 16), (8, 32), (16, 64)] {
            let sharing = sharing(4, ranks);
            assert_eq!((sharing.asked, sharing.all, sharing.each), (all, all, 4), "{ranks} ranks");
            assert_eq!(taken(all, 64, ranks, 4 << 20, 16 << 20), 4);
        }
        assert_eq!(sharing(4, 32).each, 2, "there are 64 in all");
        assert_eq!(Sharing::new(4, 16, 1, 22_105, |_| None).each, 2, "there were 32");
    }

    #[test]
    fn what_nccl_is_told_by_its_variables_is_counted() {
        let with = |name: &'static str, value| {
            Sharing::new(4, 4, 1, 22_803, move |asked| (asked == name).then_some(value))
        };
        for name in MORE {
            let sharing = with(name, 24);
            assert_eq!((sharing.asked, sharing.all, sharing.each), (16, 32, 8), "{name}");
        }
        assert_eq!(with("NCCL_MIN_CTAS", 2), sharing(4, 4), "fewer are no bound");
        assert_eq!(with("NCCL_P2P_NVL_CHUNKSIZE", 1 << 16).part_bytes, 2 << 20);
        assert_eq!(with("NCCL_BUFFSIZE", 1 << 19).part_bytes, 2 << 20);
        assert_eq!(
            with("NCCL_P2P_PCI_CHUNKSIZE", 1 << 20),
            sharing(4, 4),
            "larger ones are no bound"
        );
    }

    #[test]
    fn over_a_network_a_message_has_what_the_communicator_says_or_nobody_knows() {
        let over = |version, net| {
            Sharing::new(4, 2, 2, version, move |name| if name == NET { net } else { None }).each
        };
        assert_eq!((over(22_803, None), over(22_803, Some(8)), over(22_605, None)), (4, 8, 8));
    }
}
