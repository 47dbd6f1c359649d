//! From a program and the arguments of a launch to the kernel's parameters.

use super::args::{LaunchArgs, Matrix, Residual};
use super::error::LaunchError;
use super::program::DeviceProgram;
use super::tensor_map::{BoxCols, Fetch, Operand, Outer, encode};
use super::trace::TraceBuffer;
use crate::abi::Params;
use crate::variant::Variant;
use crate::weights::{GATES, GateLayout, WeightLayout};
use cudarc::driver::sys::CUtensorMap;
use flux_core::layout::gather_place_bytes;
use flux_core::program::TileProgram;
use flux_core::rank::MAX_WORLD;
use flux_core::tile::Generation;
use flux_core::{OpKind, WorldSize};

/// The operands' tensor maps.
struct Maps {
    a_caller: CUtensorMap,
    a_gather: CUtensorMap,
    b: CUtensorMap,
    y: CUtensorMap,
    short_shards: CUtensorMap,
    results: [CUtensorMap; MAX_WORLD],
}

impl Maps {
    /// Nothing's.
    const NONE: Self = {
        let map = CUtensorMap { opaque: [0; 16] };
        Self { a_caller: map, a_gather: map, b: map, y: map, short_shards: map, results: [map; MAX_WORLD] }
    };
}

fn encode_maps(variant: Variant, p: &TileProgram, args: &LaunchArgs<'_>) -> Result<Maps, LaunchError> {
    let problem = &p.problem;
    let (dtype, tile, world) = (problem.dtype(), p.tile, problem.world());
    let (m_shard, k) = (problem.m_shard(), problem.k_local(p.rank));
    // Global rows are a matrix for each shard, so that a tile's box ends at the shard's border, or
    // one flattened matrix.
    let (global_rows, shards) = if p.rows.is_flattened() { (problem.m(), 1) } else { (m_shard, problem.full_shards()) };
    let own_rows = problem.shard_rows(p.rank).len() as u32;
    let (x_rows, x_shards, y_rows, y_shards) = match problem.op() {
        OpKind::AllGatherGemm => (own_rows, 1, global_rows, shards),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => (global_rows, shards, own_rows, 1),
    };
    // Tensor maps have no empty extents. Nothing is read of or stored to a shard without rows, so
    // any memory may stand in for it.
    let present = |address, rows: u32| if rows == 0 { (args.data[p.rank.index()], 1) } else { (address, rows) };
    let shard_bytes = |m: Matrix| u64::from(m_shard) * m.row_bytes;
    let x_outer = [Outer::new(x_shards, shard_bytes(args.x)), Outer::new(1, shard_bytes(args.x))];
    let (x_address, x_rows) = present(args.x.address, x_rows);
    // Of a GEMM-AllReduce tiles are stored to the own rows of all.
    let own_first = if problem.op() == OpKind::GemmAllReduce { u64::from(problem.shard_rows(p.rank).start) } else { 0 };
    let (y_address, y_rows) = present(args.y.address + own_first * args.y.row_bytes, y_rows);
    let x = Operand {
        name: "x",
        address: x_address,
        cols: k,
        rows: x_rows,
        row_bytes: args.x.row_bytes,
        outer: &x_outer,
        box_rows: tile.m,
        box_cols: BoxCols::Wide,
        fetch: Fetch::Pair,
    };
    let (rows, cols) = variant.weights().extents(problem.n_local(p.rank), k);
    let (box_rows, box_cols) = match variant.weights() {
        WeightLayout::Nk => (tile.n, BoxCols::Wide),
        WeightLayout::Kn => (tile.k, BoxCols::of(variant)),
    };
    let w = Operand {
        name: "w",
        address: args.w.address,
        cols,
        rows,
        row_bytes: args.w.row_bytes,
        outer: &[],
        box_rows,
        box_cols,
        fetch: if variant.loads_pairs() { Fetch::Line } else { Fetch::Pair },
    };
    // Eight gates, their ups, and so on.
    let (step, up) = gate_steps(args, rows);
    let eights = u64::from(GATES) * u64::from(step) * w.row_bytes;
    let gates = [Outer::new(2, u64::from(up) * w.row_bytes).boxed(2), Outer::new(rows / (2 * GATES), eights).boxed(tile.n / (2 * GATES))];
    let w = match args.gates {
        None => w,
        Some(_) => Operand { rows: GATES, row_bytes: u64::from(step) * w.row_bytes, outer: &gates, box_rows: GATES, ..w },
    };
    let y_outer = [Outer::new(y_shards, shard_bytes(args.y))];
    let y = Operand {
        name: "y",
        address: y_address,
        cols: GateLayout::result_cols(args.gates, problem.n_local(p.rank)),
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
        let places = if p.rows.is_flattened() { 1 } else { world.peers() };
        let outer = [Outer::new(places, gather_place_bytes(problem)), Outer::new(2, args.half_stride)];
        let address = args.data[p.rank.index()];
        encode(dtype, &Operand { name: "the gather buffer", address, rows: global_rows, row_bytes, outer: &outer, ..x })?
    } else {
        a_caller
    };
    let y_map = encode(dtype, &y)?;
    let short = world.get() - problem.full_shards();
    let short_shards = if p.rows.is_flattened() || short == 0 {
        y_map
    } else {
        let (all, caller) = if problem.op() == OpKind::AllGatherGemm { (y, args.y) } else { (x, args.x) };
        let first = caller.address + u64::from(problem.full_shards()) * shard_bytes(caller);
        let (address, rows) = present(first, m_shard - 1);
        let bytes = u64::from(rows) * caller.row_bytes;
        let outer = [Outer::new(short, bytes), Outer::new(1, bytes)];
        encode(dtype, &Operand { address, rows, outer: &outer[..all.outer.len()], ..all })?
    };
    let mut results = [y_map; MAX_WORLD];
    if p.items.len() > p.computed().len() && !p.rows.is_flattened() {
        let row_bytes = u64::from(problem.n()) * dtype.bytes() as u64;
        let offset = p.results_offset() + own_first * row_bytes;
        let outer = [Outer::new(2, args.half_stride)];
        for (map, data) in results.iter_mut().zip(&args.data[..world.index()]) {
            let (address, rows) = present(data + offset, own_rows);
            *map = encode(dtype, &Operand { name: "the results", address, rows, row_bytes, outer: &outer, ..y })?;
        }
    }
    Ok(Maps { a_caller, a_gather, b: encode(dtype, &w)?, y: y_map, short_shards, results })
}

/// Rows of `n` gated ones of `w` from a gate to the next and to its up; zeros without gates.
fn gate_steps(args: &LaunchArgs<'_>, n: u32) -> (u32, u32) {
    args.gates.map_or((0, 0), |layout| layout.steps(n))
}

/// The kernel's parameters.
pub(super) fn encode_params(variant: Variant, program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<Params, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (dtype, world) = (problem.dtype(), problem.world());
    let row_bytes = u64::from(problem.k_local(p.rank)) * dtype.bytes() as u64;
    let maps = match variant.generation() {
        Generation::Hopper => encode_maps(variant, p, args)?,
        // It computes addresses itself, and other devices have no tensor maps.
        Generation::Portable => Maps::NONE,
    };
    let Maps { a_caller, a_gather, b, y, short_shards, results } = maps;
    let to_all = problem.op() == OpKind::GemmAllReduce && p.rows.is_flattened() && !p.rows.has_two_exchanges();
    let scatter_mask = if to_all { distinct(&args.data[..world.index()]) } else { 0 };
    let residual = args.residual.map(|residual| in_rows_of_items(p, residual));
    let (gate_step, up_offset) = gate_steps(args, problem.n_local(p.rank));
    Ok(Params {
        a_caller,
        a_gather,
        b,
        y,
        short_shards,
        results,
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
        w: args.w.address,
        w_row_bytes: args.w.row_bytes,
        row_bytes,
        shard_slot_bytes: gather_place_bytes(problem),
        y_address: args.y.address,
        y_row_bytes: args.y.row_bytes,
        results_offset: p.results_offset(),
        split_k_offset: p.split_k_offset(),
        global_staging: program.global_staging(),
        bias: args.bias,
        residual: residual.map_or(0, |residual| residual.matrix.address),
        residual_row_bytes: residual.map_or(0, |residual| residual.matrix.row_bytes),
        scatter_buffer: args.scatter_buffer,
        rank: p.rank.get(),
        world: world.get(),
        item_count: p.computed().len() as u32,
        residual_first: residual.map_or(0, |residual| residual.first),
        residual_rows: residual.map_or(0, |residual| residual.rows),
        copy_count: (p.items.len() - p.computed().len()) as u32,
        transfer_count: if args.push { p.transfers.len() as u32 } else { 0 },
        slots_per_source: p.slots_per_source,
        await_pushed: u32::from(args.await_pushed),
        gap_ns: match problem.op() {
            OpKind::AllGatherGemm => args.pace.push_gap_ns,
            OpKind::GemmReduceScatter | OpKind::GemmAllReduce => args.pace.send_gap_ns,
        },
        // The kernel compares counts of stores with a sign.
        in_flight_limit: args.pace.in_flight_limit.min(i32::MAX as u32),
        m_shard: if scatter_mask != 0 { problem.m() } else { problem.m_shard() },
        full_shards: if scatter_mask != 0 { 1 } else { problem.full_shards() },
        own_rows: problem.shard_rows(p.rank).len() as u32,
        full_slots: if p.rows.is_flattened() { problem.full_shards() } else { u32::MAX },
        scatter_mask,
        k_local: problem.k_local(p.rank),
        gate_step,
        up_offset,
        source_row_bytes: problem.n_local(p.rank) * problem.partial_bytes() as u32,
        result_row_bytes: problem.n_local(p.rank) * dtype.bytes() as u32,
        push_together: u32::from(args.push && p.rows.is_flattened() && !p.transfers.is_empty()),
        in_mainloop: p.in_mainloop,
        in_mainloop_first: p.in_mainloop_steps().0,
        in_mainloop_gap: p.in_mainloop_steps().1,
        op_hash: args.op_hash,
        after_collective: u32::from(args.after_collective),
        item_stamps: args.trace.map_or(0, TraceBuffer::item_stamps),
        worker_stamps: args.trace.map_or(0, TraceBuffer::worker_stamps),
    })
}

/// The residual with its rows numbered as items number those of `y`: in two exchanges of a
/// GEMM-AllReduce what a rank finishes counts the rows of its own shard.
fn in_rows_of_items(p: &TileProgram, residual: Residual) -> Residual {
    if p.problem.op() != OpKind::GemmAllReduce || p.rows.is_flattened() && !p.rows.has_two_exchanges() {
        return residual;
    }
    let own = p.problem.shard_rows(p.rank);
    let address = residual.matrix.address + u64::from(own.start) * residual.matrix.row_bytes;
    Residual { matrix: Matrix { address, ..residual.matrix }, rows: own.len() as u32, ..residual }
}

/// The ranks whose address no lower rank has, as a mask: where copies carry rows on, one outbox
/// stands for all peers.
fn distinct(addresses: &[u64]) -> u32 {
    let firsts = addresses.iter().enumerate().filter(|(rank, address)| !addresses[..*rank].contains(address));
    firsts.map(|(rank, _)| 1 << rank).sum()
}

/// The addresses in the kernel's array of fixed capacity.
fn by_rank(addresses: &[u64], world: WorldSize) -> [u64; MAX_WORLD] {
    let mut all = [0; MAX_WORLD];
    all[..world.index()].copy_from_slice(&addresses[..world.index()]);
    all
}
