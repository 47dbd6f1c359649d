//! How long a call takes whose chunks are messages.
//!
//! Invariant: an estimate depends on the call alone. Times are an H200's, where nothing else is said: only which of two is the less matters.

use super::{Call, Sending};
use crate::OpKind;
use crate::program::heuristic::{READ, ROW_GROUP, SHARING_NS, is_ragged, w_bytes};

/// What it takes to begin and end a kernel.
const LAUNCH_NS: u64 = 10_000;
// Of messages over NVLink, all fitted to results/tuning/nccl-sending.txt, whose times the estimates meet within 7.5 %.
/// Bytes that a multiprocessor carries in a nanosecond.
const CARRIED: u64 = 17;
/// Bytes that a device sends in a nanosecond at most: 8 multiprocessors for each of three messages carry little more than 4.
const SENT: u64 = 240;
/// What a group takes besides.
const GROUP_NS: u64 = 43_000;
/// What less, if it goes before a kernel.
const BEFORE_NS: u64 = 13_000;
/// What a group takes besides that goes alone, before what reads what it brings, fitted to two H100 (results/tuning/nccl-alone.txt).
const ALONE_NS: u64 = 20_000;
/// Bytes of such a group to several peers in a nanosecond, on all channels that its communicator has. With it the estimates of calls of four H200 are within 7 % (results/tuning/nccl-tp4.txt).
const SENT_ALONE: u64 = 320;
/// What folds take that are a launch of their own, fitted alike.
const FOLDS_NS: u64 = 5_000;
/// What more, if it waits for what a kernel stores and announces in the host's memory.
const FLAG_NS: u64 = 20_000;

/// Most tiles that are counted one by one. Of more, which are many waves, few wait.
const MOST_COUNTED: u64 = 1 << 14;

impl Call<'_> {
    /// Nanoseconds after which so many tiles are finished, those that are shared first.
    fn finished(&self, tiles: u64) -> u64 {
        let (shared, percent) = self.shared.unwrap_or((0, 0));
        let first = if shared > 0 && tiles > 0 { self.tile_ns * percent / 100 + SHARING_NS } else { 0 };
        first + tiles.saturating_sub(shared).div_ceil(self.workers.into()) * self.tile_ns
    }

    /// Nanoseconds of messages to all peers that go alone, on all channels.
    fn alone(&self) -> u64 {
        ALONE_NS + u64::from(self.peers) * self.place_bytes / if self.peers > 1 { SENT_ALONE } else { SENT }
    }

    /// Nanoseconds of a group of messages to so many peers.
    fn group(&self, peers: u32) -> u64 {
        let rate = (CARRIED * u64::from(self.lanes.max(1))).min(SENT / u64::from(peers.max(1))).max(1);
        GROUP_NS + self.place_bytes / self.chunks / rate
    }

    /// Nanoseconds of the groups in which a chunk that the kernel announces goes to so many peers.
    fn groups(&self, peers: u32) -> u64 {
        self.in_groups(peers, |peers| FLAG_NS + self.group(peers))
    }

    /// What it takes to send to so many peers, where it takes `group` for those of a group.
    fn in_groups(&self, peers: u32, group: impl Fn(u32) -> u64) -> u64 {
        let together = self.sending.peers().min(peers).max(1);
        let rest = peers % together;
        u64::from(peers / together) * group(together) + if rest > 0 { group(rest) } else { 0 }
    }

    /// Nanoseconds of the call.
    pub(super) fn estimate(&self) -> u64 {
        let shards = if self.stacked { 1 } else { u64::from(self.problem.world().get()) };
        let all = self.finished(shards * self.tiles);
        // Where one pass over `w` is all that there is, it may take longer.
        let all = if self.stacked && is_ragged(self.problem) { all.max(w_bytes(self.problem) / READ) } else { all };
        LAUNCH_NS
            + match (self.sending, self.problem.op()) {
                (Sending::Before, OpKind::AllGatherGemm) => self.alone() + all,
                (Sending::Before, OpKind::GemmReduceScatter) => all + self.alone() + FOLDS_NS,
                (_, OpKind::AllGatherGemm) if self.stacked => self.in_groups(self.peers, |peers| self.group(peers)) - BEFORE_NS + all,
                (_, OpKind::GemmReduceScatter) if self.stacked => all + self.groups(self.peers),
                (_, OpKind::AllGatherGemm) => self.gathering(),
                (_, OpKind::GemmReduceScatter) => self.scattering(),
            }
    }

    /// Shard by shard, or band by band, as rows arrive: those of row blocks that are taken together, or of a band, all before the first tile. The first group goes
    /// before the kernel has begun. Shards one by one are counted tile by tile, as whoever has none of the own ones left waits: Llama at TP 2 and 1040 rows, whose shards are 1.3 waves of 176x256, takes 0.41 ms
    /// and not 0.38 (results/h100-x2-ragged-nccl.json).
    fn gathering(&self) -> u64 {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let shard = self.finished(u64::from(world) * self.tiles) / u64::from(world);
        let together = self.sending.peers().min(self.peers).max(1);
        // When the chunk has come of the shard at a step.
        let arrival = |step: u32, chunk: u64| {
            let batch = (step - 1) / together;
            let own = together.min(self.peers - batch * together);
            chunks * u64::from(batch) * self.group(together) + (chunk + 1) * self.group(own) - BEFORE_NS
        };
        if self.band == 1 && u64::from(world) * self.tiles <= MOST_COUNTED {
            return self.one_by_one(arrival);
        }
        let mut time = 0;
        for first in (0..world).step_by(self.band as usize) {
            let band = first..world.min(first.saturating_add(self.band));
            let mut arrivals = band.clone().filter(|step| (1..=self.peers).contains(step));
            if band.len() > 1 {
                let last = arrivals.map(|step| arrival(step, chunks - 1)).max();
                time = time.max(last.unwrap_or(0)) + band.len() as u64 * shard;
            } else if let Some(step) = arrivals.next() {
                for first in (0..self.row_blocks).step_by(ROW_GROUP as usize) {
                    let end = self.row_blocks.min(first + u64::from(ROW_GROUP));
                    time = time.max(arrival(step, (end - 1) / self.of_chunk)) + shard * (end - first) / self.row_blocks;
                }
            } else {
                time += shard;
            }
        }
        time
    }

    /// Shard by shard, tile by tile, by workers that take them strided, as the chunk arrives in which the rows are that are taken together.
    fn one_by_one(&self, arrival: impl Fn(u32, u64) -> u64) -> u64 {
        let columns = self.tiles / self.row_blocks;
        let (mut free, mut workers) = (vec![0; self.workers as usize], (0..self.workers as usize).cycle());
        for step in 0..self.problem.world().get() {
            let comes = (1..=self.peers).contains(&step);
            for first in (0..self.row_blocks).step_by(ROW_GROUP as usize) {
                let end = self.row_blocks.min(first + u64::from(ROW_GROUP));
                let there = if comes { arrival(step, (end - 1) / self.of_chunk) } else { 0 };
                for worker in workers.by_ref().take(((end - first) * columns) as usize) {
                    free[worker] = there.max(free[worker]) + self.tile_ns;
                }
            }
        }
        free.into_iter().max().unwrap_or(0)
    }

    /// Chunk by chunk of a band as the last tile of it is finished; the own shard as the chunks of the last band have come, for which each worker waits with a
    /// tile that is multiplied, and with all that it has after it.
    fn scattering(&self) -> u64 {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let (mut begun, mut sent, mut come) = (0, 0, Vec::new());
        for first in (1..world).step_by(self.band as usize) {
            let shards = self.band.min(world - first);
            come.clear();
            for chunk in 1..=chunks {
                let tiles = begun + (u64::from(shards) * self.tiles * chunk).div_ceil(chunks);
                sent = sent.max(self.finished(tiles)) + self.groups(shards.min(self.peers));
                come.push(sent);
            }
            begun += u64::from(shards) * self.tiles;
        }
        let (tiles, workers) = (self.tiles.div_ceil(chunks), u64::from(self.workers));
        let behind = (tiles.div_ceil(workers) - 1) * self.tile_ns;
        let own = come.iter().fold(begun * self.tile_ns / workers, |time, come| (time + tiles * self.tile_ns / workers).max(come + behind));
        own.max(self.finished(begun + self.tiles))
    }
}
