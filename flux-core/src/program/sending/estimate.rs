//! How long a call takes whose chunks are messages.
//!
//! Invariant: an estimate depends on the call alone. Times are an H200's, where nothing else is
//! said: only which of two is the less matters.

use super::workers::Workers;
use super::{Call, Sending};
use crate::OpKind;
use crate::program::heuristic::{READ, SHARING_NS, is_ragged, w_bytes};
use crate::program::schedule::bands_of;

/// What it takes to begin and end a kernel.
const LAUNCH_NS: u64 = 10_000;
// Of messages over NVLink, all fitted to results/tuning/nccl-sending.txt, whose times the estimates
// meet within 7.5 %.
/// Bytes that a multiprocessor carries in a nanosecond.
const CARRIED: u64 = 17;
/// Bytes that a device sends in a nanosecond at most: 8 multiprocessors for each of three messages
/// carry little more than 4.
const SENT: u64 = 240;
/// What a group takes besides.
const GROUP_NS: u64 = 43_000;
/// What less, if it goes before a kernel.
const BEFORE_NS: u64 = 13_000;
/// What a group takes besides that goes alone, before what reads what it brings, fitted to two H100
/// (results/tuning/nccl-alone.txt).
const ALONE_NS: u64 = 20_000;
/// Bytes of such a group to several peers in a nanosecond, on all channels that its communicator
/// has. With it the estimates of calls of four H200 are within 7 % (results/tuning/nccl-tp4.txt).
const SENT_ALONE: u64 = 320;
/// What folds take that are a launch of their own, fitted alike.
const FOLDS_NS: u64 = 5_000;
/// What more, if it waits for what a kernel stores and announces in the host's memory.
const FLAG_NS: u64 = 20_000;

/// What it takes to launch what is [lent](super::Lent) behind messages.
const LENT_NS: u64 = 8_000;

/// Most tiles that are counted one by one. Of more, which are many waves, few wait.
const MOST_COUNTED: u64 = 1 << 14;

impl Call<'_> {
    /// Nanoseconds after which so many tiles are finished, those that are lent before messages
    /// among them.
    fn finished_beside(&self, tiles: u64) -> u64 {
        let first = u64::from(self.lent.first).min(tiles);
        self.finished(tiles - first).max(self.lent_ns(first))
    }

    /// Nanoseconds after which so many tiles are finished, those that are shared first.
    fn finished(&self, tiles: u64) -> u64 {
        let (shared, first) = if tiles > 0 { self.shared_first() } else { (0, 0) };
        first + tiles.saturating_sub(shared).div_ceil(self.workers.into()) * self.tile_ns
    }

    /// Tiles that are shared, and the nanoseconds that they take all workers.
    fn shared_first(&self) -> (u64, u64) {
        let (shared, percent) = self.shared.unwrap_or((0, 0));
        (shared, if shared > 0 { self.tile_ns * percent / 100 + SHARING_NS } else { 0 })
    }

    /// Nanoseconds of so many tiles on the multiprocessors of messages.
    fn lent_ns(&self, tiles: u64) -> u64 {
        tiles.div_ceil(u64::from(self.lends).max(1)) * self.tile_ns
    }

    /// Nanoseconds of messages to all peers that go alone, on all channels.
    fn sent_alone(&self) -> u64 {
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
        let time = match (self.sending, self.problem.op()) {
            (Sending::Before, _) => self.before(),
            (_, OpKind::AllGatherGemm) if self.flattened => {
                self.in_groups(self.peers, |peers| self.group(peers)) - BEFORE_NS + self.at_once()
            }
            (_, OpKind::GemmReduceScatter) if self.flattened => self.at_once() + self.groups(self.peers),
            _ => {
                let (workers, lent) = self.ends();
                workers.max(lent)
            }
        };
        LAUNCH_NS + time
    }

    /// When the workers beside messages are done, and when what is lent behind these is.
    pub(super) fn ends(&self) -> (u64, u64) {
        let (workers, come) = match self.problem.op() {
            OpKind::AllGatherGemm => self.gathering(),
            OpKind::GemmReduceScatter => self.scattering(),
        };
        let last = self.lent.last.into();
        (workers, if last > 0 { come + LENT_NS + self.lent_ns(last) } else { 0 })
    }

    /// Nanoseconds of all tiles where their rows are there.
    fn at_once(&self) -> u64 {
        let shards = if self.flattened { 1 } else { u64::from(self.problem.world().get()) };
        let all = self.finished(shards * self.tiles);
        // Where one pass over `w` is all that there is, it may take longer.
        if self.flattened && is_ragged(self.problem) { all.max(w_bytes(self.problem) / READ) } else { all }
    }

    /// Nanoseconds where messages go before what they bring is read.
    fn before(&self) -> u64 {
        let folds = if self.problem.op() == OpKind::GemmReduceScatter { FOLDS_NS } else { 0 };
        self.at_once() + self.sent_alone() + folds
    }

    /// Waves of a GEMM-ReduceScatter that can be lent before the first message: as many as are
    /// finished by then.
    pub(super) fn first_waves(&self) -> u64 {
        let (world, lends) = (self.problem.world().get(), u64::from(self.lends));
        let tiles = (u64::from(self.band.min(world - 1)) * self.tiles).div_ceil(self.chunks);
        let in_time = |waves: u64| tiles >= waves * lends && waves <= (tiles - waves * lends).div_ceil(self.workers.into());
        let most = tiles.checked_div(lends).unwrap_or(0);
        (1..=most).take_while(|&waves| in_time(waves)).last().unwrap_or(0)
    }

    /// Shard by shard, or band by band, as rows arrive: those of row blocks that are taken
    /// together, or of a band, all before the first tile. The first group goes before the kernel
    /// has begun. Shards one by one are counted tile by tile, as whoever has none of the own ones
    /// left waits: Llama at TP 2 and 1040 rows, whose shards are 1.3 waves of 176x256, takes 0.41
    /// ms and not 0.38 (results/h100-x2-ragged-nccl.json). When the workers are done, and when the
    /// last message has come.
    fn gathering(&self) -> (u64, u64) {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let tiles = u64::from(world) * self.tiles - u64::from(self.lent.last);
        let shard = self.finished(tiles) / u64::from(world);
        let together = self.sending.peers().min(self.peers).max(1);
        // When the chunk has come of the shard at a step.
        let arrival = |step: u32, chunk: u64| {
            let batch = (step - 1) / together;
            let own = together.min(self.peers - batch * together);
            chunks * u64::from(batch) * self.group(together) + (chunk + 1) * self.group(own) - BEFORE_NS
        };
        let come = if self.peers > 0 { arrival(self.peers, chunks - 1) } else { 0 };
        if (self.band == 1 || self.alone > 0) && u64::from(world) * self.tiles <= MOST_COUNTED {
            return (self.one_by_one(tiles, arrival), come);
        }
        let mut time = 0;
        for first in (0..world).step_by(self.band as usize) {
            let band = first..world.min(first.saturating_add(self.band));
            let mut arrivals = band.clone().filter(|step| (1..=self.peers).contains(step));
            if band.len() > 1 {
                let last = arrivals.map(|step| arrival(step, chunks - 1)).max();
                time = time.max(last.unwrap_or(0)) + band.len() as u64 * shard;
            } else if let Some(step) = arrivals.next() {
                for first in (0..self.row_blocks).step_by(self.group as usize) {
                    let end = self.row_blocks.min(first + self.group);
                    time = time.max(arrival(step, (end - 1) / self.of_chunk)) + shard * (end - first) / self.row_blocks;
                }
            } else {
                time += shard;
            }
        }
        (time, come)
    }

    /// The first so many tiles, shard by shard, or those of a band side by side, by workers that
    /// take them strided, as the chunks arrive in which the rows are that are taken together; of
    /// the own ones some may be shared.
    fn one_by_one(&self, tiles: u64, arrival: impl Fn(u32, u64) -> u64) -> u64 {
        let columns = self.tiles / self.row_blocks;
        let (mut shared, begun) = self.shared_first();
        let mut workers = Workers::new(self.workers, begun);
        let mut rest = tiles - shared;
        let world = self.problem.world().get();
        for band in (0..self.alone.min(world)).map(|step| step..step + 1).chain(bands_of(self.alone.min(world)..world, self.band)) {
            for first in (0..self.row_blocks).step_by(self.group as usize) {
                let end = self.row_blocks.min(first + self.group);
                let comes = band.clone().filter(|step| (1..=self.peers).contains(step));
                let there = comes.map(|step| arrival(step, (end - 1) / self.of_chunk)).max().unwrap_or(0);
                let of_group = (end - first) * columns * band.len() as u64;
                let whole = of_group.saturating_sub(shared).min(rest);
                (shared, rest) = (shared.saturating_sub(of_group), rest - whole);
                workers.take(whole, there, self.tile_ns);
            }
        }
        workers.all_free()
    }

    /// Chunk by chunk of a band as the last tile of it is finished; the own shard as the chunks of
    /// the last band have come, for which each worker waits with a tile that is multiplied, and
    /// with all that it has after it. When the workers are done, and when the last message has
    /// come.
    fn scattering(&self) -> (u64, u64) {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let (mut begun, mut sent, mut come) = (0, 0, Vec::new());
        for first in (1..world).step_by(self.band as usize) {
            let shards = self.band.min(world - first);
            come.clear();
            for chunk in 1..=chunks {
                let tiles = begun + (u64::from(shards) * self.tiles * chunk).div_ceil(chunks);
                sent = sent.max(self.finished_beside(tiles)) + self.groups(shards.min(self.peers));
                come.push(sent);
            }
            begun += u64::from(shards) * self.tiles;
        }
        let workers = u64::from(self.workers);
        let (own, begun) = (self.tiles - u64::from(self.lent.last), begun - u64::from(self.lent.first));
        let tiles = own.div_ceil(chunks);
        let behind = (tiles.div_ceil(workers).max(1) - 1) * self.tile_ns;
        let time =
            come.iter().fold(begun * self.tile_ns / workers, |time, come| (time + tiles * self.tile_ns / workers).max(come + behind));
        (time.max(self.finished(begun + own)), sent)
    }
}
