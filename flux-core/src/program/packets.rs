//! What travels in packets, and how much there is of it.
//!
//! Invariant: every rank packs what every other unpacks: both follow from the problem and the schedule alone.

use super::{Chunk, Schedule, ScheduleError, TileProgram};
use crate::layout::{gather_place_bytes, packet_lines, scatter_place_bytes};
use crate::tile::TileGrid;
use crate::{Nodes, OpKind, Problem};

/// Payload that a rank sends in packets before the rest of its shard: with its flags some 4 us of a link.
const LEAD_BYTES: u64 = 3 << 18;
/// Most columns of it. Their multiplication takes about as long as the next slice needs to come.
const LEAD_COLUMNS: u32 = 1024;
/// Least columns of it.
const LEAST_COLUMNS: u32 = 256;
/// Payload that a pad has packets for at most.
const MAX_BYTES: u64 = 1 << 28;

/// Steps along `k` of the slice that comes in packets (AllGather-GEMM); 0 where none does.
pub(super) fn lead_steps(problem: &Problem, schedule: &Schedule) -> u32 {
    if !schedule.packets || problem.world().peers() == 0 || problem.op() != OpKind::AllGatherGemm {
        return 0;
    }
    let readers = if schedule.stack { problem.world().peers() } else { schedule.band.min(problem.world().get()) - 1 };
    let column_bytes = gather_place_bytes(problem) / u64::from(problem.k_local()) * u64::from(readers.max(1));
    let most = u32::try_from(LEAD_BYTES / column_bytes.max(1)).unwrap_or(u32::MAX);
    most.clamp(LEAST_COLUMNS, LEAD_COLUMNS).div_ceil(schedule.tile.k)
}

/// Whether what the schedule asks for in packets can be.
pub(super) fn check(problem: &Problem, schedule: &Schedule, stacked: bool, nodes: Nodes) -> Result<(), ScheduleError> {
    if !schedule.packets || problem.world().peers() == 0 {
        return Ok(());
    }
    let row_blocks = TileGrid::of_shard(problem, schedule.tile).row_blocks();
    let whole = matches!(schedule.chunk, Chunk::Shard) || schedule.chunk_of(row_blocks) == row_blocks;
    let why = match problem.op() {
        _ if nodes.are_mixed() => "what crosses nodes travels in messages",
        OpKind::GemmReduceScatter if !stacked => "only scattered rows can, so set `stack` too",
        OpKind::AllGatherGemm if !stacked && schedule.band == 1 => {
            "a shard that is taken by itself is not waited for at the start: set `stack`, or a `band` of several"
        }
        OpKind::AllGatherGemm if !whole => "a packet is of a whole shard: announce whole ones",
        OpKind::GemmReduceScatter if scatter_place_bytes(problem).saturating_mul(u64::from(problem.world().get())) > MAX_BYTES => {
            "they are for few rows"
        }
        OpKind::AllGatherGemm if gather_place_bytes(problem).saturating_mul(u64::from(problem.world().get())) > MAX_BYTES => {
            "they are for few rows"
        }
        _ => return Ok(()),
    };
    Err(ScheduleError::Packets { why })
}

impl Schedule {
    /// Whether `problem` can be built with [`packets`](Self::packets), this schedule's other choices being as they are.
    ///
    /// ```
    /// use flux_core::program::Schedule;
    /// use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};
    /// let p = Problem::new(OpKind::GemmReduceScatter, 64, 4096, 4096, DType::Bf16, WorldSize::new(4).unwrap())?;
    /// let apart = Schedule::of(TileShape::new(64, 128, 64));
    /// assert!(!apart.can_pack(&p) && Schedule { stack: true, ..apart }.can_pack(&p));
    /// # Ok::<(), flux_core::ProblemError>(())
    /// ```
    pub fn can_pack(&self, problem: &Problem) -> bool {
        let asked = Self { packets: true, ..*self };
        check(problem, &asked, self.stack && problem.world().peers() > 0, Nodes::apart(problem.world())).is_ok()
    }
}

impl TileProgram {
    /// Bytes of payload that one rank sends another in packets: of AllGather-GEMM the rows and columns of the first transfer, of GEMM-ReduceScatter the
    /// rows that it scatters to one owner. At the reader, each source has as much, in rank order.
    pub fn packet_bytes(&self) -> u64 {
        match self.transfers.first() {
            Some(lead) if !self.arrivals.is_empty() => u64::from(lead.rows) * u64::from(lead.cols) * self.problem.dtype().bytes() as u64,
            _ if self.packed_rows => scatter_place_bytes(&self.problem),
            _ => 0,
        }
    }

    /// Signals whose lines hold the packets, from signal [`signals`](Self::signals) on.
    pub(super) fn packet_lines(&self) -> u64 {
        packet_lines(self.packet_bytes().saturating_mul(u64::from(self.problem.world().get())))
    }
}
