//! Who pushes the own shard of an AllGather-GEMM over peer memory, where nobody says.
//!
//! Invariant: it is a choice of speed alone: readers see rows and signals, whoever brings them.

use super::TileProgram;
use super::heuristic::{MULTIPROCESSORS, OPERATIONS};
use crate::Problem;
use crate::layout::gather_place_bytes;
use crate::machine::Machine;
use std::time::Duration;

/// Shards of this size and more are left to copy engines: they disturb the GEMM less than the
/// kernel's own stores do, but take longer to begin. On 4 H200 and GPT-3's shapes the kernel is
/// faster with shards of 3 MB, and copy engines are from 6 MB on (results/tuning/push-*.json).
pub(super) const COPY_ENGINE_BYTES: u64 = 5 << 20;

impl TileProgram {
    /// Whether copy engines push the shard by default, rather than the kernel: a large one, unless
    /// it goes in slices of k whose copies, each of which takes some 5 us besides its bytes, would
    /// take more than two thirds of the multiplication. At TP 4, m = 1024 and GPT-3 36 of them take
    /// 236 us (results/timelines/middling-rows.txt), which is still as good; in 72 the call takes
    /// 0.55 ms instead of 0.42 (results/tuning/bands-begin.txt). Tiles that span shards are the
    /// kernel's to push, to the own rank too.
    pub fn is_for_copy_engines(&self) -> bool {
        let in_slices = self.transfers.iter().filter(|transfer| transfer.cols < self.problem.k_local()).count() as u64;
        !self.flattened && are_for_copy_engines(&self.problem, in_slices)
    }
}

/// The same of a shard that is cut into so many pieces for all peers together, if it comes in
/// slices of `k`, and none otherwise.
pub(super) fn are_for_copy_engines(problem: &Problem, in_slices: u64) -> bool {
    let bytes = if in_slices == 0 { 0 } else { u64::from(problem.world().peers()) * gather_place_bytes(problem) };
    let copying = Machine::H200.carrying(bytes) + Duration::from_nanos(in_slices * Machine::H200.copy_ns);
    let multiplying = Duration::from_nanos(problem.flop_per_rank() / (u64::from(MULTIPROCESSORS) * OPERATIONS));
    gather_place_bytes(problem) >= COPY_ENGINE_BYTES && 3 * copying <= 2 * multiplying
}

#[cfg(test)]
mod tests {
    use crate::program::{Schedule, TileProgram};
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn copy_engines_push_large_shards_in_few_copies() {
        let copied = |world, m, n, k| {
            let problem = Problem::new(OpKind::AllGatherGemm, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap();
            TileProgram::build(&problem, Rank::new(0), &Schedule::heuristic(&problem)).unwrap().is_for_copy_engines()
        };
        assert!(copied(4, 8192, 49152, 12288) && copied(8, 8192, 49152, 12288), "whole rows");
        assert!(!copied(4, 512, 49152, 12288) && !copied(8, 1024, 49152, 12288), "3 MiB");
        assert!(!copied(4, 256, 49152, 12288), "tiles span shards");
        assert!(copied(4, 1024, 49152, 12288), "36 copies in some 200 us, and the GEMM takes 380");
        assert!(!copied(8, 2048, 49152, 12288), "84 in 490, and the GEMM takes 380 too");
    }

    #[test]
    fn shards_of_just_so_many_bytes_are_for_copy_engines() {
        let copied = |rows: usize| {
            let problem = Problem::new(OpKind::AllGatherGemm, 4 * rows, 49152, 8192, DType::Bf16, WorldSize::new(4).unwrap()).unwrap();
            TileProgram::build(&problem, Rank::new(0), &Schedule::of(TileShape::new(128, 256, 64))).unwrap().is_for_copy_engines()
        };
        assert_eq!([319, 320].map(copied), [false, true], "5 MiB are 320 rows of 16 KiB");
    }
}
