//! What a rank tells its peers about its memory.
//!
//! Invariant: decoding accepts exactly what [`Introduction::encode`] and [`Offer::encode`] of this
//! version give. Ranks compute offsets from the common size.

use crate::backends::view::checked_bytes;
use crate::topology::hints;
use flux_core::layout::WorkspaceSize;
use flux_cuda::DeviceUuid;

/// First bytes of a message, with the version.
const MAGIC: [u8; 8] = *b"fluxnvl3";

/// Who a rank is: exchanged once, at connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceIdentity {
    /// Random; the same for all ranks of a process and for no other.
    pub(super) process: [u8; 16],
    pub(super) uuid: DeviceUuid,
    /// The device's number in its process.
    pub(super) ordinal: u32,
    /// Whether the device's memory can leave the process.
    pub(super) posix_handles: bool,
    /// Whether several ranks may share the device.
    pub(super) shared_device: bool,
    /// Whether its device is a MIG instance; only said, never decided by.
    pub(super) instance: bool,
}

/// What a rank says of itself when the ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Introduction {
    pub(super) identity: DeviceIdentity,
    /// Its `CUDA_VISIBLE_DEVICES` as [`hints::shown`], for where two ranks have one device.
    pub(super) visible: String,
}

/// A rank's new workspace: exchanged when the ranks connect, and at each growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Names the memory to ranks of the same process.
    pub(super) key: u64,
    pub(super) bytes: u64,
    pub(super) size: WorkspaceSize,
    pub(super) epoch: u32,
    /// Whether a graph holds addresses of the workspace before this one.
    pub(super) captured: bool,
}

impl Introduction {
    pub(super) fn encode(&self) -> Vec<u8> {
        [&self.identity.encode(), self.visible.as_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (identity, visible) = bytes.split_at_checked(DeviceIdentity::BYTES)?;
        let visible = std::str::from_utf8(visible)
            .ok()
            .filter(|text| hints::shown(text) == **text)?
            .to_owned();
        Some(Self { identity: DeviceIdentity::decode(identity)?, visible })
    }
}

impl DeviceIdentity {
    const BYTES: usize = MAGIC.len() + 2 + 16 + 16 + 4 + 1;

    pub(super) fn encode(&self) -> Vec<u8> {
        let flags = u8::from(self.posix_handles)
            | u8::from(self.shared_device) << 1
            | u8::from(self.instance) << 2;
        [&MAGIC[..], b"id", &self.process, &self.uuid.0, &self.ordinal.to_le_bytes(), &[flags]]
            .concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes, *b"id")?;
        let (process, uuid, ordinal) =
            (reader.array()?, DeviceUuid(reader.array()?), reader.u32()?);
        let [flags] = reader.array()?;
        reader.end()?;
        let [posix_handles, shared_device, instance] = [1, 2, 4].map(|flag| flags & flag != 0);
        (flags < 8).then_some(Self {
            process,
            uuid,
            ordinal,
            posix_handles,
            shared_device,
            instance,
        })
    }
}

impl Offer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { key, bytes, size, epoch, captured } = self;
        let numbers = [*key, *bytes, size.half_bytes].map(u64::to_le_bytes).concat();
        let words = [size.signals, size.counters, *epoch].map(u32::to_le_bytes).concat();
        [&MAGIC[..], b"of", &numbers, &words, &[u8::from(*captured)]].concat()
    }

    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(message, *b"of")?;
        let (key, bytes, half_bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
        let (signals, counters, epoch) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let [captured] = reader.array()?;
        reader.end()?;
        let size = WorkspaceSize { half_bytes, signals, counters };
        (captured < 2).then_some(Self { key, bytes, size, epoch, captured: captured == 1 })
    }

    /// Whether the memory can hold what it is said to hold; `None` where the numbers overflow.
    pub(super) fn holds(&self) -> Option<bool> {
        checked_bytes(&self.size).ok().map(|(_, both)| self.bytes >= both)
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], kind: [u8; 2]) -> Option<Self> {
        bytes.strip_prefix(&MAGIC)?.strip_prefix(&kind).map(Self)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk()?;
        self.0 = tail;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::layout::pad_bytes;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_offer_survives_the_trip_and_no_part_of_it_does(
            key: u64, bytes: u64, half_bytes: u64, signals: u32, counters: u32, epoch: u32, captured: bool, cut in 0usize..45,
        ) {
            let size = WorkspaceSize { half_bytes, signals, counters };
            let offer = Offer { key, bytes, size, epoch, captured };
            let mut message = offer.encode();
            prop_assert_eq!(Offer::decode(&message), Some(offer));
            prop_assert_eq!(Offer::decode(&message[..cut]), None);
            prop_assert_eq!(DeviceIdentity::decode(&message), None);
            message.push(0);
            prop_assert_eq!(Offer::decode(&message), None);
        }

        #[test]
        fn an_introduction_survives_the_trip(
            process: [u8; 16], uuid: [u8; 16], ordinal: u32, flags: [bool; 3], visible: String,
        ) {
            let [posix_handles, shared_device, instance] = flags;
            let identity = DeviceIdentity { process, uuid: DeviceUuid(uuid), ordinal, posix_handles, shared_device, instance };
            let introduction = Introduction { identity, visible: hints::shown(&visible) };
            let message = introduction.encode();
            prop_assert_eq!(Introduction::decode(&message), Some(introduction));
            // What is not as an error can show it is none of ours.
            for more in [&b" "[..], b"\n0", &[b'0'; 1025], &[0xff]] {
                prop_assert_eq!(Introduction::decode(&[&message[..], more].concat()), None);
            }
            prop_assert_eq!(Introduction::decode(&message[1..]), None);
            prop_assert_eq!(Introduction::decode(&message[..DeviceIdentity::BYTES - 1]), None);
            prop_assert_eq!(Offer::decode(&message), None);
        }

        #[test]
        fn numbers_that_overflow_are_refused(half_bytes: u64, signals: u32, bytes: u64) {
            let size = WorkspaceSize { half_bytes, signals, counters: 0 };
            let offer = Offer { key: 0, bytes, size, epoch: 1, captured: false };
            let halves = 2 * u128::from(half_bytes).next_multiple_of(1 << 21);
            let exact = halves + u128::from(pad_bytes(signals));
            prop_assert_eq!(offer.holds().unwrap_or(false), u128::from(bytes) >= exact);
        }
    }
}
