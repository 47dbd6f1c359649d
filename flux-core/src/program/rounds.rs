//! Rounds: the order of messages along a rail, whose ranks cannot store into each other's memory.
//!
//! Invariant: at round `i` every rank sends to one rank and receives from one, and what it sends is
//! what its reader receives at round `i`. Rounds of partial tiles follow the order in which the
//! kernel finishes its chunks. Rounds of rows, all there from the start, go chunk by chunk to all
//! readers. So ranks that take the rounds in order, or [group](super::groups) by group, never wait
//! in a circle.

use super::{Places, Sink, TileProgram};
use crate::layout::{gather_place_bytes, slot_bytes};
use crate::{Rank, SumsTo};
use std::collections::BTreeMap;

/// One exchange of a rank: a chunk sent to one peer, and the same chunk received from another.
/// Chunks of rows may differ by a row, where a rank has one row less.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Step of the schedule: the distance to the peer, in ranks.
    pub step: u32,
    /// Offset in the source's data and in its place at the reader.
    pub offset: u64,
    /// Most bytes of the chunk on any rank, by which all form the same groups.
    pub bytes: u64,
    /// The sent message, as its reader sees it.
    pub sent: End,
    /// The received message.
    pub received: End,
}

/// The other end of a message, with the reader's place and signal for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The other rank.
    pub peer: Rank,
    /// The source's place at the reader.
    pub place: u32,
    /// The signal of the reader's pad that announces the chunk.
    pub signal: u32,
    /// Bytes of the message.
    pub bytes: u64,
}

impl TileProgram {
    /// Bytes of a place: what one rank gives another in a call.
    pub const fn place_bytes(&self) -> u64 {
        match self.problem.op().sums_to() {
            SumsTo::Nothing => gather_place_bytes(&self.problem),
            SumsTo::Rows | SumsTo::All if self.rows.is_flattened() => self.scatter_place_bytes(),
            SumsTo::Rows | SumsTo::All => {
                self.slots_per_source as u64 * slot_bytes(&self.problem, self.tile)
            }
        }
    }

    /// The rounds of this rank along its rail; none within one node.
    ///
    /// `None` if chunks are not contiguous in a place: rows in slices, or scattered tiles with
    /// signals of their own. `None` of two exchanges of a GEMM-AllReduce.
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram};
    /// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, world)?;
    /// let schedule = Schedule::of(TileShape::new(128, 128, 64));
    /// let program = TileProgram::build(&p, Rank::new(0), &schedule)?;
    /// let rounds = program.rounds().unwrap();
    /// assert_eq!(rounds.iter().map(|round| round.sent.peer.get()).collect::<Vec<_>>(), [3, 2, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rounds(&self) -> Option<Vec<Round>> {
        if self.nodes.others() == 0 {
            return Some(Vec::new());
        }
        match self.problem.op().sums_to() {
            SumsTo::Nothing => self.gather_rounds(),
            SumsTo::Rows | SumsTo::All if self.rows.is_flattened() => self.scattered_row_rounds(),
            SumsTo::Rows => self.partial_tile_rounds(),
            SumsTo::All => None,
        }
    }

    /// Whether `dest` is in another node.
    fn crosses(&self, dest: u32) -> bool {
        !self.nodes.together(self.rank, Rank::new(dest))
    }

    /// Chunk by chunk, each to all readers in the order of transfers.
    fn gather_rounds(&self) -> Option<Vec<Round>> {
        let row_bytes = self.problem.gathered_row_bytes();
        let sent = || self.transfers.iter().filter(|t| self.crosses(t.dest));
        let per_place = self.per_place(sent().count());
        // All chunks but the last have the same rows on every rank.
        let rows_of = |shard: u32, chunk: u32, t: &super::Transfer| {
            let rows = if shard < self.problem.full_shards() {
                self.problem.m_shard()
            } else {
                self.problem.m_shard() - 1
            };
            u64::from(if chunk + 1 == per_place { rows - t.row } else { t.rows })
        };
        let round = |t: &super::Transfer| {
            let whole = t.col == 0 && t.cols == self.problem.gathered_columns();
            let chunk = t.raise.checked_sub(t.place * per_place)?;
            whole.then_some(())?;
            let end = |peer, (source, place): (Rank, u32)| {
                let bytes = rows_of(source.get(), chunk, t) * row_bytes;
                End { peer, place, signal: place * per_place + chunk, bytes }
            };
            let source = self.nodes.after(self.rank, t.step);
            let from =
                if self.rows.is_flattened() { source.get() } else { source.place_at(self.rank)? };
            let (sent, received) =
                (end(Rank::new(t.dest), (self.rank, t.place)), end(source, (source, from)));
            let bytes = rows_of(0, chunk, t) * row_bytes;
            Some(Round {
                step: t.step,
                offset: u64::from(t.row) * row_bytes,
                bytes,
                sent,
                received,
            })
        };
        let mut rounds = sent().map(round).collect::<Option<Vec<_>>>()?;
        rounds.sort_by_key(|round| round.offset);
        Some(rounds)
    }

    /// In the order of the chunks' last tiles.
    fn partial_tile_rounds(&self) -> Option<Vec<Round>> {
        let (nodes, places) = (self.nodes, Places::new(self.nodes));
        let slot = slot_bytes(&self.problem, self.tile);
        let sends =
            || self.items.iter().filter(|item| item.sink == Sink::Send && self.crosses(item.dest));
        // By owner and signal: the first slot, and the tiles so far.
        let mut chunks = BTreeMap::<(u32, u32), (u32, u32)>::new();
        for item in sends() {
            chunks.entry((item.dest, item.raise)).or_insert((item.slot, 0));
        }
        let per_place = self.per_place(chunks.len());
        let mut rounds = Vec::with_capacity(chunks.len());
        for item in sends() {
            let (first, tiles) = chunks.get_mut(&(item.dest, item.raise))?;
            *tiles += 1;
            if *tiles < item.raise_after {
                continue;
            }
            let dest = Rank::new(item.dest);
            let distance =
                (nodes.node_of(dest) + nodes.count() - nodes.node_of(self.rank)) % nodes.count();
            let source = nodes.before(self.rank, distance * nodes.per_node());
            let (place, from) =
                (places.destination(self.rank, dest)?.1, places.destination(source, self.rank)?.1);
            let offset = u64::from(first.checked_sub(place * self.slots_per_source)?) * slot;
            let chunk = item.raise.checked_sub(place * per_place)?;
            let bytes = u64::from(*tiles) * slot;
            let end = |peer, place| End { peer, place, signal: place * per_place + chunk, bytes };
            let step = distance * nodes.per_node();
            rounds.push(Round {
                step,
                offset,
                bytes,
                sent: end(dest, place),
                received: end(source, from),
            });
        }
        Some(rounds)
    }

    /// Whether one signal announces all tiles that are scattered.
    pub fn scatters_at_once(&self) -> bool {
        let mut raised =
            self.items.iter().filter(|item| item.sink == Sink::Scatter).map(|item| item.raise);
        let first = raised.next();
        first.is_some_and(|first| raised.all(|signal| signal == first))
    }

    /// One message to each owner, which one signal announces.
    fn scattered_row_rounds(&self) -> Option<Vec<Round>> {
        self.scatters_at_once().then(|| {
            let (nodes, bytes) = (self.nodes, self.place_bytes());
            let end = |peer: Rank, source: Rank| End {
                peer,
                place: source.get(),
                signal: source.get(),
                bytes,
            };
            let round = |step| {
                let (dest, source) = (nodes.after(self.rank, step), nodes.before(self.rank, step));
                Round {
                    step,
                    offset: 0,
                    bytes,
                    sent: end(dest, self.rank),
                    received: end(source, source),
                }
            };
            (1..self.problem.world().get()).map(round).collect()
        })
    }

    /// Signals of one place, given all that this rank raises along its rail.
    const fn per_place(&self, all: usize) -> u32 {
        all as u32 / self.nodes.others()
    }
}
