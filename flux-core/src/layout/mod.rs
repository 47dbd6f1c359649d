//! Byte layout of the memory that ranks share, and of a rank's private control block.
//!
//! Invariant: each word that another rank polls or writes lies on a [`LINE`] of its own and has one
//! writer in a call. Kernels take these constants from `flux-kernels/src/abi`.
//!
//! ```text
//! data    (symmetric)  [ half 0 ][ half 1 ]
//!
//! half                 [ gather buffer, slots or scattered rows ][ results, 1024-aligned ]
//!                      [ own split-K slots, 1024-aligned ]
//!
//! pad     (symmetric)  [ words about ranks 0..16 ][ signal 0 of half 0 ][ of half 1 ] ...
//!                      one u32 at the start of each line; the words about a rank are its reason to
//!                      give up, an unused u32, and for each half its call and the call's op
//! control (private)    [ epoch ][ ticket ][ poison ][ pushed ]
//!                      [ stores begun ][ stores ended ][ counters, dense u32 ]
//!
//! fault   (host)       [ FaultRecord ][ abort word ][ closed ]   of host and device
//! ```

pub mod control;
mod data;
mod fault_block;
mod pad;
mod workspace;

pub use data::{
    RowLayout, SPLIT_K_ALIGN, gather_place_bytes, gather_place_offset, half_bytes, results_offset,
    scatter_place_bytes, slot_bytes, split_k_offset, split_k_slot_bytes,
};
pub use fault_block::{ABORT_OFFSET, CLOSED_OFFSET, FAULT_BYTES, FaultRecord, fault};
pub use pad::{BROKEN_BYTES, broken_offset, calling_offset, pad_bytes, signal_offset};
pub use workspace::WorkspaceSize;

/// Bytes between words that different ranks write or poll.
pub const LINE: u64 = 128;
