//! The kernel's parameters.
//!
//! Invariant: mirrored word for word by `struct Params` in `flux-kernels/cuda/program.cuh`.

use cudarc::driver::sys::CUtensorMap;
use flux_core::rank::MAX_WORLD;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Params {
    pub(super) a_caller: CUtensorMap,
    pub(super) a_gather: CUtensorMap,
    pub(super) b: CUtensorMap,
    pub(super) y: CUtensorMap,
    pub(super) data: [u64; MAX_WORLD],
    pub(super) pad: [u64; MAX_WORLD],
    pub(super) items: u64,
    pub(super) awaits: u64,
    pub(super) transfers: u64,
    pub(super) control: u64,
    pub(super) fault: u64,
    pub(super) half_stride: u64,
    pub(super) deadline_ns: u64,
    pub(super) x: u64,
    pub(super) x_row_bytes: u64,
    pub(super) row_bytes: u64,
    pub(super) shard_slot_bytes: u64,
    pub(super) y_address: u64,
    pub(super) y_row_bytes: u64,
    pub(super) split_k_offset: u64,
    pub(super) global_staging: u64,
    pub(super) bias: u64,
    pub(super) scatter_buffer: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) item_count: u32,
    pub(super) transfer_count: u32,
    pub(super) slots_per_source: u32,
    pub(super) await_pushed: u32,
    pub(super) gap_ns: u32,
    pub(super) in_flight_limit: u32,
    pub(super) m_shard: u32,
    pub(super) source_row_bytes: u32,
    pub(super) activation: u32,
    pub(super) push_together: u32,
    pub(super) in_mainloop: u32,
    pub(super) in_mainloop_first: u32,
    pub(super) in_mainloop_gap: u32,
    pub(super) op_hash: u32,
    pub(super) after_collective: u32,
    pub(super) item_stamps: u64,
    pub(super) worker_stamps: u64,
}

// SAFETY: words only; a tensor map is an array of them.
unsafe impl bytemuck::Zeroable for Params {}

const _: () = assert!(size_of::<Params>() == 1024 && size_of::<CUtensorMap>() == 128 && MAX_WORLD == 16);
