//! From a program and the arguments of a launch to the kernel's parameters.

use super::args::{LaunchArgs, LaunchStart, Matrix, ResultRows};
use super::error::LaunchError;
use super::program::DeviceProgram;
use super::tensor_map::{BoxWidth, Fetch, MappedOperand, Outer, encode};
use super::trace::TraceBuffer;
use crate::abi::{MAPS_OF_WEIGHT, Params, Weight};
use crate::operand::Operand;
use crate::variant::Variant;
use crate::weights::{GateLayout, WeightLayout};
use bytemuck::Zeroable;
use cudarc::driver::sys::CUtensorMap;
use flux_core::layout::gather_place_bytes;
use flux_core::numerics::SCALE_BLOCK;
use flux_core::problem::MAX_WEIGHTS;
use flux_core::program::TileProgram;
use flux_core::rank::MAX_WORLD;
use flux_core::tile::{GATE_COLUMNS, Generation};
use flux_core::{DType, Numerics, Rank, Scales, SumsTo, TileShape, WorldSize};

/// The operands' tensor maps.
struct Maps {
    a_caller: CUtensorMap,
    a_gather: CUtensorMap,
    b: CUtensorMap,
    y: CUtensorMap,
    short_shards: CUtensorMap,
    of_op: [CUtensorMap; MAX_WORLD],
}

impl Maps {
    /// Nothing's.
    const NONE: Self = {
        let map = CUtensorMap { opaque: [0; 16] };
        Self {
            a_caller: map,
            a_gather: map,
            b: map,
            y: map,
            short_shards: map,
            of_op: [map; MAX_WORLD],
        }
    };
}

fn encode_maps(
    variant: Variant,
    program: &DeviceProgram,
    args: &LaunchArgs<'_>,
) -> Result<Maps, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (numerics, tile, world) = (problem.numerics(), p.tile, problem.world());
    let (m_shard, k) = (problem.m_shard(), problem.k_local(p.rank));
    let caller = args.operand(Operand::X, 0);
    let rows = Extents::of(p);
    let shard_bytes = |m: Matrix| u64::from(m_shard) * m.row_bytes;
    let x_outer = [Outer::new(rows.x.1, shard_bytes(caller)), Outer::new(1, shard_bytes(caller))];
    let (x_address, x_rows) = rows.present(args, caller.address, rows.x.0);
    let x = MappedOperand {
        name: "x",
        address: x_address,
        cols: k,
        rows: x_rows,
        row_bytes: caller.row_bytes,
        outer: &x_outer,
        box_rows: rows.boxed(tile),
        box_width: BoxWidth::Wide,
        fetch: Fetch::Pair,
    };
    let a_caller = encode(numerics.operand, &x)?;
    let gathers = problem.op().gathers() && world.peers() > 0;
    let a_gather = if gathers {
        let places = if p.rows.is_flattened() { 1 } else { world.peers() };
        let outer =
            [Outer::new(places, gather_place_bytes(problem)), Outer::new(2, args.half_stride)];
        let address = args.data[p.rank.index()];
        encode(
            numerics.operand,
            &MappedOperand {
                name: "the gather buffer",
                address,
                rows: rows.global,
                row_bytes: problem.gathered_row_bytes(),
                outer: &outer,
                ..x
            },
        )?
    } else {
        a_caller
    };
    let of_weight = |number| encode_weight(variant, p, args, &rows, number);
    let [b, y, short_y] = of_weight(0)?;
    // Of a sum it is x that has all rows.
    let short_shards = if problem.op().reduces() {
        rows.short_shards(p, args, numerics.operand, caller, x)?.unwrap_or(a_caller)
    } else {
        short_y
    };
    let mut of_op = [y; MAX_WORLD];
    let further = 1..problem.weight_count();
    for (maps, number) in of_op.chunks_exact_mut(MAPS_OF_WEIGHT).zip(further) {
        maps.copy_from_slice(&of_weight(number)?);
    }
    if program.copy_count() > 0 && !p.rows.is_flattened() {
        let row_bytes = u64::from(problem.n()) * numerics.output.bytes() as u64;
        let offset = p.results_offset() + rows.own_first * row_bytes;
        let outer = [Outer::new(2, args.half_stride)];
        for (map, data) in of_op.iter_mut().zip(&args.data[..world.index()]) {
            let (address, rows) = rows.present(args, data + offset, rows.y.0);
            let y = result(variant, p, args, 0);
            *map = encode(
                numerics.output,
                &MappedOperand {
                    name: "the results",
                    address,
                    rows,
                    row_bytes,
                    outer: &outer,
                    ..y
                },
            )?;
        }
    }
    Ok(Maps { a_caller, a_gather, b, y, short_shards, of_op })
}

/// The rows of the operands' tensor maps. Global rows are a matrix for each shard, so that a tile's
/// box ends at the shard's border, or one flattened matrix.
struct Extents {
    rank: Rank,
    /// Rows of a matrix of all rows.
    global: u32,
    /// Rows of a matrix of x, and matrices.
    x: (u32, u32),
    /// The same of y.
    y: (u32, u32),
    /// The first row of y that tiles are stored to: of a GEMM-AllReduce the own rows of all.
    own_first: u64,
}

impl Extents {
    fn of(p: &TileProgram) -> Self {
        let problem = &p.problem;
        let (global, shards) = if p.rows.is_flattened() {
            (problem.m(), 1)
        } else {
            (problem.m_shard(), problem.full_shards())
        };
        let (all, own) = ((global, shards), (problem.shard_rows(p.rank).len() as u32, 1));
        let (x, y) = if problem.op().reduces() { (all, own) } else { (own, all) };
        let own_first = if problem.op().sums_to() == SumsTo::All {
            u64::from(problem.shard_rows(p.rank).start)
        } else {
            0
        };
        Self { rank: p.rank, global, x, y, own_first }
    }

    /// Rows of a box of x: no more than a matrix has. The copy unit would spend more time on zeros
    /// than on rows. Nobody needs those: a row's products are its own.
    fn boxed(&self, tile: TileShape) -> u32 {
        tile.m.min(self.global)
    }

    /// Tensor maps have no empty extents. Nothing is read of or stored to a shard without rows, so
    /// any memory may stand in for it.
    fn present(&self, args: &LaunchArgs<'_>, address: u64, rows: u32) -> (u64, u32) {
        if rows == 0 { (args.data[self.rank.index()], 1) } else { (address, rows) }
    }

    /// The map of the shards behind the full ones, with one row less, of the operand that has all
    /// rows: the caller's, as `all` maps its full shards.
    fn short_shards(
        &self,
        p: &TileProgram,
        args: &LaunchArgs<'_>,
        dtype: DType,
        caller: Matrix,
        all: MappedOperand<'_>,
    ) -> Result<Option<CUtensorMap>, LaunchError> {
        let problem = &p.problem;
        let short = problem.world().get() - problem.full_shards();
        if p.rows.is_flattened() || short == 0 {
            return Ok(None);
        }
        let full_rows = u64::from(problem.full_shards()) * u64::from(problem.m_shard());
        let (address, rows) = self.present(
            args,
            caller.address + full_rows * caller.row_bytes,
            problem.m_shard() - 1,
        );
        let bytes = u64::from(rows) * caller.row_bytes;
        let outer = [Outer::new(short, bytes), Outer::new(1, bytes)];
        encode(dtype, &MappedOperand { address, rows, outer: &outer[..all.outer.len()], ..all })
            .map(Some)
    }
}

/// The result of a weight as tiles are stored to it, but for its rows.
fn result(
    variant: Variant,
    p: &TileProgram,
    args: &LaunchArgs<'_>,
    weight: usize,
) -> MappedOperand<'static> {
    MappedOperand {
        name: "y",
        address: 0,
        cols: GateLayout::result_cols(
            args.gates,
            p.problem.weight_columns(weight, p.rank).len() as u32,
        ),
        rows: 0,
        row_bytes: 0,
        outer: &[],
        box_rows: variant.out_box().rows,
        box_width: BoxWidth::of(variant),
        fetch: Fetch::Pair,
    }
}

/// The maps of a weight: w, its y, and the short shards of that.
fn encode_weight(
    variant: Variant,
    p: &TileProgram,
    args: &LaunchArgs<'_>,
    rows: &Extents,
    number: usize,
) -> Result<[CUtensorMap; MAPS_OF_WEIGHT], LaunchError> {
    let [w, y] = [Operand::W, Operand::Y].map(|operand| args.operand(operand, number));
    let (problem, tile) = (&p.problem, p.tile);
    let (w_rows, cols) = variant
        .weights()
        .extents(problem.weight_columns(number, p.rank).len() as u32, problem.k_local(p.rank));
    let (box_rows, box_width) = match variant.weights() {
        WeightLayout::Nk => (tile.n, BoxWidth::Wide),
        WeightLayout::Kn => (tile.k, BoxWidth::of(variant)),
    };
    let b = MappedOperand {
        name: "w",
        address: w.address,
        cols,
        rows: w_rows,
        row_bytes: w.row_bytes,
        outer: &[],
        box_rows,
        box_width,
        fetch: if variant.loads_pairs() { Fetch::Line } else { Fetch::Pair },
    };
    // Columns of gates, of their ups, and so on.
    let (step, up) = gate_steps(args, w_rows);
    let group = u64::from(GATE_COLUMNS) * u64::from(step) * w.row_bytes;
    let gates = [
        Outer::new(2, u64::from(up) * w.row_bytes).boxed(2),
        Outer::new(w_rows / (2 * GATE_COLUMNS), group).boxed(tile.n / (2 * GATE_COLUMNS)),
    ];
    let b = match args.gates {
        None => b,
        Some(_) => MappedOperand {
            rows: GATE_COLUMNS,
            row_bytes: u64::from(step) * w.row_bytes,
            outer: &gates,
            box_rows: GATE_COLUMNS,
            ..b
        },
    };
    let outer = [Outer::new(rows.y.1, u64::from(problem.m_shard()) * y.row_bytes)];
    let (address, y_rows) = rows.present(args, y.address + rows.own_first * y.row_bytes, rows.y.0);
    let of_y = MappedOperand {
        address,
        rows: y_rows,
        row_bytes: y.row_bytes,
        outer: &outer,
        ..result(variant, p, args, number)
    };
    let Numerics { operand, output, .. } = problem.numerics();
    let map = encode(output, &of_y)?;
    let short =
        if problem.op().reduces() { None } else { rows.short_shards(p, args, output, y, of_y)? };
    Ok([encode(operand, &b)?, map, short.unwrap_or(map)])
}

/// Rows of `n` gated ones of `w` from a gate to the next and to its up; zeros without gates.
fn gate_steps(args: &LaunchArgs<'_>, n: u32) -> (u32, u32) {
    args.gates.map_or((0, 0), |layout| layout.steps(n))
}

/// The kernel's parameters.
pub(super) fn encode_params(
    variant: Variant,
    program: &DeviceProgram,
    args: &LaunchArgs<'_>,
) -> Result<Params, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (numerics, world) = (problem.numerics(), problem.world());
    let maps = match variant.generation() {
        Generation::Hopper => encode_maps(variant, program, args)?,
        // It computes addresses itself, and other devices have no tensor maps.
        Generation::Portable | Generation::Ada => Maps::NONE,
    };
    let Maps { a_caller, a_gather, b, y, short_shards, of_op } = maps;
    let to_all = problem.op().sums_to() == SumsTo::All
        && p.rows.is_flattened()
        && !p.rows.has_two_exchanges();
    let scatter_mask = if to_all { distinct(&args.data[..world.index()]) } else { 0 };
    let [x, scale_x] = [Operand::X, Operand::ScaleX].map(|operand| args.operand(operand, 0));
    let (residual, residual_rows) =
        in_rows_of_items(p, args.operand(Operand::Residual, 0), args.result_rows);
    let (gate_step, up_offset) = gate_steps(args, problem.n_local(p.rank));
    Ok(Params {
        a_caller,
        a_gather,
        b,
        y,
        short_shards,
        op_maps: of_op,
        data: by_rank(args.data, world),
        pad: by_rank(args.pads, world),
        items: program.items(),
        awaits: program.awaits(),
        transfers: program.transfers(),
        control: args.control,
        fault: args.fault,
        half_stride: args.half_stride,
        deadline_ns: args.deadline_ns,
        x: x.address,
        x_row_bytes: x.row_bytes,
        scale_x: scale_x.address,
        scale_x_row_bytes: match numerics.scales {
            Scales::None | Scales::Tensor => 0,
            Scales::Row | Scales::Block => scale_x.row_bytes,
        },
        row_bytes: problem.gathered_row_bytes(),
        shard_slot_bytes: gather_place_bytes(problem),
        weights: weights(p, args),
        results_offset: p.results_offset(),
        split_k_offset: p.split_k_offset(),
        global_staging: program.global_staging(),
        residual: residual.address,
        residual_row_bytes: residual.row_bytes,
        scatter_buffer: args.scatter_buffer,
        rank: p.rank.get(),
        world: world.get(),
        item_count: program.computed_count(),
        residual_first: residual_rows.first,
        residual_rows: residual_rows.count,
        copy_count: program.copy_count(),
        transfer_count: if args.push { p.transfers.len() as u32 } else { 0 },
        slots_per_source: p.slots_per_source,
        await_pushed: u32::from(args.await_pushed),
        gap_ns: if problem.op().gathers() { args.pace.push_gap_ns } else { args.pace.send_gap_ns },
        // The kernel compares counts of stores with a sign.
        in_flight_limit: args.pace.in_flight_limit.min(i32::MAX as u32),
        m_shard: if scatter_mask != 0 { problem.m() } else { problem.m_shard() },
        full_shards: if scatter_mask != 0 { 1 } else { problem.full_shards() },
        own_rows: problem.shard_rows(p.rank).len() as u32,
        full_slots: if p.rows.is_flattened() { problem.full_shards() } else { u32::MAX },
        scatter_mask,
        gathered_scales: if problem.rows_carry_scales() {
            problem.k() * numerics.operand.bytes() as u32
        } else {
            0
        },
        k_local: problem.k_local(p.rank),
        activation: args.activation as u32,
        gate_step,
        up_offset,
        source_row_bytes: problem.n_local(p.rank) * numerics.partial_bytes() as u32,
        result_row_bytes: problem.n_local(p.rank) * numerics.output.bytes() as u32,
        push_together: u32::from(args.push && p.rows.is_flattened() && !p.transfers.is_empty()),
        in_mainloop: p.in_mainloop,
        in_mainloop_first: p.in_mainloop_steps().0,
        in_mainloop_gap: p.in_mainloop_steps().1,
        op_hash: args.op_hash,
        sequential: u32::from(args.sequential),
        constant_weights: u32::from(args.start == LaunchStart::WithWeights),
        box_rows: Extents::of(p).boxed(p.tile),
        padding: 0,
        item_stamps: args.trace.map_or(0, TraceBuffer::item_stamps),
        worker_stamps: args.trace.map_or(0, TraceBuffer::worker_stamps),
    })
}

/// The weights, each by the addresses of the items' column 0.
fn weights(p: &TileProgram, args: &LaunchArgs<'_>) -> [Weight; MAX_WEIGHTS] {
    let mut all = [Weight { start: u32::MAX, ..Weight::zeroed() }; MAX_WEIGHTS];
    for (number, (to, start)) in all.iter_mut().zip(p.weight_starts()).enumerate() {
        let [w, y, bias, scale] = [Operand::W, Operand::Y, Operand::Bias, Operand::ScaleW]
            .map(|operand| args.operand(operand, number));
        let (columns, bytes) = (u64::from(start), p.problem.numerics().output.bytes() as u64);
        let (scale_row_bytes, rows) = match p.problem.numerics().scales {
            Scales::None | Scales::Tensor => (0, 0),
            Scales::Row => (size_of::<f32>() as u64, columns),
            Scales::Block => (scale.row_bytes, columns / u64::from(SCALE_BLOCK)),
        };
        *to = Weight {
            w: w.address.wrapping_sub(columns * w.row_bytes),
            w_row_bytes: w.row_bytes,
            y: y.address.wrapping_sub(columns * bytes),
            y_row_bytes: y.row_bytes,
            bias: match bias.address {
                0 => 0,
                address => address.wrapping_sub(columns * bytes),
            },
            scale: scale.address.wrapping_sub(rows * scale_row_bytes),
            scale_row_bytes,
            start,
            padding: 0,
        };
    }
    all
}

/// An operand of the result's extents, with its rows numbered as items number those of `y`. In two
/// exchanges of a GEMM-AllReduce a rank finishes rows of its own shard, which are counted there.
fn in_rows_of_items(p: &TileProgram, all: Matrix, rows: ResultRows) -> (Matrix, ResultRows) {
    if all.address == 0
        || p.problem.op().sums_to() != SumsTo::All
        || p.rows.is_flattened() && !p.rows.has_two_exchanges()
    {
        return (all, rows);
    }
    let own = p.problem.shard_rows(p.rank);
    let address = all.address + u64::from(own.start) * all.row_bytes;
    (Matrix { address, ..all }, ResultRows { count: own.len() as u32, ..rows })
}

/// The ranks whose address no lower rank has, as a mask: where copies carry rows on, one outbox
/// stands for all peers.
fn distinct(addresses: &[u64]) -> u32 {
    let firsts = addresses
        .iter()
        .enumerate()
        .filter(|(rank, address)| !addresses[..*rank].contains(address));
    firsts.map(|(rank, _)| 1 << rank).sum()
}

/// The addresses in the kernel's array of fixed capacity.
fn by_rank(addresses: &[u64], world: WorldSize) -> [u64; MAX_WORLD] {
    let mut all = [0; MAX_WORLD];
    all[..world.index()].copy_from_slice(&addresses[..world.index()]);
    all
}
