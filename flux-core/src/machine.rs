//! Rates and latencies of a machine, as the cost model and the simulator use them.
//!
//! Invariant: times round up to a nanosecond, so no rate is ever exceeded.

use crate::tile::Generation;
use std::time::Duration;

/// A host of equal GPUs that reach each other's memory through a switch, or host memory only.
///
/// Rates are whole numbers, so that a simulation is the same on every computer. Sources of the
/// values:
///
/// - Data sheet, dense 16-bit operands: `multiprocessors`, `ops_per_cycle`.
/// - results/h200-x4-nvlink.json: `clock_mhz`, `memory_bytes_per_us`, `begin_ns`, `end_ns`,
///   `tile_ns`, `add_bytes_per_us`.
/// - 51 bytes a cycle and SM, not probed: `l2_bytes_per_us`.
/// - Probe in results/h200-x4-links.txt and h100-x2-links.txt: `link_bytes_per_us`,
///   `both_ways_bytes_per_us`, `signal_ns`, `copy_ns`, `staged_bytes_per_us`.
/// - results/h100-x4-links.txt, between one way and both ways: `staged_total_bytes_per_us`.
/// - results/timed-plans.csv, slices of AllGather-GEMM: `push_begins_ns`, `push_ns`,
///   `push_round_ns`, `copy_begins_ns`.
/// - NCCL's collectives in results/h200-x4-nccl.json: `message_ns`, `message_bytes_per_us`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Name of the profile.
    pub name: &'static str,
    /// Word of the driver's GPU names that selects the profile.
    pub gpu: &'static str,
    /// Whether the simulator sends through host memory: whole chunks, by copy engines, at the
    /// links' rates in and out.
    pub through_host: bool,
    /// Which kernel its GPUs run.
    pub generation: Generation,
    /// SMs; each is one worker.
    pub multiprocessors: u32,
    /// Operations of an SM in a cycle; a multiply and an add count as two.
    pub ops_per_cycle: u64,
    /// Clock during GEMMs, in MHz.
    pub clock_mhz: u64,
    /// Reads of device memory by all SMs, in bytes per microsecond.
    pub memory_bytes_per_us: u64,
    /// Reads of L2 by all SMs, in bytes per microsecond.
    pub l2_bytes_per_us: u64,
    /// A rank's link in one direction, in bytes per microsecond.
    pub link_bytes_per_us: u64,
    /// The same while the other direction is busy.
    pub both_ways_bytes_per_us: u64,
    /// Nanoseconds from the last byte of a message until a worker sees its signal.
    pub signal_ns: u64,
    /// Nanoseconds from the begin of a call until its workers begin.
    pub begin_ns: u64,
    /// Nanoseconds from the last work of a rank until the call has ended there.
    pub end_ns: u64,
    /// Fixed nanoseconds of a tile: filling the pipeline and storing the result.
    pub tile_ns: u64,
    /// Addition of partial results by one worker, in bytes per microsecond.
    pub add_bytes_per_us: u64,
    /// Nanoseconds from the begin of a call until the kernel pushes its first rows.
    pub push_begins_ns: u64,
    /// Fixed nanoseconds of a piece that the kernel pushes: CTAs fence and count their stores.
    pub push_ns: u64,
    /// Nanoseconds of a round of pushes: each CTA loads, or stores to one rank, one warp's bytes of
    /// a row.
    pub push_round_ns: u64,
    /// Nanoseconds from the begin of a call until copy engines begin.
    pub copy_begins_ns: u64,
    /// Fixed nanoseconds of a copy.
    pub copy_ns: u64,
    /// Fixed nanoseconds of a library collective, or of a group of messages.
    pub message_ns: u64,
    /// Bytes that one SM carries for library messages in a microsecond.
    pub message_bytes_per_us: u64,
    /// A rank's path through host memory in each direction, both busy, in bytes per microsecond.
    pub staged_bytes_per_us: u64,
    /// The same for all ranks of a host together.
    pub staged_total_bytes_per_us: u64,
}

/// Bytes of a row that a warp of the kernel's mover pushes in a round.
pub const PUSHED_BYTES: u64 = 2048;

impl Machine {
    /// H200 (SXM) on one switch.
    pub const H200: Self = Self {
        name: "H200",
        gpu: "H200",
        through_host: false,
        generation: Generation::Hopper,
        multiprocessors: 132,
        ops_per_cycle: 4096,
        clock_mhz: 1460,
        memory_bytes_per_us: 4_250_000,
        l2_bytes_per_us: 9_830_000,
        link_bytes_per_us: 370_000,
        both_ways_bytes_per_us: 370_000,
        signal_ns: 1140,
        begin_ns: 3500,
        end_ns: 7500,
        tile_ns: 2000,
        add_bytes_per_us: 80_000,
        push_begins_ns: 2000,
        push_ns: 2700,
        push_round_ns: 400,
        copy_begins_ns: 15_000,
        copy_ns: 4400,
        message_ns: 30_000,
        message_bytes_per_us: 17_000,
        staged_bytes_per_us: 34_000,
        staged_total_bytes_per_us: 104_000,
    };

    /// H100 (SXM) on one switch: an H200 with the memory rate of its data sheet, scaled as the
    /// H200's.
    pub const H100: Self = Self { name: "H100", gpu: "H100", memory_bytes_per_us: 2_966_000, ..Self::H200 };

    /// H800, from its data sheet: an H100 with 400 GB/s of NVLink for 900, scaled as the H200's. No
    /// record measures it.
    pub const H800: Self = Self { name: "H800", gpu: "H800", link_bytes_per_us: 164_000, both_ways_bytes_per_us: 164_000, ..Self::H100 };

    /// Two H100 that reach host memory only (results/h100-x2-links.txt). They wait more than over
    /// NVLink, so the clock is higher (results/h100-x2-pcie.json).
    pub const H100_PAIR_BY_HOST: Self = Self {
        name: "H100-pair-by-host",
        through_host: true,
        link_bytes_per_us: 54_000,
        both_ways_bytes_per_us: 34_000,
        copy_ns: 0,
        clock_mhz: 1540,
        ..Self::H100
    };

    /// All profiles.
    pub const ALL: [Self; 4] = [Self::H200, Self::H100, Self::H100_PAIR_BY_HOST, Self::H800];

    /// This machine with `ranks` ranks that reach each other through host memory only.
    #[must_use]
    pub fn staged(self, ranks: u32) -> Self {
        let rate = self.staged_bytes_per_us.min(self.staged_total_bytes_per_us / u64::from(ranks.max(1)));
        Self { link_bytes_per_us: rate, both_ways_bytes_per_us: rate, ..self }
    }

    /// The profile of a GPU by the driver's name for it, with the driver's SM count. An unknown GPU
    /// gets the H100's rates.
    pub fn of_gpu(name: &str, multiprocessors: u32) -> Self {
        let known = [Self::H200, Self::H800, Self::H100].into_iter().find(|machine| name.contains(machine.gpu));
        Self { multiprocessors: multiprocessors.max(1), ..known.unwrap_or(Self::H100) }
    }

    /// This machine with the kernel of `generation`. A probe of mma.sync reaches 645 TFLOP/s on an
    /// H100, whose data sheet says 989 of wgmma.
    #[must_use]
    pub fn running(self, generation: Generation) -> Self {
        let ops_per_cycle = match (self.generation, generation) {
            (Generation::Hopper, Generation::Portable) => self.ops_per_cycle * 645 / 989,
            _ => self.ops_per_cycle,
        };
        Self { generation, ops_per_cycle, ..self }
    }

    /// Whether committed records confirm the profile.
    pub fn is_measured(&self) -> bool {
        [Self::H200, Self::H100, Self::H100_PAIR_BY_HOST].contains(self)
    }

    /// Operations of one worker in a nanosecond.
    pub(crate) fn ops_per_ns(&self) -> f64 {
        self.ops_per_cycle as f64 * self.clock_mhz as f64 / 1000.0
    }

    /// Time of one worker for `ops` operations.
    pub(crate) fn multiply_time(&self, ops: u128) -> Duration {
        time(ops, self.ops_per_cycle.saturating_mul(self.clock_mhz))
    }

    /// Time in which all workers of a rank read `bytes` of memory.
    pub(crate) fn read_time(&self, bytes: u128) -> Duration {
        time(bytes, self.memory_bytes_per_us)
    }

    /// Time of a worker to add `bytes`.
    pub(crate) fn add_time(&self, bytes: u64) -> Duration {
        time(bytes.into(), self.add_bytes_per_us)
    }

    /// Time of a pushed piece of `rows` by `row_bytes` to `ranks` ranks, besides the link's.
    pub(crate) fn push_overhead(&self, (rows, row_bytes): (u64, u64), ranks: u64) -> Duration {
        let rounds = rows.saturating_mul(row_bytes.div_ceil(PUSHED_BYTES)).div_ceil(self.multiprocessors.max(1).into());
        let in_rounds = self.push_round_ns.saturating_mul(rounds).saturating_mul(ranks.saturating_add(1));
        Duration::from_nanos(self.push_ns.saturating_add(in_rounds))
    }

    /// Time of `bytes` on a link.
    pub(crate) fn one_way_time(&self, bytes: u64) -> Duration {
        time(bytes.into(), self.link_bytes_per_us)
    }

    /// Time of `bytes` on a link whose other direction may be busy.
    pub(crate) fn link_time(&self, bytes: u64, both_ways: bool) -> Duration {
        time(bytes.into(), if both_ways { self.both_ways_bytes_per_us } else { self.link_bytes_per_us })
    }
}

/// Time of an `amount` at a rate per microsecond, at least 1.
fn time(amount: u128, per_us: u64) -> Duration {
    let nanoseconds = amount.saturating_mul(1000).div_ceil(u128::from(per_us.max(1)));
    // A century stands for forever, and leaves room for sums.
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX).min(1 << 61))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up() {
        let machine = Machine { link_bytes_per_us: 1_000_000, ops_per_cycle: 2, clock_mhz: 500, ..Machine::H200 };
        assert_eq!([0, 1, 1000, 1001].map(|bytes| machine.one_way_time(bytes).as_nanos()), [0, 1, 1, 2]);
        assert_eq!(machine.multiply_time(5), Duration::from_nanos(5));
        assert_eq!(Machine { link_bytes_per_us: 0, ..machine }.one_way_time(2), Duration::from_micros(2), "slow, but it ends");
    }
}
