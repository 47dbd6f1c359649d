//! How a launch is cut into CTAs, and how their traffic is spread.
//!
//! Invariant: it depends on the program and the number of multiprocessors, and changes no result.

use flux_core::layout::{gather_place_bytes, slot_bytes};
use flux_core::program::{Sink, TileProgram};
use flux_kernels::cuda::Pace;

/// Percent of the time between tiles that a paced transfer may take.
pub(super) const SPREAD_PERCENT: u32 = 40;

/// CTAs of a program on a device of so many multiprocessors, and the gaps in their traffic over
/// peer memory.
pub fn launch_of(program: &TileProgram, multiprocessors: u32) -> (u32, Pace) {
    let workers = with_a_tile(program, multiprocessors);
    (workers, pace(program, workers, SPREAD_PERCENT))
}

/// As many of the CTAs that run at once as have a tile: with CTAs for reductions alone, tiles may
/// share parts of the device unevenly.
pub(super) fn with_a_tile(program: &TileProgram, ctas: u32) -> u32 {
    let items = program.computed().iter().filter(|item| item.sink != Sink::ReduceRows).count();
    ctas.min(u32::try_from(items).unwrap_or(u32::MAX))
}

/// Gaps that spread a CTA's traffic over the time that its tiles take. Without them partial tiles
/// of a wave meet on the link and hold up the loads of the next. What movers push is spread only
/// where a shard is at least a wave of tiles: a short call waits for its rows.
pub(super) fn pace(program: &TileProgram, workers: u32, percent: u32) -> Pace {
    let problem = &program.problem;
    let tile = program.tile;
    // 4096 operations a cycle of a multiprocessor, at 1.5 GHz: a card at its power limit.
    let tile_ns =
        2 * u64::from(tile.m) * u64::from(tile.n) * u64::from(problem.k_local(program.rank)) / 6144;
    let tiles = program.computed().len() as u64 / u64::from(problem.world().get());
    let workers = u64::from(workers);
    if problem.world().peers() == 0 {
        return Pace::default();
    }
    let gap = |ns: u64, pieces: u64| {
        u32::try_from(ns * u64::from(percent) / 100 / pieces.max(1)).unwrap_or(u32::MAX)
    };
    let shard_pieces = gather_place_bytes(problem) / u64::from(Pace::PUSHED_BYTES) / workers;
    Pace {
        push_gap_ns: if tiles < workers { 0 } else { gap(tile_ns * tiles / workers, shard_pieces) },
        send_gap_ns: gap(tile_ns, slot_bytes(problem, tile) / u64::from(Pace::SENT_BYTES)),
        in_flight_limit: 0,
    }
}

/// Bytes of tiles that are on their way to memory of the host at once. With fewer, CTAs wait for
/// the host; with more, CTAs wait that should load operands.
const AT_ONCE: u32 = 1 << 20;

/// CTAs that scatter a tile to memory of the host at once; 0 for all, where tiles are one wave and
/// nothing is left to multiply meanwhile. In fp32 at most half of a tile's rows leave at once, and
/// have no more bytes than the tile in the output's type.
pub(super) fn in_flight_limit(program: &TileProgram, workers: u32) -> u32 {
    let tiles = program.items.iter().filter(|item| item.sink == Sink::Scatter).count();
    let bytes = program.tile.m * program.tile.n * program.problem.numerics().output.bytes() as u32;
    if tiles as u64 <= u64::from(workers) { 0 } else { AT_ONCE.div_ceil(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::plan::{Links, Plan, Target};
    use flux_core::{DType, OpKind, Problem, Rank, WorldSize};

    /// A program of GEMM-ReduceScatter with peers' rows in host memory.
    fn staged(world: u32, [m, n, k]: [usize; 3], plan: &str) -> TileProgram {
        let world = WorldSize::new(world).unwrap();
        let problem = Problem::new(OpKind::GemmReduceScatter, m, n, k, DType::Bf16, world).unwrap();
        let target = Target {
            links: Links::HostStaged,
            ..Target::peer_memory(flux_core::machine::Machine::H100, &problem)
        };
        let plan: Plan = plan.parse().unwrap();
        TileProgram::build(&problem, Rank::new(0), &plan.schedule(&problem, &target)).unwrap()
    }

    #[test]
    fn tiles_of_several_waves_have_an_in_flight_limit_and_those_of_one_have_none() {
        let limit = |m, plan| in_flight_limit(&staged(4, [m, 12288, 49152], plan), 132);
        assert_eq!(limit(256, "tile=128x128x64 rows=flattened chunk=1"), 32, "32 KiB each");
        assert_eq!(
            limit(256, "tile=128x96x64 rows=flattened chunk=1"),
            43,
            "the last a part of it"
        );
        assert_eq!(limit(128, "tile=128x128x64 rows=flattened chunk=1"), 0, "one wave");
        assert_eq!(limit(4096, "tile=128x256x64 chunk=32"), 0, "nothing is scattered");
    }

    #[test]
    fn there_are_no_more_ctas_than_tiles() {
        let few = staged(4, [64, 1024, 4096], "tile=64x128x64 rows=flattened chunk=1");
        let tiles = few.items.iter().filter(|item| item.sink == Sink::Scatter).count();
        assert!(tiles > 0 && few.items.len() > tiles, "reductions besides");
        assert_eq!(with_a_tile(&few, 132) as usize, tiles);
        assert_eq!(
            with_a_tile(&staged(4, [512, 12288, 49152], "tile=128x256x64 chunk=1"), 132),
            132
        );
    }
}
