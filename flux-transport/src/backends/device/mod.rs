//! What the backends of CUDA devices share.
//!
//! Invariant: nothing here knows which backend uses it. A call's transfers go on [side
//! streams](lane::Lane) that fork from the caller's and join it; [calls](calls::Calls) come one
//! after another. Waits of a device end by its [fault block](fault_block::FaultBlock), those of the
//! host by [limits].

pub(crate) mod calls;
pub(crate) mod control_block;
pub(crate) mod drain;
pub(crate) mod fault_block;
pub(crate) mod lane;
pub(crate) mod limits;
pub(crate) mod peer_memory;
