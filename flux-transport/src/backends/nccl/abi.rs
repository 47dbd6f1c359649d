//! Types of `nccl.h`, as NCCL takes them.

use super::library::OLDEST;
use super::sharing::SAYS_NET_CHANNELS;
use std::ffi::{c_char, c_int};
use std::ops::RangeInclusive;

/// Names one communicator to all its ranks; made by one of them.
///
/// It is NCCL's `ncclUniqueId`, 128 bytes that NCCL takes by value.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UniqueId(pub(super) [u8; 128]);

impl UniqueId {
    /// From the bytes of another rank's.
    pub fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }

    /// To send to the other ranks.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0
    }
}

/// What a collective moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Bytes.
    U8,
    /// 32-bit words.
    U32,
}

impl ElementType {
    /// Its `ncclDataType_t`.
    pub(super) const fn code(self) -> c_int {
        match self {
            Self::U8 => 1,
            Self::U32 => 3,
            Self::F16 => 6,
            Self::Bf16 => 9,
        }
    }
}

impl From<flux_core::DType> for ElementType {
    fn from(dtype: flux_core::DType) -> Self {
        match dtype {
            flux_core::DType::Bf16 => Self::Bf16,
            flux_core::DType::F16 => Self::F16,
            // Only gathered, and their scales with them.
            flux_core::DType::E4m3 => Self::U8,
        }
    }
}

/// `ncclSum` of `ncclRedOp_t`.
pub(super) const SUM: c_int = 0;

/// `ncclConfig_t` as of NCCL 2.28, whose beginning is that of 2.18: libraries look at `size` and
/// `version`.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

/// Bytes of it that 2.18 knows.
const FIRST_CONFIG: usize = 48;

impl Config {
    /// For a library of `version`: a communicator whose calls return at once unless they are
    /// `blocking`, with a number of channels of this range, each on a multiprocessor of its own
    /// `beside` a kernel, else in clusters as NCCL likes. Over a network a message has
    /// `of_a_net_peer` of them; before 2.28 as many as NCCL likes. A communicator that is split
    /// from it shares its resources, among them the flag that aborts it.
    pub(super) fn new(
        blocking: bool,
        beside: bool,
        channels: RangeInclusive<u32>,
        of_a_net_peer: u32,
        version: u32,
    ) -> Self {
        // NCCL's value for what is left to it.
        let undefined = c_int::MIN;
        let says_all = version >= SAYS_NET_CHANNELS;
        Self {
            size: if says_all { size_of::<Self>() } else { FIRST_CONFIG },
            magic: 0xcafe_beef,
            version: if says_all { SAYS_NET_CHANNELS } else { OLDEST },
            blocking: blocking.into(),
            // Clusters need multiprocessors side by side; those that are left free lie anywhere.
            cga_cluster_size: if beside { 0 } else { undefined },
            // NCCL would make fewer over a network, and so fewer for a message.
            min_ctas: channels.start().cast_signed(),
            max_ctas: channels.end().cast_signed(),
            net_name: std::ptr::null(),
            split_share: 1,
            traffic_class: undefined,
            comm_name: std::ptr::null(),
            collnet_enable: undefined,
            cta_policy: undefined,
            shrink_share: undefined,
            nvls_ctas: undefined,
            channels_per_net_peer: of_a_net_peer.cast_signed(),
            nvlink_centric_sched: undefined,
        }
    }
}

const _: () = assert!(
    size_of::<Config>() == 80 && std::mem::offset_of!(Config, traffic_class) == FIRST_CONFIG - 4
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_the_trip_as_bytes() {
        let bytes: [u8; 128] = std::array::from_fn(|i| u8::try_from(i * 2 % 251).unwrap());
        assert_eq!(UniqueId::from_bytes(bytes).to_bytes(), bytes);
    }
}
