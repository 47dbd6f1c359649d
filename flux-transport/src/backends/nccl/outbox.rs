//! What a rank's executor gives to the other ranks of its rail, in memory of the rank's own device,
//! until messages have carried it.
//!
//! Invariant: data for peer `p` is stored in a place of its own, and the signals that the executor
//! raises at `p` are flags of `p`'s own pad here. A chunk whose flag is this call's epoch can be
//! sent as it lies. Words of peers come into `words`, never straight into a pad.

use super::flags::Flags;
use crate::backends::held::HeldBytes;
use flux_core::layout::{WorkspaceSize, pad_bytes, signal_offset};
use flux_core::program::Places;
use flux_core::signal::Epoch;
use flux_core::{Nodes, Rank};
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, SideStream, fill_words, host_size};
use std::sync::Arc;

/// Memory of this rank's device, and flags.
#[derive(Debug)]
pub(crate) struct Outbox {
    signals: u32,
    /// A place for each other rank of the rail.
    stored: DeviceBlock,
    places: RailPlaces,
    /// A pad for each node: the flags of what is stored for the rail's rank there.
    flags: Arc<Flags>,
    /// The number of the call, for who passes rows on, and the words that came with chunks, by the
    /// signal that they are for.
    words: DeviceBlock,
    device: CudaDevice,
}

impl Outbox {
    /// Makes and initialises it, for calls from `epoch` on and a workspace of `size`. It is
    /// complete when the stream has come past it.
    pub(crate) fn new(
        device: &CudaDevice,
        stream: &SideStream,
        (rank, nodes): (Rank, Nodes),
        size: WorkspaceSize,
        epoch: Epoch,
    ) -> Result<Self, CudaError> {
        let (signals, before) = (size.signals, epoch.before(1).get());
        // The driver makes no block of nothing.
        let block = |bytes: u64| DeviceBlock::new(device, host_size(bytes.max(256)));
        let stored = block(stored_bytes(nodes, size))?;
        let places = RailPlaces { first: stored.address(), rank, nodes };
        let this = Self {
            signals,
            stored,
            places,
            flags: Arc::new(Flags::new(
                device,
                host_size(u64::from(nodes.count()) * pad_bytes(signals)),
                before,
            )?),
            words: block(4 + 4 * u64::from(signals))?,
            device: device.clone(),
        };
        let _current = device.enter()?;
        // SAFETY: the block is this generation's, which lives until the device is drained.
        unsafe {
            fill_words(device, this.words.address(), before, this.words.bytes() / 4, stream.raw())
        }?;
        Ok(this)
    }

    /// Brings all flags to call `before`, on the caller's stream, before the kernel of the call
    /// after it raises any.
    pub(crate) fn refresh(&self, before: u32, stream: usize) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        // By the stream, not by the host: a call before may still await what it finds there.
        // SAFETY: the flags are this generation's, which lives until the device is drained.
        unsafe {
            fill_words(&self.device, self.flags.address(), before, self.flags.bytes() / 4, stream)
        }
    }

    /// What it holds in all.
    pub(crate) fn held(&self) -> HeldBytes {
        let device = [&self.stored, &self.words].map(|block| block.bytes() as u64).iter().sum();
        HeldBytes { device, pinned: self.flags.bytes() as u64, host: 0 }
    }

    /// How the ranks are grouped.
    pub(crate) const fn nodes(&self) -> Nodes {
        self.places.nodes
    }

    /// What is stored for the rail's rank in `peer`'s node, in places of `place_bytes`.
    pub(crate) fn stored(&self, peer: Rank, place_bytes: u64) -> u64 {
        self.places.stored(peer, place_bytes)
    }

    /// Where the executor finds the data region of `peer`, or of whoever shares its node, in calls
    /// whose half begins `half_bytes` into it.
    pub(crate) fn data_of(&self, peer: Rank, storing: Storing, half_bytes: u64) -> u64 {
        self.places.data_of(peer, storing, half_bytes)
    }

    /// What the executor takes for the pad of `peer`, or of whoever shares its node.
    pub(crate) fn pad_of(&self, peer: Rank) -> u64 {
        self.flags.address() + u64::from(self.nodes().node_of(peer)) * pad_bytes(self.signals)
    }

    /// The flag of what is stored for `peer` in call `epoch` and announced by `signal` there.
    pub(crate) fn flag(&self, peer: Rank, signal: u32, epoch: Epoch) -> u64 {
        self.pad_of(peer) + signal_offset(signal, epoch.half())
    }

    /// All flags.
    pub(super) fn flags(&self) -> &Arc<Flags> {
        &self.flags
    }

    /// Where the word lands that comes with the chunk of `signal`.
    pub(crate) fn word(&self, signal: u32) -> u64 {
        self.own_word() + 4 + 4 * u64::from(signal)
    }

    /// A word for the number of the call, with which rows are announced to node peers. Their
    /// stream writes it.
    pub(crate) fn own_word(&self) -> u64 {
        self.words.address()
    }
}

/// What an executor stores for other nodes in a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Storing {
    /// Bytes of a place at a reader.
    pub(crate) place_bytes: u64,
    /// Whether a reader has a place for every rank, in rank order, and so for itself; else those of
    /// [`Places`].
    pub(crate) of_all: bool,
}

/// Where what goes along the rail lies.
#[derive(Clone, Copy, Debug)]
struct RailPlaces {
    first: u64,
    rank: Rank,
    nodes: Nodes,
}

impl RailPlaces {
    fn stored(self, peer: Rank, place_bytes: u64) -> u64 {
        let (node, own) =
            (Rank::new(self.nodes.node_of(peer)), Rank::new(self.nodes.node_of(self.rank)));
        self.first + u64::from(node.place_at(own).unwrap_or(0)) * place_bytes
    }

    /// The executor adds the half and the place that this rank has at the peer.
    fn data_of(self, peer: Rank, Storing { place_bytes, of_all }: Storing, half_bytes: u64) -> u64 {
        let relay = self.nodes.rank(self.nodes.node_of(peer), self.nodes.local_of(self.rank));
        let destination =
            || Places::new(self.nodes).destination(self.rank, relay).map_or(0, |(_, place)| place);
        let place = if of_all { self.rank.get() } else { destination() };
        self.stored(peer, place_bytes).wrapping_sub(half_bytes + u64::from(place) * place_bytes)
    }
}

/// Bytes of the places for the rail, of a workspace whose halves hold places for all peers.
fn stored_bytes(nodes: Nodes, size: WorkspaceSize) -> u64 {
    let peers = u128::from(nodes.world().peers().max(1));
    let bytes = (u128::from(size.half_bytes) * u128::from(nodes.others())).div_ceil(peers);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::layout::RowLayout;
    use flux_core::layout::slot_bytes;
    use flux_core::program::{Chunk, Schedule, Sink, TileProgram, WorkItem};
    use flux_core::{DType, OpKind, Problem, TileShape, WorldSize};

    /// What the executor stores for other nodes is what the rounds send, each byte in the place of
    /// its reader.
    #[test]
    fn partial_tiles_lie_where_rounds_send_them_from() {
        for (count, world) in [(2, 4), (3, 6), (4, 4), (2, 8)] {
            let (world, half_bytes) = (WorldSize::new(world).unwrap(), 1 << 22);
            let nodes = Nodes::new(world, count).unwrap();
            let problem = Problem::new(
                OpKind::GemmReduceScatter,
                300 * world.index(),
                520,
                8 * world.index(),
                DType::Bf16,
                world,
            )
            .unwrap();
            let schedule =
                Schedule { chunk: Chunk::Tiles(4), ..Schedule::of(TileShape::new(128, 128, 64)) };
            for rank in world.ranks() {
                let program = TileProgram::build_across(&problem, rank, &schedule, nodes).unwrap();
                let (slot, place) = (slot_bytes(&problem, program.tile), program.place_bytes());
                let size = program.workspace();
                let places = RailPlaces { first: 1 << 40, rank, nodes };
                let mut sent = Vec::new();
                for round in program.rounds().unwrap() {
                    let first = places.stored(round.sent.peer, place) + round.offset;
                    sent.extend((0..round.bytes / slot).map(|tile| first + tile * slot));
                }
                let crossing = program.items.iter().filter(|item| {
                    item.sink == Sink::Send && !nodes.together(rank, Rank::new(item.dest))
                });
                // As the kernel adds it up.
                let store = |item: &WorkItem| {
                    places
                        .data_of(
                            Rank::new(item.dest),
                            Storing { place_bytes: place, of_all: false },
                            half_bytes,
                        )
                        .wrapping_add(half_bytes + u64::from(item.slot) * slot)
                };
                let mut stored: Vec<u64> = crossing.map(store).collect();
                sent.sort_unstable();
                stored.sort_unstable();
                assert_eq!(stored, sent, "{nodes}, rank {rank}");
                let end = (1 << 40) + stored_bytes(nodes, size);
                assert!(
                    stored.windows(2).all(|pair| pair[0] + slot <= pair[1])
                        && stored.iter().all(|at| at + slot <= end)
                );
            }
        }
    }

    /// The same of rows that are scattered, which a kernel stores from the place that it has, by
    /// its number, at each owner.
    #[test]
    fn rows_of_all_places_lie_where_rounds_send_them_from() {
        let ops = [OpKind::GemmReduceScatter, OpKind::GemmAllReduce];
        for (world, op) in [2, 3, 8].into_iter().flat_map(|world| ops.map(|op| (world, op))) {
            let (world, half_bytes) = (WorldSize::new(world).unwrap(), 1 << 22);
            let nodes = Nodes::apart(world);
            let problem =
                Problem::new(op, 30 * world.index(), 520, 8 * world.index(), DType::Bf16, world)
                    .unwrap();
            let schedule =
                Schedule { rows: RowLayout::Flattened, ..Schedule::of(TileShape::new(64, 64, 64)) };
            for rank in world.ranks() {
                let program = TileProgram::build_across(&problem, rank, &schedule, nodes).unwrap();
                let (place, places) =
                    (program.place_bytes(), RailPlaces { first: 1 << 40, rank, nodes });
                let storing = Storing { place_bytes: place, of_all: true };
                let mut sent = Vec::new();
                for round in program.rounds().unwrap() {
                    assert_eq!((round.offset, round.bytes), (0, place));
                    // As the kernel adds it up.
                    let stored = places
                        .data_of(round.sent.peer, storing, half_bytes)
                        .wrapping_add(half_bytes + u64::from(rank.get()) * place);
                    assert_eq!(
                        stored,
                        places.stored(round.sent.peer, place),
                        "rank {rank} for {}",
                        round.sent.peer
                    );
                    sent.push(stored);
                }
                sent.sort_unstable();
                let end = (1 << 40) + stored_bytes(nodes, program.workspace());
                assert!(
                    sent.windows(2).all(|pair| pair[0] + place <= pair[1])
                        && sent.iter().all(|at| at + place <= end)
                );
                assert_eq!(sent.len(), world.index() - 1);
            }
        }
    }

    #[test]
    fn the_places_of_the_rail_are_their_part_of_a_half() {
        let nodes = |world, count| Nodes::new(WorldSize::new(world).unwrap(), count).unwrap();
        let size =
            |places: u64| WorkspaceSize { half_bytes: places * 1000, signals: 0, counters: 0 };
        assert_eq!(stored_bytes(nodes(8, 8), size(7)), 7000, "all peers");
        assert_eq!(stored_bytes(nodes(8, 2), size(7)), 1000);
        assert_eq!(stored_bytes(nodes(6, 3), size(5)), 2000);
        assert_eq!(
            (stored_bytes(nodes(4, 1), size(3)), stored_bytes(nodes(1, 1), size(0))),
            (0, 0)
        );
        let odd = WorkspaceSize { half_bytes: 3001, ..size(0) };
        assert!(stored_bytes(nodes(4, 2), odd) >= 1000);
        assert!(
            stored_bytes(nodes(16, 8), WorkspaceSize { half_bytes: u64::MAX, ..odd }) < u64::MAX
        );
    }
}
