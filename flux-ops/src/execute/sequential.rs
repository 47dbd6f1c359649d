//! Sequential calls: one collective of the transport's library, and one GEMM of a world of one.
//!
//! Invariant: the rows of all ranks lie in the own data region, dense and in rank order, behind the
//! split-K workspace of the GEMM. An AllGather fills them and the GEMM reads them; or the GEMM
//! writes them, and a ReduceScatter or an AllReduce sums them over the ranks.

use crate::error::BuildError;
use flux_core::layout::{SPLIT_K_ALIGN, WorkspaceSize};
use flux_core::program::{Schedule, TileProgram};
use flux_core::{DType, OpKind, Problem, Rank, SumsTo, WorldSize};
use flux_kernels::cuda::Matrix;
use flux_kernels::{Extent, Operand, Presence};
use flux_transport::{CollectiveKind, Epoch, LibraryCollective, WorkspaceView};
use std::fmt;

/// The collective of an op's sequential calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequential {
    pub(super) kind: CollectiveKind,
    dtype: DType,
    /// Rows of the caller's operand: a shard's, or all for an AllReduce.
    rows: u64,
    /// Bytes of a row.
    row_bytes: u64,
    /// Bytes of the rows of all ranks.
    bytes: u64,
    /// Bytes from the start of a half to them.
    offset: u64,
}

impl Sequential {
    /// The collective of `problem`, and the program of `rank`'s GEMM: all rows of its columns from
    /// all of `k`, or `[m, n]` from its part of `k`.
    pub(super) fn new(
        problem: &Problem,
        rank: Rank,
        schedule: &Schedule,
    ) -> Result<(Self, TileProgram), BuildError> {
        let dtype = problem.collective_dtype();
        let sums = u64::from(problem.n()) * dtype.bytes() as u64;
        let (kind, row_bytes) = match problem.op().sums_to() {
            SumsTo::Nothing => (CollectiveKind::AllGather, problem.gathered_row_bytes()),
            SumsTo::Rows => (CollectiveKind::ReduceScatter, sums),
            SumsTo::All => (CollectiveKind::AllReduce, sums),
        };
        let mut program = gemm(problem, rank, schedule)?;
        // Ranks with fewer columns or a shorter inner product may have other split-K slots, but all
        // take the same workspace. Each rank is like the first or the last.
        let last = Rank::new(problem.world().peers());
        for other in [Rank::new(0), last]
            .into_iter()
            .filter(|&other| problem.w_shape(other) != problem.w_shape(rank))
        {
            let other = gemm(problem, other, schedule)?;
            program.split_k_slots = program.split_k_slots.max(other.split_k_slots);
            program.signals = program.signals.max(other.signals);
        }
        let rows = if kind == CollectiveKind::AllReduce { problem.m() } else { problem.m_shard() };
        let (rows, bytes) = (u64::from(rows), u64::from(problem.m()) * row_bytes);
        let offset = program.workspace().half_bytes.next_multiple_of(SPLIT_K_ALIGN);
        Ok((Self { kind, dtype, rows, row_bytes, bytes, offset }, program))
    }

    /// What calls need of the workspace whose programs need `of_programs`.
    pub(super) const fn workspace(&self, of_programs: WorkspaceSize) -> WorkspaceSize {
        let offset = of_programs.half_bytes.next_multiple_of(SPLIT_K_ALIGN);
        WorkspaceSize { half_bytes: offset.saturating_add(self.bytes), ..of_programs }
    }

    /// The rows of all ranks in call `epoch`, as the GEMM reads or writes them.
    pub(super) fn all_rows(&self, memory: &WorkspaceView, rank: Rank, epoch: Epoch) -> Matrix {
        let half = memory.data[rank.index()] + epoch.half() as u64 * memory.size.half_stride();
        Matrix { address: half + self.offset, row_bytes: self.row_bytes }
    }

    /// Bytes from the start of a half to the rows of all ranks.
    pub(super) const fn offset(&self) -> u64 {
        self.offset
    }

    /// The collective of a call of the op with number `op`, of the caller's rows.
    pub(super) fn collective(&self, shard: Matrix, op: u32) -> LibraryCollective {
        let Self { kind, dtype, rows, row_bytes, offset, .. } = *self;
        LibraryCollective {
            kind,
            shard: shard.address,
            row_stride: shard.row_bytes,
            row_bytes,
            rows,
            offset,
            dtype,
            op,
        }
    }

    /// Whether this rank's GEMM reads the operand. What is added to a sum over the ranks is read
    /// once for each of its rows: by the rank that has the row, or by one that has all.
    pub(super) fn reads(&self, operand: Operand, rank: Rank) -> bool {
        let has_rows = operand.extent() == Extent::Result;
        match (operand.presence(), self.kind) {
            (Presence::Always | Presence::Scales, _) | (_, CollectiveKind::AllGather) => true,
            (Presence::Option, CollectiveKind::ReduceScatter) => has_rows || rank.get() == 0,
            (Presence::Option, CollectiveKind::AllReduce) => rank.get() == 0,
            // Other kernels read them.
            (Presence::Norm | Presence::NormScale | Presence::NormScales | Presence::Wanted, _) => {
                false
            }
        }
    }

    /// The row, of those that this rank's GEMM stores, with the first of a residual.
    pub(super) fn first_row(&self, problem: &Problem, rank: Rank) -> u32 {
        match self.kind {
            CollectiveKind::ReduceScatter => problem.shard_rows(rank).start,
            CollectiveKind::AllGather | CollectiveKind::AllReduce => 0,
        }
    }
}

/// The program of `rank`'s GEMM, as that of a world of one.
fn gemm(problem: &Problem, rank: Rank, schedule: &Schedule) -> Result<TileProgram, BuildError> {
    let [m, n, k] =
        [problem.m(), problem.n_local(rank), problem.k_local(rank)].map(|extent| extent as usize);
    // The kernels of sums add residuals.
    let op = if problem.op().reduces() { OpKind::GemmReduceScatter } else { OpKind::AllGatherGemm };
    let weights: Vec<_> = (0..problem.weight_count())
        .map(|weight| problem.weight_columns(weight, rank).len() as u32)
        .collect();
    let gemm =
        Problem::new(op, m, n, k, problem.numerics(), WorldSize::ONE)?.with_weights(&weights)?;
    let Schedule { tile, raster_group, split_k, stream_k_workers, .. } = *schedule;
    Ok(TileProgram::build(
        &gemm,
        Rank::new(0),
        &Schedule { raster_group, split_k, stream_k_workers, ..Schedule::of(tile) },
    )?)
}

impl fmt::Display for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            CollectiveKind::AllGather => "NCCL's AllGather before the kernel",
            CollectiveKind::ReduceScatter => "NCCL's ReduceScatter after the kernel",
            CollectiveKind::AllReduce => "NCCL's AllReduce after the kernel",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::TileShape;
    use flux_core::layout::RowLayout;
    use flux_core::problem::Shape;
    use flux_core::program::check;

    const TILE: TileShape = TileShape::new(128, 128, 64);

    fn problem(op: OpKind, world: u32) -> Problem {
        let world = WorldSize::new(world).unwrap();
        let w = world.index();
        Problem::new(op, 129 * w, 328 * w, 456 * w, DType::F16, world).unwrap()
    }

    #[test]
    fn the_gemm_is_that_of_one_rank_and_reads_or_writes_all_rows() {
        for world in [2, 3, 8] {
            let [ag, rs] =
                [OpKind::AllGatherGemm, OpKind::GemmReduceScatter].map(|op| problem(op, world));
            let schedule = Schedule {
                split_k: 3,
                group: 2,
                rows: RowLayout::Flattened,
                k_slices: 2,
                ..Schedule::of(TILE)
            };
            for (p, x_cols, gathered_cols) in [(ag, ag.k(), ag.k()), (rs, rs.k() / world, rs.n())] {
                let (sequential, program) = Sequential::new(&p, Rank::new(0), &schedule).unwrap();
                assert_eq!(
                    program.problem.x_shape(Rank::new(0)),
                    Shape { rows: p.m(), cols: x_cols }
                );
                assert_eq!(program.problem.w_shape(Rank::new(0)), p.w_shape(Rank::new(0)));
                assert_eq!(
                    program.problem.y_shape(Rank::new(0)),
                    Shape { rows: p.m(), cols: p.n_shard() }
                );
                check::verify(std::slice::from_ref(&program)).unwrap();
                assert!(program.split_k_slots > 0 && program.transfers.is_empty(), "{p}");
                let bytes = u64::from(p.m()) * u64::from(gathered_cols) * 2;
                assert_eq!(
                    (sequential.row_bytes, sequential.rows, sequential.bytes),
                    (u64::from(gathered_cols) * 2, 129, bytes)
                );
                let size = sequential.workspace(program.workspace());
                assert!(
                    sequential.offset >= program.workspace().half_bytes
                        && size.half_bytes == sequential.offset + bytes
                );
                assert!(sequential.offset.is_multiple_of(SPLIT_K_ALIGN));
            }
        }
    }

    /// The last of three ranks has 8 columns or elements of k less, and so fewer tiles or parts.
    #[test]
    fn ranks_whose_extents_differ_take_the_same_workspace() {
        let world = WorldSize::new(3).unwrap();
        for (op, n, k) in [
            (OpKind::AllGatherGemm, 3 * 128 + 8, 456),
            (OpKind::GemmReduceScatter, 328, 3 * 64 + 8),
        ] {
            let p = Problem::new(op, 387, n, k, DType::F16, world).unwrap();
            for schedule in [
                Schedule { split_k: 2, ..Schedule::of(TILE) },
                Schedule { stream_k_workers: 10, ..Schedule::of(TILE) },
            ] {
                let of = |rank| Sequential::new(&p, rank, &schedule).unwrap();
                let all: Vec<_> = world.ranks().map(of).collect();
                let sizes: Vec<_> = all
                    .iter()
                    .map(|(sequential, program)| sequential.workspace(program.workspace()))
                    .collect();
                assert!(sizes.windows(2).all(|pair| pair[0] == pair[1]), "{sizes:?}");
                for (rank, (_, program)) in world.ranks().zip(&all) {
                    assert_eq!(program.problem.w_shape(Rank::new(0)), p.w_shape(rank));
                    check::verify(std::slice::from_ref(program)).unwrap();
                }
            }
        }
    }

    #[test]
    fn without_split_k_the_rows_begin_the_half_of_the_call() {
        let p = problem(OpKind::GemmReduceScatter, 4);
        let (sequential, program) = Sequential::new(&p, Rank::new(2), &Schedule::of(TILE)).unwrap();
        let size = sequential.workspace(program.workspace());
        let memory = WorkspaceView {
            data: vec![1 << 40, 2 << 40, 3 << 40, 4 << 40],
            size,
            ..WorkspaceView::default()
        };
        let address = |epoch| sequential.all_rows(&memory, Rank::new(2), Epoch::new(epoch)).address;
        assert_eq!([address(4), address(7)], [3 << 40, (3 << 40) + size.half_stride()]);
        let shard = Matrix { address: 4096, row_bytes: 3008 };
        let collective = sequential.collective(shard, 9);
        assert_eq!(
            (collective.shard, collective.row_stride, collective.row_bytes),
            (4096, 3008, 328 * 4 * 2)
        );
        assert_eq!((collective.rows, collective.offset, collective.op), (129, 0, 9));
    }

    #[test]
    fn a_sum_over_ranks_has_each_operand_once() {
        let reading = |op, operand| {
            let (sequential, _) =
                Sequential::new(&problem(op, 4), Rank::new(0), &Schedule::of(TILE)).unwrap();
            (0..4).filter(|&rank| sequential.reads(operand, Rank::new(rank))).count()
        };
        let [ag, rs, ar] = OpKind::ALL;
        assert_eq!([ag, rs, ar].map(|op| reading(op, Operand::Bias)), [4, 1, 1]);
        // Each rank of a ReduceScatter has rows of its own.
        assert_eq!([rs, ar].map(|op| reading(op, Operand::Residual)), [4, 1]);
        assert_eq!([ag, rs, ar].map(|op| reading(op, Operand::W)), [4; 3]);
    }
}
