//! What a machine does in how much time, as far as a call depends on it.
//!
//! Invariant: every amount takes a time that is rounded up to a nanosecond, so no rate is ever
//! exceeded.

use std::time::Duration;

/// A host of equal GPUs that reach each other's memory through a switch, or that of the host alone.
///
/// Rates are whole numbers, so that a simulation is the same on every computer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// What it is called here.
    pub name: &'static str,
    /// The word by which the driver's names of the GPU say which it is.
    pub gpu: &'static str,
    /// Whether what is for others goes through memory of the host, into and out of it at the rate
    /// of the links: it goes on when all of a message is there, rows go into it once whoever reads
    /// them, and copy engines carry it.
    pub through_host: bool,
    /// Multiprocessors, each of which is one worker.
    pub multiprocessors: u32,
    /// Operations of a multiprocessor in a cycle: a multiplication and an addition are two.
    pub ops_per_cycle: u64,
    /// Millions of cycles in a second while tiles are multiplied.
    pub clock_mhz: u64,
    /// Bytes that all workers of a rank together read of its memory in a microsecond.
    pub memory_bytes_per_us: u64,
    /// Bytes that all workers of a rank together read of its L2 cache in a microsecond.
    pub l2_bytes_per_us: u64,
    /// Bytes that a rank's link carries in a microsecond, out and in alike.
    pub link_bytes_per_us: u64,
    /// The same while it carries the other way too.
    pub both_ways_bytes_per_us: u64,
    /// Nanoseconds from the last byte of a message to a worker that has seen its signal.
    pub signal_ns: u64,
    /// Nanoseconds from the begin of a call until its workers begin.
    pub begin_ns: u64,
    /// Nanoseconds from when a rank has done its part of the call until the call has ended there.
    pub end_ns: u64,
    /// Nanoseconds that a tile takes besides its steps: filling the pipeline and leaving the
    /// result.
    pub tile_ns: u64,
    /// Bytes of partial results that a worker adds in a microsecond.
    pub add_bytes_per_us: u64,
    /// Nanoseconds from the begin of a call until the kernel pushes its first rows.
    pub push_begins_ns: u64,
    /// Nanoseconds that a piece of a shard takes besides its bytes which the kernel pushes: each
    /// CTA orders what it has stored before it is counted, and only then goes on to the next piece.
    pub push_ns: u64,
    /// Nanoseconds in which each CTA loads, or stores to one rank, a round of a piece: as much of a
    /// row as a warp moves at a time, one after another.
    pub push_round_ns: u64,
    /// Nanoseconds from the begin of a call until a copy engine does.
    pub copy_begins_ns: u64,
    /// Nanoseconds that each copy of a copy engine takes besides its bytes.
    pub copy_ns: u64,
    /// Nanoseconds that a collective, or a group of messages, of a library takes besides its bytes.
    pub message_ns: u64,
    /// Bytes that an SM carries in a microsecond for a message of a library.
    pub message_bytes_per_us: u64,
    /// Bytes that a rank's way through host memory carries in a microsecond in each direction, while
    /// as many go the other way.
    pub staged_bytes_per_us: u64,
    /// The same of all ranks of a host together.
    pub staged_total_bytes_per_us: u64,
}

/// Bytes of a row that a warp pushes at a time: `kPieceBytes` of
/// `flux-kernels/cuda/core/mover.cuh`.
const PUSHED_BYTES: u64 = 2048;

impl Machine {
    /// H200 on one switch.
    ///
    /// | field | from |
    /// |---|---|
    /// | `multiprocessors`, `ops_per_cycle` | the GPU, with 16-bit operands and no sparsity |
    /// | `link_bytes_per_us` | results/h200-x4-links.txt: 364 to 378 GB/s where all ranks send at once |
    /// | `signal_ns` | the same: half of a round trip |
    /// | `copy_ns` | results/h200-x4-links.txt: copies of 64 KiB to 4 MiB take 5 us besides their bytes, less in a row |
    /// | `push_begins_ns`, `copy_begins_ns` | docs/experiments.md: first rows are there after 8 to 12 us by the kernel, 19 by copy engines, less a slice of 1 MiB on its way |
    /// | `push_ns`, `push_round_ns` | results/timed-plans.csv, slices of AllGather-GEMM: each piece costs a load and a store by every CTA |
    /// | `clock_mhz`, `memory_bytes_per_us`, `begin_ns`, `end_ns`, `tile_ns`, `add_bytes_per_us` | results/h200-x4-nvlink.json of commit 668cd2b |
    pub const H200: Self = Self {
        name: "H200",
        gpu: "H200",
        through_host: false,
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

    /// H800, **which was not measured**: an H200 with the links and the memory that its data sheet
    /// says, 400 GB/s where an H200's says 900, and 3.35 TB/s where it says 4.8, both scaled by
    /// what is reached of the H200's. All else is as of [`H200`](Self::H200).
    pub const H800: Self = Self {
        name: "H800",
        gpu: "H800",
        link_bytes_per_us: 164_000,
        both_ways_bytes_per_us: 164_000,
        memory_bytes_per_us: 2_966_000,
        ..Self::H200
    };

    /// H100 (SXM) on one switch: an H200 whose memory gives 2.97 TB/s, as an
    /// [`H800`](Self::H800)'s. Held against results/h100-x2-nvlink.json and h100-x4-nvlink.json.
    pub const H100: Self = Self { name: "H100", gpu: "H100", memory_bytes_per_us: 2_966_000, ..Self::H200 };

    /// Two of these that reach memory of the host alone: 54 GB/s one way and 34 each way, where
    /// both GPUs copy (results/h100-x2-links.txt). Cards rest longer there than between links, so
    /// the clock is higher (results/h100-x2-pcie.json of commit af866aa). More GPUs share the host.
    pub const H100_PAIR_BY_HOST: Self = Self {
        name: "H100-pair-by-host",
        through_host: true,
        link_bytes_per_us: 54_000,
        both_ways_bytes_per_us: 34_000,
        copy_ns: 0,
        clock_mhz: 1540,
        ..Self::H100
    };

    /// The machines that are known.
    pub const ALL: [Self; 4] = [Self::H200, Self::H100, Self::H100_PAIR_BY_HOST, Self::H800];

    /// The same machine where `ranks` ranks reach each other through host memory alone.
    #[must_use]
    pub fn staged(self, ranks: u32) -> Self {
        let rate = self.staged_bytes_per_us.min(self.staged_total_bytes_per_us / u64::from(ranks.max(1)));
        Self { link_bytes_per_us: rate, both_ways_bytes_per_us: rate, ..self }
    }

    /// The profile of a GPU by the driver's name for it, with the SM count that the driver reports;
    /// an unknown GPU has an H100's rates for each SM.
    pub fn of_gpu(name: &str, multiprocessors: u32) -> Self {
        let known = [Self::H200, Self::H800, Self::H100].into_iter().find(|machine| name.contains(machine.gpu));
        Self { multiprocessors: multiprocessors.max(1), ..known.unwrap_or(Self::H100) }
    }

    /// Whether committed results of such a machine are what it was made from, or held against.
    pub fn is_measured(&self) -> bool {
        [Self::H200, Self::H100, Self::H100_PAIR_BY_HOST].contains(self)
    }

    /// Operations of one worker in a nanosecond.
    pub(crate) fn ops_per_ns(&self) -> f64 {
        self.ops_per_cycle as f64 * self.clock_mhz as f64 / 1000.0
    }

    /// Of so many operations of one worker.
    pub(crate) fn multiplying(&self, ops: u128) -> Duration {
        time(ops, self.ops_per_cycle.saturating_mul(self.clock_mhz))
    }

    /// Of so many bytes that all workers of a rank read.
    pub(crate) fn reading(&self, bytes: u128) -> Duration {
        time(bytes, self.memory_bytes_per_us)
    }

    /// Of so many bytes that a worker adds.
    pub(crate) fn adding(&self, bytes: u64) -> Duration {
        time(bytes.into(), self.add_bytes_per_us)
    }

    /// Besides its bytes, of a piece of a shard that the kernel pushes to so many ranks, maybe the
    /// own one, of so many rows with so many bytes.
    pub(crate) fn pushing(&self, (rows, row_bytes): (u64, u64), ranks: u64) -> Duration {
        let rounds = rows.saturating_mul(row_bytes.div_ceil(PUSHED_BYTES)).div_ceil(self.multiprocessors.max(1).into());
        let in_rounds = self.push_round_ns.saturating_mul(rounds).saturating_mul(ranks.saturating_add(1));
        Duration::from_nanos(self.push_ns.saturating_add(in_rounds))
    }

    /// Of so many bytes on a link.
    pub fn carrying(&self, bytes: u64) -> Duration {
        time(bytes.into(), self.link_bytes_per_us)
    }

    /// The same where the link may carry the other way too.
    pub(crate) fn carrying_beside(&self, bytes: u64, other_way: bool) -> Duration {
        time(bytes.into(), if other_way { self.both_ways_bytes_per_us } else { self.link_bytes_per_us })
    }
}

/// Of an `amount` of which so much is done in a microsecond; with a rate of 0, of 1.
fn time(amount: u128, per_us: u64) -> Duration {
    let nanoseconds = amount.saturating_mul(1000).div_ceil(u128::from(per_us.max(1)));
    // A century is as long as forever, and leaves room for sums.
    Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX).min(1 << 61))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up() {
        let machine = Machine { link_bytes_per_us: 1_000_000, ops_per_cycle: 2, clock_mhz: 500, ..Machine::H200 };
        assert_eq!([0, 1, 1000, 1001].map(|bytes| machine.carrying(bytes).as_nanos()), [0, 1, 1, 2]);
        assert_eq!(machine.multiplying(5), Duration::from_nanos(5));
        assert_eq!(Machine { link_bytes_per_us: 0, ..machine }.carrying(2), Duration::from_micros(2), "slow, but it ends");
    }
}
