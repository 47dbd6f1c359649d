//! How a set of tile programs can be wrong.

use crate::Rank;
use std::fmt;
use std::ops::Range;

/// One record of a program, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// Of the items.
    Item(usize),
    /// Of the await list.
    Await(usize),
    /// Of the transfers.
    Transfer(usize),
    /// Of the forwards.
    Forward(usize),
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Item(index) => write!(f, "item {index}"),
            Self::Await(index) => write!(f, "await entry {index}"),
            Self::Transfer(index) => write!(f, "transfer {index}"),
            Self::Forward(index) => write!(f, "forward {index}"),
        }
    }
}

/// A matrix that a rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// The rows of one shard.
    Shard(u32),
    /// The rows of all shards, in tiles that span them.
    AllShards,
    /// The rows of the own shard, reduced from what was scattered.
    Folded,
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(shard) => write!(f, "shard {shard}"),
            Self::AllShards => f.write_str("the shards"),
            Self::Folded => f.write_str("the folded shard"),
        }
    }
}

/// The rule that a set of tile programs breaks, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The programs are not those of all ranks of one call, in rank order.
    #[error("program {index} differs in {what} from what the call needs")]
    Disagreement {
        /// Position in the list of programs.
        index: usize,
        /// What differs.
        what: &'static str,
    },
    /// There are more or fewer programs than ranks.
    #[error("{programs} programs of a world of {world}: give one for each rank, in rank order")]
    Count {
        /// How many there are.
        programs: usize,
        /// How many ranks the first says that there are; 1 where there is none.
        world: usize,
    },
    /// A field reaches outside the problem, the world or the workspace.
    #[error("rank {rank}, {record}: {field} = {value} is not below {limit}")]
    OutOfBounds {
        /// Whose program.
        rank: Rank,
        /// Which record.
        record: Record,
        /// The field, or the end of the range that starts there.
        field: &'static str,
        /// What it is.
        value: u64,
        /// What it must be below.
        limit: u64,
    },
    /// A record is not what the operation has at this place.
    #[error("rank {rank}, {record}: {what}")]
    Form {
        /// Whose program.
        rank: Rank,
        /// Which record.
        record: Record,
        /// What is wrong.
        what: &'static str,
    },
    /// Elements of the output are computed by no item.
    #[error("rank {rank} leaves {missing} elements of {output} without an item")]
    NotCovered {
        /// Whose program.
        rank: Rank,
        /// Of which output.
        output: Output,
        /// Elements that no item computes.
        missing: u64,
    },
    /// Elements of the output are computed by two items.
    #[error("rank {rank} computes a part of {output} in item {first} and again in item {second}")]
    CoveredTwice {
        /// Whose program.
        rank: Rank,
        /// Of which output.
        output: Output,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// An item is no tile of the layout, or a reduction takes other columns than a column of tiles.
    #[error("rank {rank}, item {item} has {what} {}..{}, the tile there {}..{}", found.start, found.end, tile.start, tile.end)]
    OffGrid {
        /// Whose program.
        rank: Rank,
        /// The item.
        item: usize,
        /// `rows` or `columns`.
        what: &'static str,
        /// Those of the item.
        found: Range<u32>,
        /// Those of the tile in which they begin.
        tile: Range<u32>,
    },
    /// An item adds fewer partial tiles than the program has early.
    #[error("rank {rank}, item {item} adds {partials} partial tiles, where {in_mainloop} are added during the multiplication")]
    FewerThanInMainloop {
        /// Whose program.
        rank: Rank,
        /// The item.
        item: usize,
        /// Partial tiles that it adds.
        partials: u32,
        /// Those of the program that are early.
        in_mainloop: u32,
    },
    /// An item adds partial tiles during the multiplication and leaves steps along `k` to others,
    /// though the steps at which it adds are of all of `k`.
    #[error("rank {rank}, item {item} adds partial tiles during the multiplication, but multiplies {k_steps} of {all} steps along k")]
    InMainloopOfPart {
        /// Whose program.
        rank: Rank,
        /// The item.
        item: usize,
        /// Steps that it multiplies.
        k_steps: u32,
        /// Steps of the tile.
        all: u32,
    },
    /// Items of one counter raise different signals.
    #[error("rank {rank}: items {first} and {second} share counter {counter} but not the signal and the count")]
    CounterShared {
        /// Whose program.
        rank: Rank,
        /// The counter.
        counter: u32,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A counter never, or too early, reaches its count.
    #[error("rank {rank}: {items} items count to {raise_after}, the last of them item {item}")]
    Miscounted {
        /// Whose program.
        rank: Rank,
        /// The last item that counts.
        item: usize,
        /// Items of the counter, 1 without one.
        items: u32,
        /// The count at which the signal is raised.
        raise_after: u32,
    },
    /// A signal would be raised twice in a call.
    #[error("signal {signal} of rank {owner} is raised by rank {}, {}, and by rank {}, {}", first.0, first.1, second.0, second.1)]
    RaisedTwice {
        /// Whose pad.
        owner: Rank,
        /// The signal.
        signal: u32,
        /// One that raises it.
        first: (Rank, Record),
        /// The other.
        second: (Rank, Record),
    },
    /// A signal is awaited that nobody raises.
    #[error("rank {rank}, item {item} awaits signal {signal} of rank {peer}, which nobody raises")]
    NeverRaised {
        /// Who waits.
        rank: Rank,
        /// Its item.
        item: usize,
        /// The signal.
        signal: u32,
        /// Who should raise it.
        peer: Rank,
    },
    /// A wait that times out would name the wrong rank.
    #[error("rank {rank}, item {item} awaits signal {signal} of rank {named}, but rank {raiser} raises it")]
    WrongPeer {
        /// Who waits.
        rank: Rank,
        /// Its item.
        item: usize,
        /// The signal.
        signal: u32,
        /// Who should raise it.
        named: Rank,
        /// Who does.
        raiser: Rank,
    },
    /// A signal is raised that nobody awaits.
    #[error("rank {}, {} raises signal {signal} of rank {owner}, which nobody awaits", by.0, by.1)]
    NeverAwaited {
        /// Whose pad.
        owner: Rank,
        /// The signal.
        signal: u32,
        /// Who raises it.
        by: (Rank, Record),
    },
    /// A slot, a part slot, or an element of a gather place, would be written twice in a call.
    #[error("{what} {index} of rank {owner} is written by rank {}, {}, and by rank {}, {}", first.0, first.1, second.0, second.1)]
    WrittenTwice {
        /// Whose memory.
        owner: Rank,
        /// `slot`, `part slot` or `gather row`.
        what: &'static str,
        /// The slot, or the place times `m_shard` plus the row.
        index: u32,
        /// One writer.
        first: (Rank, Record),
        /// The other.
        second: (Rank, Record),
    },
    /// An item reads from a place or a slot what is not announced by a signal that it awaits.
    #[error("rank {rank}, item {item} reads {what} {index}, but awaits nothing that says rank {peer} has written it")]
    Unguarded {
        /// Who reads.
        rank: Rank,
        /// Its item.
        item: usize,
        /// `slot`, `part slot`, `gather row` or `scattered row`.
        what: &'static str,
        /// The slot, or the place times `m_shard` plus the row, or the row of the own shard.
        index: u32,
        /// Who should have written it.
        peer: Rank,
    },
    /// A mover passes on what is not announced by the signal that it awaits.
    #[error("rank {rank}, forward {forward} passes on rows of place {place}, which signal {signal} does not announce")]
    UnguardedForward {
        /// Whose mover.
        rank: Rank,
        /// Its forward.
        forward: usize,
        /// The place.
        place: u32,
        /// What is awaited.
        signal: u32,
    },
    /// A reduction adds a partial result of another part of the output.
    #[error("rank {rank}, item {item} adds slot {slot}, where rank {peer} leaves another part of the shard")]
    WrongPartial {
        /// Who reads.
        rank: Rank,
        /// Its item.
        item: usize,
        /// The slot.
        slot: u32,
        /// Who wrote it.
        peer: Rank,
    },
    /// A step along `k` is multiplied by no item of a tile, or by two.
    #[error("rank {rank}: the parts of the tile of item {item} do not meet at step {step} along k")]
    KNotCovered {
        /// Whose program.
        rank: Rank,
        /// The item that finishes the tile.
        item: usize,
        /// Where the parts before end.
        step: u32,
    },
    /// An item adds a part that nobody leaves.
    #[error("rank {rank}, item {item} adds part slot {part}, which no item fills")]
    PartMissing {
        /// Whose program.
        rank: Rank,
        /// The item that reads.
        item: usize,
        /// The part slot.
        part: u32,
    },
    /// A part is left that no item adds.
    #[error("rank {rank}, item {item} fills part slot {part}, which no item adds")]
    PartNotRead {
        /// Whose program.
        rank: Rank,
        /// The item that lends.
        item: usize,
        /// The part slot.
        part: u32,
    },
    /// Two items add the same part.
    #[error("rank {rank}: items {first} and {second} both add part slot {part}")]
    PartReadTwice {
        /// Whose program.
        rank: Rank,
        /// The part slot.
        part: u32,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// An item adds a part of another tile.
    #[error("rank {rank}, item {item} adds part slot {part}, where item {partial_item} leaves another tile")]
    WrongPart {
        /// Whose program.
        rank: Rank,
        /// The item that reads.
        item: usize,
        /// The part slot.
        part: u32,
        /// The item that lends.
        partial_item: usize,
    },
    /// With programs walked in order, ranks wait for each other in a circle.
    #[error("deadlock: rank {rank}, item {item} awaits signal {signal} of rank {peer}, which waits in turn")]
    Deadlock {
        /// A rank of the circle.
        rank: Rank,
        /// Where it waits.
        item: usize,
        /// For what.
        signal: u32,
        /// From whom.
        peer: Rank,
    },
    /// Two ranks would send to the same destination at the same time.
    #[error("ranks {first} and {second} both send to rank {dest} at step {step}")]
    SameDestination {
        /// The step: of the transfers, or the position in the list of items.
        step: usize,
        /// The destination.
        dest: Rank,
        /// One sender.
        first: Rank,
        /// The other.
        second: Rank,
    },
}
