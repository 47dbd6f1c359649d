//! The order in which messages carry what the ranks of a rail give each other, where no rank can
//! store into memory of another node.
//!
//! Invariant: at round `i` of a program every rank sends to one rank and receives from one, what a
//! rank sends at round `i` is what its reader receives at round `i`, and the rounds are in the
//! order that the program's kernel finishes its chunks in; rows, which are all there from the
//! start, chunk by chunk, each to all readers. So ranks that take the rounds in order, each when
//! its own chunk is finished, wait for nobody who waits for them, nor do they where they take them
//! [group](super::groups) by group.

use super::{Places, TileProgram, sink};
use crate::layout::{gather_place_bytes, scatter_place_bytes, slot_bytes};
use crate::{OpKind, Rank};
use std::collections::BTreeMap;

/// One exchange of a rank: a chunk to one peer, and the same chunk of another's from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Step of the schedule: the peers' distance from this rank, in ranks.
    pub step: u32,
    /// Where the bytes lie in the place of their source, and in the source.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// What this rank sends, as its reader knows it.
    pub sent: End,
    /// What this rank receives.
    pub received: End,
}

/// One message's ends beside this rank: who, and which place and signal of the reader's it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The other rank.
    pub peer: Rank,
    /// The source's place at the reader.
    pub place: u32,
    /// The signal of the reader's pad that announces the chunk.
    pub signal: u32,
}

impl TileProgram {
    /// Bytes of a place: what one rank gives to another in a call.
    pub const fn place_bytes(&self) -> u64 {
        match self.problem.op() {
            OpKind::AllGatherGemm => gather_place_bytes(&self.problem),
            OpKind::GemmReduceScatter if self.flattened => scatter_place_bytes(&self.problem),
            OpKind::GemmReduceScatter => self.slots_per_source as u64 * slot_bytes(&self.problem, self.tile),
        }
    }

    /// The rounds of this rank, along its rail; none where all ranks are of one node. `None` where
    /// chunks are no whole ranges of a place: rows that are announced in slices, or tiles that go
    /// to several owners and have a signal each.
    ///
    /// ```
    /// use flux_core::program::{Schedule, TileProgram};
    /// use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, WorldSize::new(4).unwrap())?;
    /// let program = TileProgram::build(&p, Rank::new(0), &Schedule::of(TileShape::new(128, 128, 64)))?;
    /// let rounds = program.rounds().unwrap();
    /// assert_eq!(rounds.iter().map(|round| round.sent.peer.get()).collect::<Vec<_>>(), [3, 2, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn rounds(&self) -> Option<Vec<Round>> {
        if self.nodes.others() == 0 {
            return Some(Vec::new());
        }
        match self.problem.op() {
            OpKind::AllGatherGemm => self.gather_rounds(),
            OpKind::GemmReduceScatter if self.flattened => self.scattered_row_rounds(),
            OpKind::GemmReduceScatter => self.partial_tile_rounds(),
        }
    }

    /// Whether what goes to `dest` goes to another node.
    fn crosses(&self, dest: u32) -> bool {
        !self.nodes.together(self.rank, Rank::new(dest))
    }

    /// The first chunk to all, then the next, each as the transfers are ordered: what goes to
    /// several readers can go at once.
    fn gather_rounds(&self) -> Option<Vec<Round>> {
        let row_bytes = u64::from(self.problem.k_local()) * self.problem.dtype().bytes() as u64;
        let sent = || self.transfers.iter().filter(|t| self.crosses(t.dest));
        let per_place = self.per_place(sent().count());
        let round = |t: &super::Transfer| {
            let whole = t.col == 0 && t.cols == self.problem.k_local();
            let chunk = t.raise.checked_sub(t.place * per_place)?;
            whole.then_some(())?;
            let end = |peer, place| End { peer, place, signal: place * per_place + chunk };
            let source = self.nodes.after(self.rank, t.step);
            let from = if self.flattened { source.get() } else { source.place_at(self.rank)? };
            let (sent, received) = (end(Rank::new(t.dest), t.place), end(source, from));
            Some(Round { step: t.step, offset: u64::from(t.row) * row_bytes, bytes: u64::from(t.rows) * row_bytes, sent, received })
        };
        let mut rounds = sent().map(round).collect::<Option<Vec<_>>>()?;
        rounds.sort_by_key(|round| round.offset);
        Some(rounds)
    }

    /// As the chunks' last tiles are ordered.
    fn partial_tile_rounds(&self) -> Option<Vec<Round>> {
        let (nodes, places) = (self.nodes, Places::new(self.nodes));
        let slot = slot_bytes(&self.problem, self.tile);
        let sends = || self.items.iter().filter(|item| item.sink == sink::SEND && self.crosses(item.dest));
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
            let distance = (nodes.node_of(dest) + nodes.count() - nodes.node_of(self.rank)) % nodes.count();
            let source = nodes.before(self.rank, distance * nodes.per_node());
            let (place, from) = (places.destination(self.rank, dest)?.1, places.destination(source, self.rank)?.1);
            let offset = u64::from(first.checked_sub(place * self.slots_per_source)?) * slot;
            let chunk = item.raise.checked_sub(place * per_place)?;
            let end = |peer, place| End { peer, place, signal: place * per_place + chunk };
            let step = distance * nodes.per_node();
            rounds.push(Round { step, offset, bytes: u64::from(*tiles) * slot, sent: end(dest, place), received: end(source, from) });
        }
        Some(rounds)
    }

    /// All that a rank has for an owner, which one signal announces.
    fn scattered_row_rounds(&self) -> Option<Vec<Round>> {
        let mut tiles = self.items.iter().filter(|item| item.sink == sink::SCATTER);
        let signal = tiles.next()?.raise;
        tiles.all(|item| item.raise == signal).then(|| {
            let (nodes, bytes) = (self.nodes, self.place_bytes());
            let end = |peer: Rank, source: Rank| End { peer, place: source.get(), signal: source.get() };
            let round = |step| {
                let (dest, source) = (nodes.after(self.rank, step), nodes.before(self.rank, step));
                Round { step, offset: 0, bytes, sent: end(dest, self.rank), received: end(source, source) }
            };
            (1..self.problem.world().get()).map(round).collect()
        })
    }

    /// Signals of one place, of `all` that this rank raises along its rail.
    const fn per_place(&self, all: usize) -> u32 {
        all as u32 / self.nodes.others()
    }
}
