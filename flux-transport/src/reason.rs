//! Why a communicator was aborted, as a number.
//!
//! These are the reasons of [`Fault::Aborted`](crate::Fault::Aborted) that the library gives.
//! Others are callers' own, from [`Communicator::abort`](crate::Communicator::abort).

use flux_core::Rank;
use flux_core::rank::MAX_WORLD;

/// The first that is no caller's.
pub const RESERVED: u32 = 0xffff_0000;
/// Rank 0 is gone; those after it stand for the other ranks.
const PEER_LOST: u32 = 0xffff_0100;
/// Rank 0 has left before a call that others have begun; as above.
const PEER_LEFT: u32 = 0xffff_0200;
/// The rank's thread panicked.
pub const PANICKED: u32 = 0xffff_0002;
/// A call was given up after peers may have been given a part of it.
pub const UNFINISHED: u32 = 0xffff_0003;
/// The ranks lost each other while they changed the workspace.
pub const OUT_OF_STEP: u32 = 0xffff_0004;
/// A rank has given up waiting for this one.
pub const LATE: u32 = 0xffff_0005;
/// The communicator is rebuilt.
pub const REBUILT: u32 = 0xffff_0006;
/// NCCL failed after a call was under way.
pub const NCCL: u32 = 0xffff_0007;
/// A rank was interrupted while it connected.
pub const INTERRUPTED: u32 = 0xffff_000a;
/// A peer has made calls of other ops, or the same in another order.
pub const IN_ANOTHER_OP: u32 = flux_core::layout::fault::IN_ANOTHER_OP;
/// A wait passed its deadline, where peers are told of that by a word in memory.
pub const TIMED_OUT: u32 = flux_core::layout::fault::TIMED_OUT;

/// The reason that names the lost `rank`, also to those who learn of it second-hand.
pub const fn peer_lost(rank: Rank) -> u32 {
    PEER_LOST + rank.get()
}

/// That `rank` has left before a call that others have begun, as above.
pub const fn peer_left(rank: Rank) -> u32 {
    PEER_LEFT + rank.get()
}

/// The rank that is gone, where this is what a reason says.
pub fn lost(reason: u32) -> Option<Rank> {
    rank_after(PEER_LOST, reason)
}

/// The departed rank that a reason names.
pub fn left(reason: u32) -> Option<Rank> {
    rank_after(PEER_LEFT, reason)
}

fn rank_after(first: u32, reason: u32) -> Option<Rank> {
    let rank = reason.checked_sub(first)?;
    ((rank as usize) < MAX_WORLD).then(|| Rank::new(rank))
}

pub(crate) fn words(reason: u32) -> String {
    if let Some(rank) = lost(reason) {
        return format!("rank {rank} is gone");
    }
    if let Some(rank) = left(reason) {
        return format!("rank {rank} has left");
    }
    match reason {
        PANICKED => "its thread panicked".to_owned(),
        UNFINISHED => "it gave up a call of which peers may have been given a part".to_owned(),
        LATE => "it has given up waiting for this rank".to_owned(),
        NCCL => "NCCL reported an error of the devices or the network".to_owned(),
        TIMED_OUT => "a wait of its passed the deadline".to_owned(),
        IN_ANOTHER_OP => "it found that a rank has made other calls".to_owned(),
        REBUILT => "it rebuilds the communicator".to_owned(),
        INTERRUPTED => "it was interrupted while it connected".to_owned(),
        OUT_OF_STEP => "it lost its peers while the workspace was changed".to_owned(),
        other => format!("reason {other}"),
    }
}
