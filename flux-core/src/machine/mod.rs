//! Rates and latencies of a machine, as the cost model and the simulator use them.
//!
//! Invariant: times round up to a nanosecond, so no rate is ever exceeded.

mod profiles;

use crate::DType;
use crate::tile::{Generation, SHARED_BYTES_PER_CYCLE};
use std::time::Duration;

/// A host of equal GPUs that reach each other's memory through a switch, or host memory only.
///
/// Rates are whole numbers, so that a simulation is the same on every computer. Sources of the
/// measured profiles' values; those of the others follow from data sheets:
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
    /// Words of the driver's name of the GPU that select the profile.
    pub gpu: &'static str,
    /// What connects the GPUs.
    pub wires: &'static str,
    /// Whether data is staged in host memory, as over
    /// [`Links::HostStaged`](crate::plan::Links::HostStaged): the simulator sends whole chunks by
    /// copy engines, at the links' rates in and out.
    pub host_staged: bool,
    /// Which kernel its GPUs run.
    pub generation: Generation,
    /// SMs; each is one worker.
    pub multiprocessors: u32,
    /// Operations of an SM in a cycle on 16-bit operands; a multiply and an add count as two. Other
    /// operands: [`rate_of`](Self::rate_of).
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
    /// This machine with `ranks` ranks that reach each other through host memory only.
    #[must_use]
    pub fn staged(self, ranks: u32) -> Self {
        let rate =
            self.staged_bytes_per_us.min(self.staged_total_bytes_per_us / u64::from(ranks.max(1)));
        Self { link_bytes_per_us: rate, both_ways_bytes_per_us: rate, ..self }
    }

    /// The profile of a GPU by the driver's name for it, with the driver's SM count. An unknown GPU
    /// gets the H100's rates.
    pub fn of_gpu(name: &str, multiprocessors: u32) -> Self {
        // Of several the one with the longest name, and of those the first.
        let known = Self::ALL
            .into_iter()
            .rev()
            .filter(|machine| machine.is_of(name))
            .max_by_key(|machine| machine.gpu.len());
        Self { multiprocessors: multiprocessors.max(1), ..known.unwrap_or(Self::H100) }
    }

    /// Whether the driver calls a GPU of this machine so.
    pub fn is_of(&self, name: &str) -> bool {
        let is_there = |wanted: &str| {
            name.split(|c: char| !c.is_ascii_alphanumeric())
                .any(|word| word.eq_ignore_ascii_case(wanted))
        };
        self.gpu.split(' ').all(is_there)
    }

    /// Time of a library's collective that moves so many bytes in and out of each rank.
    pub fn collective_time(&self, bytes: u64) -> Duration {
        Duration::from_nanos(self.message_ns).saturating_add(self.link_time(bytes, true))
    }

    /// This machine with the kernel of `generation`. A probe of mma.sync reaches 645 TFLOP/s on an
    /// H100, whose data sheet says 989 of wgmma.
    #[must_use]
    pub fn running(self, generation: Generation) -> Self {
        let ops_per_cycle = match (self.generation, generation) {
            (Generation::Hopper, Generation::Portable | Generation::Ada) => {
                self.ops_per_cycle * 645 / 989
            }
            _ => self.ops_per_cycle,
        };
        Self { generation, ops_per_cycle, ..self }
    }

    /// Bytes that pass through an SM's shared memory in a nanosecond.
    pub(crate) fn shared_bytes_per_ns(&self) -> f64 {
        SHARED_BYTES_PER_CYCLE as f64 * self.clock_mhz as f64 / 1000.0
    }

    /// Time in which so many bytes pass through an SM's shared memory.
    pub(crate) fn shared_time(&self, bytes: u128) -> Duration {
        time(bytes, SHARED_BYTES_PER_CYCLE * self.clock_mhz)
    }

    /// Operations of an SM in a cycle; a multiply and an add count as two.
    pub const fn rate_of(&self, operand: DType) -> u64 {
        self.ops_per_cycle.saturating_mul(operand.relative_rate())
    }

    /// Operations of one worker in a nanosecond.
    pub(crate) fn ops_per_ns(&self, operand: DType) -> f64 {
        self.rate_of(operand) as f64 * self.clock_mhz as f64 / 1000.0
    }

    /// Time of one worker for `ops` operations.
    pub(crate) fn multiply_time(&self, ops: u128, operand: DType) -> Duration {
        time(ops, self.rate_of(operand).saturating_mul(self.clock_mhz))
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
    pub(crate) fn push_overhead(&self, rows: u64, row_bytes: u64, ranks: u64) -> Duration {
        let rounds = rows
            .saturating_mul(row_bytes.div_ceil(PUSHED_BYTES))
            .div_ceil(self.multiprocessors.max(1).into());
        let in_rounds =
            self.push_round_ns.saturating_mul(rounds).saturating_mul(ranks.saturating_add(1));
        Duration::from_nanos(self.push_ns.saturating_add(in_rounds))
    }

    /// Time of `bytes` on a link.
    pub(crate) fn one_way_time(&self, bytes: u64) -> Duration {
        time(bytes.into(), self.link_bytes_per_us)
    }

    /// Time of `bytes` on a link whose other direction may be busy.
    pub(crate) fn link_time(&self, bytes: u64, both_ways: bool) -> Duration {
        time(
            bytes.into(),
            if both_ways { self.both_ways_bytes_per_us } else { self.link_bytes_per_us },
        )
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
        let machine = Machine {
            link_bytes_per_us: 1_000_000,
            ops_per_cycle: 2,
            clock_mhz: 500,
            ..Machine::H200
        };
        assert_eq!(
            [0, 1, 1000, 1001].map(|bytes| machine.one_way_time(bytes).as_nanos()),
            [0, 1, 1, 2]
        );
        assert_eq!(machine.multiply_time(5, DType::Bf16), Duration::from_nanos(5));
        assert_eq!(
            Machine { link_bytes_per_us: 0, ..machine }.one_way_time(2),
            Duration::from_micros(2),
            "slow, but it ends"
        );
    }
}
