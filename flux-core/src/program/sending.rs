//! Which sending takes a call the least time, and the schedule that goes with it.
//!
//! Invariant: both depend on the problem and on what all ranks know of the transport alone, so all ranks choose the same. Times are estimates for an H200: only the
//! choice depends on them.

use super::heuristic::{TILES, WORKERS};
use super::messages::{Channels, Sending};
use super::schedule::{Chunk, Schedule};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::tile::TileGrid;
use crate::{OpKind, Problem};

/// SMs of an H200.
const MULTIPROCESSORS: u32 = WORKERS + 4;
/// Operations of a multiprocessor in a nanosecond: 4096 a cycle at 1.5 GHz, of a card at its power limit.
const OPERATIONS: u64 = 6144;
/// Bytes that a multiprocessor carries in a nanosecond, of messages over NVLink (results/tuning/nccl-groups-tp4.txt).
const CARRIED: u64 = 17;
/// Bytes that a device sends in a nanosecond at most (results/h200-x4-nccl.json).
const SENT: u64 = 300;
/// What a group takes besides.
const GROUP_NS: u64 = 30_000;
/// What it takes to begin a kernel after messages.
const LAUNCH_NS: u64 = 10_000;
/// Chunks of a shard to choose from, unless they would be larger than a message should be.
const CHUNKS: [u64; 3] = [4, 2, 1];

impl Schedule {
    /// The heuristic's schedule for a transport whose chunks are messages, sent so: whole rows and tiles of one shard each.
    ///
    /// A message costs the same to begin whatever its size, so small problems are sent as whole shards, and none as more than four chunks of a shard unless
    /// those are larger than what [`Channels`] call for. Tiles that span shards have no one reader, so the shards of small problems are taken side by side
    /// instead: they still share one pass over `w`. Those of a GEMM-ReduceScatter that go together always are, so that they are finished at about the same time.
    pub fn in_messages(problem: &Problem, channels: &Channels, sending: Sending) -> Self {
        Call::fastest(problem, channels, sending, problem.world().peers()).1
    }
}

impl Sending {
    /// The sending with which a call takes the least time, of `peers` peers to whom messages go. A heuristic: the more peers at once, the more is carried and the
    /// fewer multiprocessors are left.
    pub fn heuristic(problem: &Problem, channels: &Channels, peers: u32) -> Self {
        let before = (problem.op() == OpKind::AllGatherGemm && peers == problem.world().peers()).then_some(Self::Before);
        let beside = (1..=peers.max(1)).map(|peers| Self::Beside { peers });
        beside.chain(before).min_by_key(|&sending| Call::fastest(problem, channels, sending, peers).0).unwrap_or(Self::ALL)
    }
}

/// A call as it is estimated: what is computed, and how it is sent.
struct Call<'a> {
    problem: &'a Problem,
    channels: &'a Channels,
    sending: Sending,
    /// To whom messages go.
    peers: u32,
    workers: u32,
    tile_ns: u64,
    /// Tiles of a shard.
    tiles: u64,
    /// What one rank gives to another.
    place_bytes: u64,
    chunks: u64,
    band: u32,
}

impl<'a> Call<'a> {
    /// The fastest schedule of this sending, and the nanoseconds that it takes.
    fn fastest(problem: &'a Problem, channels: &'a Channels, sending: Sending, peers: u32) -> (u64, Schedule) {
        let own = Schedule::heuristic(problem);
        let left = match sending {
            Sending::Before => 0,
            Sending::Beside { .. } => channels.each.saturating_mul(sending.peers().min(peers)).min(channels.all),
        };
        let workers = MULTIPROCESSORS.saturating_sub(left).max(1);
        let world = problem.world().get();
        let band = match problem.op() {
            _ if own.stack => world,
            OpKind::AllGatherGemm => own.band,
            OpKind::GemmReduceScatter => own.band.max(sending.peers().min(world)),
        };
        let tiles = if own.stack { vec![(own.tile, 100)] } else { TILES.to_vec() };
        let ways = tiles.into_iter().flat_map(|(tile, cost)| {
            let grid = TileGrid::of_shard(problem, tile);
            let (available, place_bytes) = match problem.op() {
                OpKind::AllGatherGemm => (u64::from(grid.row_blocks()), gather_place_bytes(problem)),
                OpKind::GemmReduceScatter => (grid.tiles(), grid.tiles() * slot_bytes(problem, tile)),
            };
            let (least, most) = match sending {
                Sending::Before => (place_bytes, u64::MAX),
                Sending::Beside { .. } => (channels.least_bytes, channels.most_bytes()),
            };
            let piece = place_bytes.div_ceil(available);
            let tile_ns = 2 * u64::from(tile.m) * u64::from(tile.n) * u64::from(problem.k_local()) / OPERATIONS * cost / 100;
            CHUNKS.map(|chunks| {
                let together = place_bytes.div_ceil(chunks).max(least).div_ceil(piece).min(most / piece).clamp(1, available);
                let chunks = available.div_ceil(together);
                let call = Self { problem, channels, sending, peers, workers, tile_ns, tiles: grid.tiles(), place_bytes, chunks, band };
                let chunk = if together == available { Chunk::Shard } else { Chunk::Tiles(together as u32) };
                (call.estimate(), Schedule { tile, chunk, band, splits: 1, k_chunks: 1, stack: false, ..own })
            })
        });
        ways.min_by_key(|way| way.0).unwrap_or((u64::MAX, own))
    }

    /// Nanoseconds after which so many tiles are finished.
    fn finished(&self, tiles: u64) -> u64 {
        tiles.div_ceil(self.workers.into()) * self.tile_ns
    }

    /// Nanoseconds of a group of messages to so many peers.
    fn group(&self, peers: u32) -> u64 {
        let rate = (CARRIED * u64::from(self.channels.each.max(1))).min(SENT / u64::from(peers.max(1))).max(1);
        GROUP_NS + self.place_bytes / self.chunks / rate
    }

    /// Nanoseconds of the groups in which a chunk goes to so many peers.
    fn groups(&self, peers: u32) -> u64 {
        let together = self.sending.peers().min(peers).max(1);
        let rest = peers % together;
        u64::from(peers / together) * self.group(together) + if rest > 0 { self.group(rest) } else { 0 }
    }

    fn estimate(&self) -> u64 {
        let world = u64::from(self.problem.world().get());
        match (self.sending, self.problem.op()) {
            (Sending::Before, _) => self.group(self.peers) + LAUNCH_NS + self.finished(world * self.tiles),
            (_, OpKind::AllGatherGemm) => self.gathering(),
            (_, OpKind::GemmReduceScatter) => self.scattering(),
        }
    }

    /// Shard by shard, or band by band, as rows arrive.
    fn gathering(&self) -> u64 {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let shard = self.finished(u64::from(world) * self.tiles) / u64::from(world);
        let together = self.sending.peers().min(self.peers).max(1);
        // When the chunk has come of the shard at a step.
        let arrival = |step: u32, chunk: u64| {
            let batch = (step - 1) / together;
            let own = together.min(self.peers - batch * together);
            chunks * u64::from(batch) * self.group(together) + (chunk + 1) * self.group(own)
        };
        let mut time = 0;
        for first in (0..world).step_by(self.band as usize) {
            let band = first..world.min(first.saturating_add(self.band));
            let mut arrivals = band.clone().filter(|step| (1..=self.peers).contains(step));
            if band.len() > 1 {
                let last = arrivals.map(|step| arrival(step, chunks - 1)).max();
                time = time.max(last.unwrap_or(0)) + band.len() as u64 * shard;
            } else if let Some(step) = arrivals.next() {
                time = (0..chunks).fold(time, |time, chunk| time.max(arrival(step, chunk)) + shard / chunks);
            } else {
                time += shard;
            }
        }
        time
    }

    /// Chunk by chunk of a band as the last tile of it is finished, the own shard when the others' parts have come.
    fn scattering(&self) -> u64 {
        let (world, chunks) = (self.problem.world().get(), self.chunks);
        let (mut begun, mut sent) = (0, 0);
        for first in (1..world).step_by(self.band as usize) {
            let shards = self.band.min(world - first);
            for chunk in 1..=chunks {
                let tiles = begun + (u64::from(shards) * self.tiles * chunk).div_ceil(chunks);
                sent = sent.max(self.finished(tiles)) + self.groups(shards.min(self.peers));
            }
            begun += u64::from(shards) * self.tiles;
        }
        // The last chunk is the last to come.
        self.finished(begun + self.tiles).max(sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::TileProgram;
    use crate::{DType, Rank, WorldSize};

    fn channels(world: u32) -> Channels {
        Channels { all: 4 * world.next_power_of_two(), each: 4, part_bytes: 4 << 20, least_bytes: 4 << 20 }
    }

    fn llama(world: u32, op: OpKind, m: usize) -> Problem {
        let (n, k) = if op == OpKind::AllGatherGemm { (28672, 8192) } else { (8192, 28672) };
        Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap()
    }

    fn gpt3(world: u32, op: OpKind, m: usize) -> Problem {
        let (n, k) = if op == OpKind::AllGatherGemm { (49152, 12288) } else { (12288, 49152) };
        Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap()
    }

    const OPS: [OpKind; 2] = [OpKind::AllGatherGemm, OpKind::GemmReduceScatter];

    #[test]
    fn no_more_peers_at_once_than_the_gemm_hides() {
        let sending = |problem: Problem| Sending::heuristic(&problem, &channels(problem.world().get()), problem.world().peers());
        for op in OPS {
            assert_eq!(
                sending(gpt3(4, op, 8192)),
                Sending::Beside { peers: 1 },
                "{op}: 151 MB at 68 GB/s are sent in two thirds of the time"
            );
            assert!(sending(llama(4, op, 8192)).peers() > 1, "{op}: 100 MB take longer than the GEMM");
            assert_eq!(sending(llama(2, op, 8192)), Sending::Beside { peers: 1 }, "{op}");
        }
        assert_eq!(sending(llama(4, OPS[0], 1024)), Sending::Before);
        assert_ne!(sending(llama(4, OPS[1], 1024)), Sending::Before);
    }

    #[test]
    fn messages_are_large_and_take_no_more_than_they_are_to() {
        for (world, op) in [2, 4, 8].into_iter().flat_map(|world| OPS.map(|op| (world, op))) {
            let channels = channels(world);
            for problem in [64, 512, 1024, 8192].into_iter().flat_map(|m| [gpt3(world, op, m), llama(world, op, m)]) {
                for peers in 1..world {
                    let sending = Sending::Beside { peers };
                    let schedule = Schedule::in_messages(&problem, &channels, sending);
                    let program = TileProgram::build(&problem, Rank::new(1), &schedule).unwrap();
                    let rounds = program.rounds().unwrap();
                    let largest = rounds.iter().map(|round| round.bytes).max();
                    assert!(largest >= Some(channels.least_bytes.min(program.place_bytes())), "{problem:?}: {largest:?}");
                    assert_eq!(channels.of(&sending.ordered(rounds, op == OPS[0]), peers), 4 * peers, "{problem:?}");
                }
            }
        }
    }

    #[test]
    fn what_comes_first_is_whole_shards() {
        let problem = gpt3(4, OPS[0], 8192);
        assert_eq!(Schedule::in_messages(&problem, &channels(4), Sending::Before).chunk, Chunk::Shard);
    }
}
