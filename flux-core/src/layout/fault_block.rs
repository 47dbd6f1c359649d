//! What the host reads of a call that fails, while the device is busy.

use super::LINE;
use bytemuck::{Pod, Zeroable};

/// Offset of the abort word in the fault block.
pub const ABORT_OFFSET: u64 = LINE;
/// Offset, in the fault block, of the number of the last sequential call whose kernel has closed.
pub const CLOSED_OFFSET: u64 = 2 * LINE;
/// Bytes of the fault block.
pub const FAULT_BYTES: u64 = 3 * LINE;

/// What a failed wait leaves in memory that the host can read while the device is busy. 64 bytes.
///
/// `state` is written last, with release order; the other fields are valid once it is non-zero.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct FaultRecord {
    /// 0: nothing happened; 1: the record is complete.
    pub state: u32,
    /// [`fault::TIMEOUT`], [`fault::ABORTED`] or [`fault::DISAGREED`].
    pub code: u32,
    /// The kind of wait: [`fault::SIGNAL`], [`fault::PUSHED`] or [`fault::CALL`].
    pub wait: u32,
    /// The rank that waited, or the rank whose failure ended the wait.
    pub rank: u32,
    /// The rank that should have written the word.
    pub peer: u32,
    /// Index of the awaited signal.
    pub signal: u32,
    /// The expected epoch, or the own op if the peer is in another.
    pub expected: u32,
    /// The last value seen, or the peer's op if it is in another.
    pub seen: u32,
    /// Epoch of the call.
    pub epoch: u32,
    /// The reason, if an abort word or a failed peer ended the wait.
    pub abort: u32,
    /// Reserved, zero.
    pub reserved: [u32; 6],
}

/// Values of the fields of a [`FaultRecord`].
pub mod fault {
    /// The deadline passed.
    pub const TIMEOUT: u32 = 1;
    /// The abort word was set.
    pub const ABORTED: u32 = 2;
    /// A peer is in a call of another op.
    pub const DISAGREED: u32 = 3;
    /// Reason of a rank that gave up because a peer is in a call of another op.
    pub const IN_ANOTHER_OP: u32 = 0xffff_0009;
    /// Reason of a rank that gave up at the deadline.
    pub const TIMED_OUT: u32 = 0xffff_0008;
    /// A chunk or partial tile did not arrive.
    pub const SIGNAL: u32 = 1;
    /// The own mover did not finish.
    pub const PUSHED: u32 = 2;
    /// The peer has not announced its call.
    pub const CALL: u32 = 3;
}

const _: () = assert!(size_of::<FaultRecord>() == 64);
