//! Violations of the rules of tile programs.

use crate::Rank;
use std::fmt;
use std::ops::Range;

/// A record of a program, by its index in its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// An item.
    Item(usize),
    /// An entry of the await list.
    Await(usize),
    /// A transfer.
    Transfer(usize),
    /// A forward.
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
    /// A shard.
    Shard(u32),
    /// All shards, with flattened rows.
    AllShards,
    /// The rows of the own `y`, reduced from scattered rows.
    Reduced,
    /// The rows of the own `y` that peers have finished.
    Copied,
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard(shard) => write!(f, "shard {shard}"),
            Self::AllShards => f.write_str("the shards"),
            Self::Reduced => f.write_str("the reduced rows"),
            Self::Copied => f.write_str("the peers' rows"),
        }
    }
}

/// A broken rule and its place.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The programs are not those of all ranks of one call, in rank order.
    #[error("program {index} differs from the first in {what}, or is not that of its place")]
    Disagreement {
        /// Position in the list of programs.
        index: usize,
        /// What differs.
        what: &'static str,
    },
    /// What a program says of the call as a whole fits no call.
    #[error("rank {rank}: its {what} fits no call of the problem")]
    Header {
        /// The program's rank.
        rank: Rank,
        /// What does not fit.
        what: &'static str,
    },
    /// The number of programs is not the number of ranks.
    #[error("{programs} programs of a world of {world}: give one for each rank, in rank order")]
    Count {
        /// Number of programs.
        programs: usize,
        /// Ranks by the first program, or 1.
        world: usize,
    },
    /// A field reaches outside the problem, the world or the workspace.
    #[error("rank {rank}, {record}: {field} = {value} is not below {limit}")]
    OutOfBounds {
        /// The program's rank.
        rank: Rank,
        /// The record.
        record: Record,
        /// The field, or the end of the range that it starts.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The exclusive limit.
        limit: u64,
    },
    /// A record does not have the form of its operation.
    #[error("rank {rank}, {record}: {what}")]
    Form {
        /// The program's rank.
        rank: Rank,
        /// The record.
        record: Record,
        /// The broken condition.
        what: &'static str,
    },
    /// Elements of the output are computed by no item.
    #[error("rank {rank} leaves {missing} elements of {output} without an item")]
    NotCovered {
        /// The program's rank.
        rank: Rank,
        /// The output.
        output: Output,
        /// Elements that no item computes.
        missing: u64,
    },
    /// Elements of the output are computed by two items.
    #[error("rank {rank} computes a part of {output} in item {first} and again in item {second}")]
    CoveredTwice {
        /// The program's rank.
        rank: Rank,
        /// The output.
        output: Output,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// An item is not a tile of the layout, or a reduction not a column of tiles.
    #[error(
        "rank {rank}, item {item} has {what} {}..{}, the tile there {}..{}",
        found.start,
        found.end,
        tile.start,
        tile.end
    )]
    OffGrid {
        /// The program's rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// `rows` or `columns`.
        what: &'static str,
        /// The item's range.
        found: Range<u32>,
        /// The tile's range.
        tile: Range<u32>,
    },
    /// An item adds fewer partial tiles than the program adds in the mainloop.
    #[error(
        "rank {rank}, item {item} adds {partials} partial tiles, where the mainloop adds \
         {in_mainloop}"
    )]
    FewerThanInMainloop {
        /// The program's rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// Partial tiles of the item.
        partials: u32,
        /// Mainloop partial tiles of the program.
        in_mainloop: u32,
    },
    /// An item with mainloop partial tiles multiplies a part of `k` only.
    #[error(
        "rank {rank}, item {item} adds partial tiles in its mainloop, but multiplies {k_steps} of \
         {all} steps along k"
    )]
    InMainloopOfPart {
        /// The program's rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// Its steps.
        k_steps: u32,
        /// Steps of the tile.
        all: u32,
    },
    /// Items of one counter raise different signals.
    #[error(
        "rank {rank}: items {first} and {second} share counter {counter} but not the signal and \
         the count"
    )]
    CounterShared {
        /// The program's rank.
        rank: Rank,
        /// The counter.
        counter: u32,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A counter reaches its count too early or never.
    #[error("rank {rank}: {items} items count to {raise_after}, the last of them item {item}")]
    Miscounted {
        /// The program's rank.
        rank: Rank,
        /// The last item that counts.
        item: usize,
        /// Items of the counter, 1 without one.
        items: u32,
        /// The count at which the signal is raised.
        raise_after: u32,
    },
    /// A signal would be raised twice in a call.
    #[error(
        "signal {signal} of rank {owner} is raised by rank {}, {}, and by rank {}, {}",
        first.0,
        first.1,
        second.0,
        second.1
    )]
    RaisedTwice {
        /// The pad's rank.
        owner: Rank,
        /// The signal.
        signal: u32,
        /// One raising record.
        first: (Rank, Record),
        /// The other.
        second: (Rank, Record),
    },
    /// A signal is awaited that nobody raises.
    #[error("rank {rank}, item {item} awaits signal {signal} of rank {peer}, which nobody raises")]
    NeverRaised {
        /// The waiting rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// The signal.
        signal: u32,
        /// The rank that should raise it.
        peer: Rank,
    },
    /// A wait that times out would name the wrong rank.
    #[error(
        "rank {rank}, item {item} awaits signal {signal} of rank {named}, but rank {raiser} raises \
         it"
    )]
    WrongPeer {
        /// The waiting rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// The signal.
        signal: u32,
        /// The rank that should raise it.
        named: Rank,
        /// The rank that raises it.
        raiser: Rank,
    },
    /// A signal is raised that nobody awaits.
    #[error("rank {}, {} raises signal {signal} of rank {owner}, which nobody awaits", by.0, by.1)]
    NeverAwaited {
        /// The pad's rank.
        owner: Rank,
        /// The signal.
        signal: u32,
        /// The raising record.
        by: (Rank, Record),
    },
    /// A slot, a split-K slot or an element of a gather place is written twice in a call.
    #[error(
        "{what} {index} of rank {owner} is written by rank {}, {}, and by rank {}, {}",
        first.0,
        first.1,
        second.0,
        second.1
    )]
    WrittenTwice {
        /// The memory's rank.
        owner: Rank,
        /// `slot`, `split-K slot` or `gather row`.
        what: &'static str,
        /// The slot, or the place times `m_shard` plus the row.
        index: u32,
        /// One writer.
        first: (Rank, Record),
        /// The other.
        second: (Rank, Record),
    },
    /// An item reads data without awaiting its signal.
    #[error(
        "rank {rank}, item {item} reads {what} {index}, but awaits nothing that says rank {peer} \
         has written it"
    )]
    Unguarded {
        /// The reading rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// `slot`, `split-K slot`, `gather row`, `scattered row` or `result`.
        what: &'static str,
        /// The slot, or the place times `m_shard` plus the row, or the row of the own `y`.
        index: u32,
        /// The rank that should have written it.
        peer: Rank,
    },
    /// A forward reads rows that its signal does not announce.
    #[error(
        "rank {rank}, forward {forward} passes on rows of place {place}, which signal {signal} \
         does not announce"
    )]
    UnguardedForward {
        /// The mover's rank.
        rank: Rank,
        /// Its forward.
        forward: usize,
        /// The place.
        place: u32,
        /// The awaited signal.
        signal: u32,
    },
    /// A reduction adds a partial result of another part of the output.
    #[error(
        "rank {rank}, item {item} adds slot {slot}, where rank {peer} leaves another part of the \
         shard"
    )]
    WrongPartial {
        /// The reading rank.
        rank: Rank,
        /// The item.
        item: usize,
        /// The slot.
        slot: u32,
        /// The rank that wrote it.
        peer: Rank,
    },
    /// A step along `k` is multiplied by no item of a tile, or by two.
    #[error("rank {rank}: the parts of the tile of item {item} do not meet at step {step} along k")]
    KNotCovered {
        /// The program's rank.
        rank: Rank,
        /// The item that finishes the tile.
        item: usize,
        /// End of the parts before it.
        step: u32,
    },
    /// An item adds a part that no item fills.
    #[error("rank {rank}, item {item} adds split-K slot {part}, which no item fills")]
    PartMissing {
        /// The program's rank.
        rank: Rank,
        /// The reading item.
        item: usize,
        /// The split-K slot.
        part: u32,
    },
    /// A part is filled that no item adds.
    #[error("rank {rank}, item {item} fills split-K slot {part}, which no item adds")]
    PartNotRead {
        /// The program's rank.
        rank: Rank,
        /// The partial item.
        item: usize,
        /// The split-K slot.
        part: u32,
    },
    /// Two items add the same part.
    #[error("rank {rank}: items {first} and {second} both add split-K slot {part}")]
    PartReadTwice {
        /// The program's rank.
        rank: Rank,
        /// The split-K slot.
        part: u32,
        /// One item.
        first: usize,
        /// The other.
        second: usize,
    },
    /// An item adds a part of another tile.
    #[error(
        "rank {rank}, item {item} adds split-K slot {part}, where item {partial_item} leaves \
         another tile"
    )]
    WrongPart {
        /// The program's rank.
        rank: Rank,
        /// The reading item.
        item: usize,
        /// The split-K slot.
        part: u32,
        /// The partial item.
        partial_item: usize,
    },
    /// Ranks wait for each other in a circle.
    #[error(
        "deadlock: rank {rank}, item {item} awaits signal {signal} of rank {peer}, which waits in \
         turn"
    )]
    Deadlock {
        /// A rank of the circle.
        rank: Rank,
        /// The waiting item.
        item: usize,
        /// The awaited signal.
        signal: u32,
        /// The rank that should raise it.
        peer: Rank,
    },
    /// Two ranks would send to the same destination at the same time.
    #[error("ranks {first} and {second} both send to rank {dest} at step {step}")]
    SameDestination {
        /// The transfers' step, or the position in the list of items.
        step: usize,
        /// The destination.
        dest: Rank,
        /// One sender.
        first: Rank,
        /// The other.
        second: Rank,
    },
}

crate::debug_is_text!(Violation);
