//! How a launch is cut into CTAs, and how their traffic is spread.
//!
//! Invariant: it depends on the program alone, and on how many multiprocessors there are; results
//! do not depend on it.

use flux_core::layout::{gather_place_bytes, slot_bytes};
use flux_core::program::{TileProgram, sink};
use flux_kernels::cuda::Pace;

/// How much of the time that there is a paced transfer may take.
pub(super) const SPREAD_PERCENT: u32 = 40;

/// CTAs of a program's launches, on a device of so many multiprocessors, and the gaps in their
/// traffic, where a builder says nothing. A heuristic.
pub fn own_launch(program: &TileProgram, multiprocessors: u32) -> (u32, Pace) {
    let workers = with_a_tile(program, multiprocessors);
    (workers, pace(program, workers, SPREAD_PERCENT))
}

/// As many of the CTAs that run at once as have a tile. With more, for folds alone, tiles may share
/// a part of the device unevenly: reading the weights of few rows took a fifth longer on some GPUs.
pub(super) fn with_a_tile(program: &TileProgram, ctas: u32) -> u32 {
    let items = program.items.iter().filter(|item| item.sink != sink::REDUCE_ROWS).count();
    ctas.min(u32::try_from(items).unwrap_or(u32::MAX))
}

/// Gaps that spread a CTA's traffic over the time that its tiles take. Sent as they are finished,
/// the partial tiles of a wave meet on the link and hold up the loads of the next; a CTA's last has
/// no next and no gaps. What movers push is spread only where a shard is at least a wave of tiles:
/// sent late, the rows of a short call would be waited for.
pub(super) fn pace(program: &TileProgram, workers: u32, percent: u32) -> Pace {
    let problem = &program.problem;
    let tile = program.tile;
    // A multiprocessor does 4096 operations a cycle; 1.5 GHz is assumed, for a card at its power
    // limit. Only the gaps depend on it.
    let tile_ns = 2 * u64::from(tile.m) * u64::from(tile.n) * u64::from(problem.k_local()) / 6144;
    let tiles = program.items.len() as u64 / u64::from(problem.world().get());
    let workers = u64::from(workers);
    if problem.world().peers() == 0 {
        return Pace::default();
    }
    let gap = |ns: u64, pieces: u64| u32::try_from(ns * u64::from(percent) / 100 / pieces.max(1)).unwrap_or(u32::MAX);
    let shard_pieces = gather_place_bytes(problem) / u64::from(Pace::PUSHED_BYTES) / workers;
    Pace {
        push_gap_ns: if tiles < workers { 0 } else { gap(tile_ns * tiles / workers, shard_pieces) },
        send_gap_ns: gap(tile_ns, slot_bytes(problem, tile) / u64::from(Pace::SENT_BYTES)),
        in_flight_limit: 0,
    }
}

/// Bytes of tiles that are on their way to memory of the host at once. With half as many four H100
/// take up to 14 % longer, as CTAs wait for the host to take what they have stored; with two and a
/// half times as many 4 to 15 % longer of GPT-3, as more multiprocessors wait for it that should
/// load operands, and up to 9 % less of Llama (results/tuning/pcie-turns.txt).
const AT_ONCE: u32 = 1 << 20;

/// CTAs that scatter a tile to memory of the host at once. Of one wave of tiles all do, by all
/// threads of their consumers: nothing is left to multiply meanwhile.
pub(super) fn in_flight_limit(program: &TileProgram, workers: u32) -> u32 {
    let tiles = program.items.iter().filter(|item| item.sink == sink::SCATTER).count();
    let bytes = program.tile.m * program.tile.n * program.problem.dtype().bytes() as u32;
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
        let target = Target { links: Links::HostStaged, ..Target::peer_memory(flux_core::machine::Machine::H100, &problem) };
        let plan: Plan = plan.parse().unwrap();
        TileProgram::build(&problem, Rank::new(0), &plan.schedule(&problem, &target)).unwrap()
    }

    #[test]
    fn tiles_of_several_waves_have_an_in_flight_limit_and_those_of_one_have_none() {
        let limit = |m, plan| in_flight_limit(&staged(4, [m, 12288, 49152], plan), 132);
        assert_eq!(limit(256, "tile=128x128x64 rows=flattened chunk=1"), 32, "32 KiB each");
        assert_eq!(limit(256, "tile=128x96x64 rows=flattened chunk=1"), 43, "the last a part of it");
        assert_eq!(limit(128, "tile=128x128x64 rows=flattened chunk=1"), 0, "one wave");
        assert_eq!(limit(4096, "tile=128x256x64 chunk=32"), 0, "nothing is scattered");
    }

    #[test]
    fn there_are_no_more_ctas_than_tiles() {
        let few = staged(4, [64, 1024, 4096], "tile=64x128x64 rows=flattened chunk=1");
        let tiles = few.items.iter().filter(|item| item.sink == sink::SCATTER).count();
        assert!(tiles > 0 && few.items.len() > tiles, "reductions besides");
        assert_eq!(with_a_tile(&few, 132) as usize, tiles);
        assert_eq!(with_a_tile(&staged(4, [512, 12288, 49152], "tile=128x256x64 chunk=1"), 132), 132);
    }
}
