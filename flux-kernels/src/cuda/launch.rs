//! The kernel and its launch.

use super::LaunchError;
use super::module::Module;
use super::program::DeviceProgram;
use super::tensor_map::{BoxCols, Fetch, Stack, encode};
use super::trace::TraceBuffer;
use super::warm_up::warm_up;
use crate::abi::Params;
use crate::epilogue::Activation;
use crate::variant::Variant;
use cudarc::driver::sys::{self, CUtensorMap};
use flux_core::layout::gather_place_bytes;
use flux_core::program::TileProgram;
use flux_core::rank::MAX_WORLD;
use flux_core::{OpKind, WorldSize};
use std::ffi::CString;

/// A loaded variant of the fused kernel.
#[derive(Debug)]
pub struct Kernel {
    variant: Variant,
    module: Module,
    function: sys::CUfunction,
    multiprocessors: u32,
}

// SAFETY: the function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; launches do not change it.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a compiled variant into the current context, and launches it once without work: the
    /// first call is then like any other. Waits for the device, as loading does. Who loads again
    /// and again what was loaded before asks for the one [that is](super::loaded()).
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks the entry point.
    pub fn load(variant: Variant, cubin: &[u8]) -> Result<Self, LaunchError> {
        let module = Module::load(cubin)?;
        let function = module.function(&CString::new(variant.entry()).unwrap_or_default())?;
        module.allow_shared(function, variant.shared_bytes())?;
        let multiprocessors = module.multiprocessors()?;
        warm_up(&module, function, variant, multiprocessors)?;
        Ok(Self { variant, module, function, multiprocessors })
    }

    /// Which variant this is.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Where it is loaded.
    pub(super) fn context(&self) -> sys::CUcontext {
        self.module.context()
    }

    /// Multiprocessors of the device: the CTAs of this kernel that run at once.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}

/// A row-major matrix on the device.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element; a multiple of 16.
    pub address: u64,
    /// Bytes between rows; a multiple of 16.
    pub row_bytes: u64,
}

/// What keeps the links free of bursts: gaps in the traffic of a CTA, and turns of the CTAs. Zero
/// sends as fast as the link takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Nanoseconds between 2 KiB pieces of the caller's shard, from the second destination on.
    pub push_gap_ns: u32,
    /// Nanoseconds between 4 KiB pieces of a partial tile.
    pub send_gap_ns: u32,
    /// CTAs that scatter a tile's rows at once, each of them by one warp while its consumers
    /// multiply the next tile. With 0 consumers scatter their rows themselves, before that.
    pub in_flight_limit: u32,
}

impl Pace {
    /// Bytes of a piece of the caller's shard.
    pub const PUSHED_BYTES: u32 = 2048;
    /// Bytes of a piece of a partial tile.
    pub const SENT_BYTES: u32 = 4096;
}

/// The operands, the memory and the place of one launch. Shapes are those of the program's problem.
#[derive(Clone, Copy, Debug)]
pub struct LaunchArgs<'a> {
    /// The caller's `x`.
    pub x: Matrix,
    /// The caller's `w`.
    pub w: Matrix,
    /// The caller's `y`.
    pub y: Matrix,
    /// Address of the caller's bias, one element for each column of `y`, a multiple of 4; 0 for
    /// none.
    pub bias: u64,
    /// What is applied to the sum with the bias; nothing for GEMM-ReduceScatter.
    pub activation: Activation,
    /// Every rank's data region, as mapped on this device.
    pub data: &'a [u64],
    /// Every rank's pad, as mapped on this device.
    pub pads: &'a [u64],
    /// Where the rows come that other ranks scatter to this one: its data region, but where that is
    /// not what they reach.
    pub scatter_buffer: u64,
    /// This rank's control block.
    pub control: u64,
    /// This rank's fault block, as the device sees it.
    pub fault: u64,
    /// Bytes between the halves of a data region.
    pub half_stride: u64,
    /// The op's number, or the op-sequence hash of the calls up to this one, that ranks compare on
    /// each other's pads. 0 where the transport compares.
    pub op_hash: u32,
    /// Whether a collective brought the operands: an abort of the host then fails the call.
    pub after_collective: bool,
    /// Longest wait for another rank, in nanoseconds.
    pub deadline_ns: u64,
    /// Whether a mover outside of the kernel reads `x` and reports the end of it in the control
    /// block.
    pub await_pushed: bool,
    /// CTAs of this launch.
    pub workers: u32,
    /// Whether the kernel itself pushes the caller's shard where its program's transfers say; not
    /// where another mover does.
    pub push: bool,
    /// How traffic is spread.
    pub pace: Pace,
    /// Where a traced kernel records the call; given exactly where the kernel is one.
    pub trace: Option<&'a TraceBuffer>,
    /// The stream.
    pub stream: usize,
}

/// Enqueues one call on the stream. Does not wait for the device and allocates nothing.
///
/// # Safety
/// - The program is one that passes [`check::verify`](flux_core::program::check::verify) together
///   with those of the other ranks, as what
///   [`TileProgram::build_across`](flux_core::program::TileProgram::build_across) makes does.
///   Neither this function nor the kernel checks it: the kernel reads and writes where its records
///   say. Awaits may be missing where what they announce is there when the kernel begins.
/// - Every address is valid on the current device for the extents that the program implies, until
///   the launch has completed.
/// - All ranks of the world enqueue the same call.
///
/// # Errors
/// [`LaunchError`], before anything is enqueued.
///
/// # Panics
/// If there are fewer data regions or pads than ranks.
pub unsafe fn launch(kernel: &Kernel, program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<(), LaunchError> {
    let p = program.program();
    let variant = kernel.variant;
    let ctas = args.workers;
    if !variant.fits(p) || !program.has_room_for(variant, ctas) {
        let program = format!("{} with tiles of {}", p.problem, p.tile);
        return Err(LaunchError::Mismatch { program, kernel: variant.to_string() });
    }
    if variant.op() == OpKind::GemmReduceScatter && args.activation != Activation::None {
        return Err(LaunchError::Activation { activation: args.activation });
    }
    let limit = kernel.multiprocessors;
    if ctas == 0 || ctas > limit {
        return Err(LaunchError::Grid { ctas, limit });
    }
    if args.trace.is_some() != variant.is_traced() || args.trace.is_some_and(|trace| !trace.fits(p.items.len(), ctas)) {
        return Err(LaunchError::Trace { kernel: variant.to_string(), items: p.items.len(), ctas });
    }
    let params = encode_params(variant, program, args)?;
    let (grid, shared) = ((ctas, 1), variant.shared_bytes());
    // SAFETY: the kernel takes one `Params`; the caller answers for the addresses in it.
    unsafe { kernel.module.launch(kernel.function, grid, Variant::THREADS, shared, &params, args.stream) }
}

/// The operands' tensor maps.
struct Maps {
    a_caller: CUtensorMap,
    a_gather: CUtensorMap,
    b: CUtensorMap,
    y: CUtensorMap,
}

fn encode_maps(variant: Variant, p: &TileProgram, args: &LaunchArgs<'_>) -> Result<Maps, LaunchError> {
    let problem = &p.problem;
    let (dtype, tile, world) = (problem.dtype(), p.tile, problem.world());
    let (m_shard, k) = (problem.m_shard(), problem.k_local());
    // The operand whose rows are global is a stack of shards, so that a tile's box ends at the
    // shard's border, or one matrix where tiles span shards.
    let (global_rows, shards) = if p.flattened { (problem.m(), 1) } else { (m_shard, world.get()) };
    let (x_rows, x_shards, y_rows, y_shards) = match problem.op() {
        OpKind::AllGatherGemm => (m_shard, 1, global_rows, shards),
        OpKind::GemmReduceScatter => (global_rows, shards, m_shard, 1),
    };
    let shard_bytes = |m: Matrix| u64::from(m_shard) * m.row_bytes;
    let x_outer = [(x_shards, shard_bytes(args.x)), (1, shard_bytes(args.x))];
    let x = Stack {
        operand: "x",
        address: args.x.address,
        cols: k,
        rows: x_rows,
        row_bytes: args.x.row_bytes,
        outer: &x_outer,
        box_rows: tile.m,
        box_cols: BoxCols::Wide,
        fetch: Fetch::Pair,
    };
    let w = Stack {
        operand: "w",
        address: args.w.address,
        cols: k,
        rows: problem.n_local(),
        row_bytes: args.w.row_bytes,
        outer: &[],
        box_rows: tile.n,
        box_cols: BoxCols::Wide,
        fetch: if variant.loads_pairs() { Fetch::Line } else { Fetch::Pair },
    };
    let y_outer = [(y_shards, shard_bytes(args.y))];
    let y = Stack {
        operand: "y",
        address: args.y.address,
        cols: problem.n_local(),
        rows: y_rows,
        row_bytes: args.y.row_bytes,
        outer: &y_outer,
        box_rows: variant.box_rows(),
        box_cols: BoxCols::of(variant),
        fetch: Fetch::Pair,
    };
    let row_bytes = u64::from(k) * dtype.bytes() as u64;
    let a_caller = encode(dtype, &x)?;
    let gathers = problem.op() == OpKind::AllGatherGemm && world.peers() > 0;
    let a_gather = if gathers {
        let places = if p.flattened { 1 } else { world.peers() };
        let outer = [(places, gather_place_bytes(problem)), (2, args.half_stride)];
        let address = args.data[p.rank.index()];
        encode(dtype, &Stack { operand: "the gather buffer", address, rows: global_rows, row_bytes, outer: &outer, ..x })?
    } else {
        a_caller
    };
    Ok(Maps { a_caller, a_gather, b: encode(dtype, &w)?, y: encode(dtype, &y)? })
}

/// What the kernel reads.
fn encode_params(variant: Variant, program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<Params, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (dtype, world) = (problem.dtype(), problem.world());
    let row_bytes = u64::from(problem.k_local()) * dtype.bytes() as u64;
    let Maps { a_caller, a_gather, b, y } = encode_maps(variant, p, args)?;
    Ok(Params {
        a_caller,
        a_gather,
        b,
        y,
        data: by_rank(args.data, world),
        pad: by_rank(args.pads, world),
        items: program.items(),
        awaits: program.awaits(),
        transfers: program.transfers(),
        control: args.control,
        fault: args.fault,
        half_stride: args.half_stride,
        deadline_ns: args.deadline_ns,
        x: args.x.address,
        x_row_bytes: args.x.row_bytes,
        row_bytes,
        shard_slot_bytes: gather_place_bytes(problem),
        y_address: args.y.address,
        y_row_bytes: args.y.row_bytes,
        split_k_offset: p.split_k_offset(),
        global_staging: program.global_staging(),
        bias: args.bias,
        scatter_buffer: args.scatter_buffer,
        rank: p.rank.get(),
        world: world.get(),
        item_count: p.items.len() as u32,
        transfer_count: if args.push { p.transfers.len() as u32 } else { 0 },
        slots_per_source: p.slots_per_source,
        await_pushed: u32::from(args.await_pushed),
        gap_ns: match problem.op() {
            OpKind::AllGatherGemm => args.pace.push_gap_ns,
            OpKind::GemmReduceScatter => args.pace.send_gap_ns,
        },
        // The kernel compares numbers of turns with a sign.
        in_flight_limit: args.pace.in_flight_limit.min(i32::MAX as u32),
        m_shard: problem.m_shard(),
        source_row_bytes: problem.n_local() * dtype.bytes() as u32,
        activation: args.activation as u32,
        push_together: u32::from(args.push && p.flattened && !p.transfers.is_empty()),
        in_mainloop: p.in_mainloop,
        in_mainloop_first: p.in_mainloop_steps().0,
        in_mainloop_gap: p.in_mainloop_steps().1,
        op_hash: args.op_hash,
        after_collective: u32::from(args.after_collective),
        item_stamps: args.trace.map_or(0, TraceBuffer::item_stamps),
        worker_stamps: args.trace.map_or(0, TraceBuffer::worker_stamps),
    })
}

/// The addresses in the kernel's array of fixed capacity.
fn by_rank(addresses: &[u64], world: WorldSize) -> [u64; MAX_WORLD] {
    let mut all = [0; MAX_WORLD];
    all[..world.index()].copy_from_slice(&addresses[..world.index()]);
    all
}
