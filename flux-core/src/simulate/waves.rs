//! Memory reads of a wave of workers.
//!
//! Invariant: a wave reads each block of `x` and `w` once a step, since its workers keep in step
//! and share L2.

use crate::program::{Sink, TileProgram, WorkItem};
use std::collections::BTreeSet;

/// By item: bytes that its wave reads in a step along `k`.
pub(super) fn read_by_step(program: &TileProgram, workers: usize) -> Vec<u64> {
    let waves = program.items.chunks(workers.max(1));
    waves.flat_map(|wave| std::iter::repeat_n(of_wave(program, wave), wave.len())).collect()
}

fn of_wave(program: &TileProgram, wave: &[WorkItem]) -> u64 {
    let tiles =
        || wave.iter().filter(|item| item.sink != Sink::ReduceRows && item.sink != Sink::Copy);
    // Items that share a tile's `k` read different columns of the same rows.
    let x: BTreeSet<_> = tiles()
        .map(|item| (item.k_first, item.a_source, item.a_outer, item.row, item.rows))
        .collect();
    let w: BTreeSet<_> = tiles().map(|item| (item.k_first, item.col, item.cols)).collect();
    let rows = x
        .iter()
        .map(|&(.., rows)| u64::from(rows))
        .chain(w.iter().map(|&(.., cols)| u64::from(cols)))
        .sum::<u64>();
    rows.saturating_mul(u64::from(program.tile.k))
        .saturating_mul(program.problem.numerics().operand.bytes() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Schedule;
    use crate::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn a_block_that_two_tiles_of_a_wave_read_is_read_once() {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            256,
            384,
            128,
            DType::Bf16,
            WorldSize::new(1).unwrap(),
        )
        .unwrap();
        let schedule = Schedule::of(TileShape::new(128, 128, 64));
        let read = |schedule, workers| {
            read_by_step(&TileProgram::build(&problem, Rank::new(0), schedule).unwrap(), workers)
        };
        let block = 128 * 64 * 2;
        // Rows fastest: both row blocks of a column, then those of the next.
        assert_eq!(
            read(&schedule, 4),
            [4 * block, 4 * block, 4 * block, 4 * block, 3 * block, 3 * block]
        );
        assert_eq!(read(&schedule, 1), [2 * block; 6]);
        assert_eq!(
            read(&Schedule { split_k: 2, ..schedule }, 2),
            [4 * block; 12],
            "two parts of a tile share nothing"
        );
    }
}
