//! The kernel and its launch.

use super::LaunchError;
use super::module::Module;
use super::program::DeviceProgram;
use super::tensor_map::{BoxCols, Fetch, Stack, encode};
use super::trace::TraceBuffer;
use super::warm_up::warm_up;
use crate::abi::{ItemStamps, Params};
use crate::epilogue::Activation;
use crate::variant::Variant;
use cudarc::driver::sys::{self, CUtensorMap};
use flux_core::layout::gather_place_bytes;
use flux_core::program::{TileProgram, WorkItem, sink};
use flux_core::rank::MAX_WORLD;
use flux_core::{OpKind, WorldSize};
use std::ffi::CString;
use std::fmt;
use std::ops::Range;

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

/// Which items of its program a launch walks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// All: the launch is a call.
    #[default]
    Whole,
    /// Those before the folds, of a program that has any (GEMM-ReduceScatter, tiles that span
    /// shards). The call goes on: what is scattered is announced, and not awaited.
    Tiles,
    /// The folds, which end the call that a launch of the tiles has begun.
    Folds,
    /// Some, beside the other launches of the call, which is over when all of them are. Their times
    /// are not recorded.
    Among {
        /// The first item.
        first: u32,
        /// How many.
        count: u32,
        /// The number of the first CTA: those that may run at once have different ones, of the
        /// multiprocessors that there are.
        number: u32,
        /// CTAs of all launches of the call.
        all: u32,
    },
}

impl Part {
    /// Its items in a program; nothing where the program is not in parts.
    fn of(self, program: &TileProgram) -> Option<Range<usize>> {
        let items = &program.items;
        let folds = || items.iter().position(|item| item.sink == sink::REDUCE_ROWS).filter(|&folds| folds > 0);
        match self {
            Self::Whole => Some(0..items.len()),
            Self::Tiles => Some(0..folds()?),
            Self::Folds => Some(folds()?..items.len()),
            Self::Among { first, count, .. } => {
                let (first, end) = (first as usize, first as usize + count as usize);
                (end <= items.len()).then_some(first..end)
            }
        }
    }

    /// The number of the first of its CTAs, and how many there are in the call, where it has so
    /// many itself.
    const fn ctas(self, own: u32) -> (u32, u32) {
        match self {
            Self::Among { number, all, .. } => (number, all),
            Self::Whole | Self::Tiles | Self::Folds => (0, own),
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Whole => f.write_str("items"),
            Self::Tiles | Self::Folds => f.write_str("folds after its tiles, so a call of it is one launch"),
            Self::Among { first, count, .. } => write!(f, "{count} items from number {first} on"),
        }
    }
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
    /// Where messages bring which call each rank is in, and of which op, before the launch that
    /// closes the call: a word for each rank, as [`calling_offset`] has them. 0 where ranks say so
    /// on pads, or nowhere that a kernel looks.
    ///
    /// [`calling_offset`]: flux_core::layout::calling_offset
    pub peer_op_hashes: u64,
    /// This rank's control block.
    pub control: u64,
    /// This rank's fault block, as the device sees it.
    pub fault: u64,
    /// Bytes between the halves of a data region.
    pub half_stride: u64,
    /// The number of the op that the call is of, by which ranks find that their calls are of
    /// different ones: the same on all ranks, and not that of another op. 0 where they do not reach
    /// each other's pads, or only through the host: there the transport tells. Where messages tell
    /// kernels, what this rank has sent in the op's place.
    pub op_hash: u32,
    /// Longest wait for another rank, in nanoseconds.
    pub deadline_ns: u64,
    /// Whether a mover outside of the kernel reads `x` and reports the end of it in the control
    /// block.
    pub await_pushed: bool,
    /// CTAs of this launch.
    pub workers: u32,
    /// What they walk.
    pub part: Part,
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

/// Enqueues one call on the stream, or a part of it. Does not wait for the device and allocates
/// nothing.
///
/// # Safety
/// - The program is one that passes [`check::verify`](flux_core::program::check::verify) together
///   with those of the other ranks, as what
///   [`TileProgram::build_across`](flux_core::program::TileProgram::build_across) makes does.
///   Neither this function nor the kernel checks it: the kernel reads and writes where its records
///   say. Awaits may be missing where what they announce is there when the kernel begins.
/// - Every address is valid on the current device for the extents that the program implies, until
///   the launch has completed.
/// - All ranks of the world enqueue the same call. One in parts is a launch of its tiles and then
///   one of its folds, with the same arguments, before anything else that uses the control block.
///   Launches [among](Part::Among) others have between them each item once, and none waits on the
///   device for an item of another that is enqueued behind it.
///
/// # Errors
/// [`LaunchError`], before anything is enqueued.
///
/// # Panics
/// If there are fewer data regions or pads than ranks.
pub unsafe fn launch(kernel: &Kernel, program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<(), LaunchError> {
    let p = program.program();
    let variant = kernel.variant;
    let (ctas, (number, all)) = (args.workers, args.part.ctas(args.workers));
    let end = number.saturating_add(ctas);
    if !variant.fits(p) || !program.has_room_for(variant, end) {
        let program = format!("{} with tiles of {}", p.problem, p.tile);
        return Err(LaunchError::Mismatch { program, kernel: variant.to_string() });
    }
    if variant.op() == OpKind::GemmReduceScatter && args.activation != Activation::None {
        return Err(LaunchError::Activation { activation: args.activation });
    }
    let limit = kernel.multiprocessors;
    if ctas == 0 || end > limit || ctas > all {
        return Err(LaunchError::Grid { ctas: end.max(ctas), limit: limit.min(all) });
    }
    let is_whole = !matches!(args.part, Part::Among { .. });
    if args.trace.is_some() != variant.is_traced() || args.trace.is_some_and(|trace| !(is_whole && trace.fits(p.items.len(), ctas))) {
        return Err(LaunchError::Trace { kernel: variant.to_string(), items: p.items.len(), ctas });
    }
    let no_part = || LaunchError::NoPart { part: args.part.to_string(), program: format!("{} with tiles of {}", p.problem, p.tile) };
    let items = args.part.of(p).ok_or_else(no_part)?;
    let params = encode_params(variant, program, args, items)?;
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

/// What the kernel reads, to walk these items.
fn encode_params(variant: Variant, program: &DeviceProgram, args: &LaunchArgs<'_>, items: Range<usize>) -> Result<Params, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (dtype, world) = (problem.dtype(), problem.world());
    let row_bytes = u64::from(problem.k_local()) * dtype.bytes() as u64;
    let Maps { a_caller, a_gather, b, y } = encode_maps(variant, p, args)?;
    let (number, all) = args.part.ctas(args.workers);
    Ok(Params {
        a_caller,
        a_gather,
        b,
        y,
        data: by_rank(args.data, world),
        pad: by_rank(args.pads, world),
        items: program.items() + (items.start * size_of::<WorkItem>()) as u64,
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
        global_staging: program.global_staging() + u64::from(number) * variant.epilogue_staging_bytes(),
        bias: args.bias,
        peer_op_hashes: args.peer_op_hashes,
        scatter_buffer: args.scatter_buffer,
        rank: p.rank.get(),
        world: world.get(),
        item_count: items.len() as u32,
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
        in_mainloop: p.early,
        in_mainloop_first: p.early_steps().0,
        in_mainloop_gap: p.early_steps().1,
        op_hash: args.op_hash,
        begins: u32::from(args.part != Part::Folds),
        closes: if args.part == Part::Tiles { 0 } else { all },
        item_stamps: args.trace.map_or(0, |trace| trace.item_stamps() + (items.start * size_of::<ItemStamps>()) as u64),
        worker_stamps: args.trace.map_or(0, TraceBuffer::worker_stamps),
    })
}

/// The addresses in the kernel's array of fixed capacity.
fn by_rank(addresses: &[u64], world: WorldSize) -> [u64; MAX_WORLD] {
    let mut all = [0; MAX_WORLD];
    all[..world.index()].copy_from_slice(&addresses[..world.index()]);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::program::{Chunk, Schedule};
    use flux_core::{DType, Problem, Rank, TileShape};

    #[test]
    fn the_parts_of_a_call_are_its_tiles_and_then_its_folds() {
        let program = |op, stack| {
            let problem = Problem::new(op, 64, 1024, 256, DType::Bf16, WorldSize::new(2).unwrap()).unwrap();
            let schedule = Schedule { stack, chunk: Chunk::Shard, ..Schedule::of(TileShape::new(64, 128, 64)) };
            TileProgram::build(&problem, Rank::new(1), &schedule).unwrap()
        };
        let folded = program(OpKind::GemmReduceScatter, true);
        let parts = [Part::Whole, Part::Tiles, Part::Folds].map(|part| part.of(&folded).unwrap());
        assert!(parts[0] == (0..folded.items.len()) && parts[1] == (0..parts[2].start) && parts[2].end == folded.items.len(), "{parts:?}");
        assert!(folded.items[parts[1].clone()].iter().all(|item| item.sink != sink::REDUCE_ROWS) && !parts[1].is_empty());
        assert!(folded.items[parts[2].clone()].iter().all(|item| item.sink == sink::REDUCE_ROWS) && !parts[2].is_empty());
        for other in [program(OpKind::GemmReduceScatter, false), program(OpKind::AllGatherGemm, true)] {
            assert_eq!([Part::Whole, Part::Tiles, Part::Folds].map(|part| part.of(&other).is_some()), [true, false, false]);
        }
    }
}
