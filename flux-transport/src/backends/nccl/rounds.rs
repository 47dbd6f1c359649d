//! The rounds of one call beside its kernel, on the side stream: the messages of as many peers at
//! once as the call says.
//!
//! Invariant: a signal of the own pad gets the word that came with its chunk, after the chunk. The
//! sender's word is the epoch only if the chunk is whole. For stored chunks it is the flag that the
//! kernel raised. For the caller's rows it is the number of the call that the device has, which
//! stands still with the first failure. A stream that is released because a call has failed sends
//! other words: a torn chunk, or one computed from a failed call, is never sent as whole.
//!
//! Only where messages are aborted may a word have come before its chunk. By then this rank's call
//! has failed, as the watchdog sees to. Nothing is received before this stream asks for it, after
//! the call that read the half before.

use super::messages::Use;
use super::outbox::Outbox;
use super::progress::Step;
use super::watch::CallWatch;
use crate::backends::error::TransportError;
use crate::backends::jobs::{MessageRounds, RowTransfers, Source};
use flux_core::Rank;
use flux_core::layout::{WorkspaceSize, control, signal_offset};
use flux_core::program::{Round, groups};
use flux_core::signal::Epoch;
use flux_cuda::{
    CudaDevice, CudaError, RowCopy, Rows, WordOp, copy_async, copy_out_async, copy_rows_async,
    host_size, words_async,
};

/// Bytes of a word.
const WORD: usize = 4;

/// Why a call whose data messages carry cannot be captured.
pub(crate) const NO_GRAPHS: &str =
    "what carries its messages cannot be replayed; make the call outside the capture";

/// The memory of a rank, for what messages bring and take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    /// The own data region.
    pub(crate) data: u64,
    /// The own pad.
    pub(crate) pad: u64,
    /// The own control block.
    pub(crate) control: u64,
    pub(crate) size: WorkspaceSize,
    pub(crate) rank: Rank,
    pub(crate) outbox: &'a Outbox,
}

impl Memory<'_> {
    /// Where the half of call `epoch` begins.
    pub(crate) fn half(&self, epoch: Epoch) -> u64 {
        self.data + epoch.half() as u64 * self.size.half_stride()
    }
}

/// Enqueues all messages of the call with number `epoch` on `stream`; `arrived` is told of each
/// round when what it brings is there as far as the stream is concerned.
///
/// # Safety
/// The exchange was checked against the workspace; `stream` is ordered after the call before and
/// after the caller's rows, which stay until it is past what is enqueued here.
pub(crate) unsafe fn enqueue_rounds(
    device: &CudaDevice,
    stream: usize,
    watch: &CallWatch,
    at: Memory<'_>,
    exchange: &MessageRounds<'_>,
    epoch: Epoch,
    mut arrived: impl FnMut(&Round) -> Result<(), TransportError>,
) -> Result<(), TransportError> {
    let &MessageRounds { source, rounds, peers, .. } = exchange;
    let Memory { pad, control, outbox, .. } = at;
    let _current = device.enter()?;
    let note = |step| {
        // SAFETY: a word of pinned memory that outlives the stream's work.
        unsafe { words_async(device, [watch.note(epoch, step)], stream) }
    };
    let stored = matches!(source, Source::Stored { .. });
    watch.begin_rounds(epoch);
    note(Step::Begun)?;
    if !stored {
        let width = WORD as u64;
        let row = |address| Rows { address, pitch: width };
        let (to, from) = (row(outbox.flags().number_on_host()), row(control + control::EPOCH));
        // Before the call's kernel can close it, which waits for words that this stream brings.
        // SAFETY: the number of the call in the control block, and a word of pinned memory that
        // outlives the stream's work.
        unsafe { copy_out_async(device, &RowCopy { to, from, rows: 1, width }, stream) }?;
    }
    // SAFETY: the caller promised the rows.
    let rows = unsafe { rows_of(device, stream, &at, exchange) }?;
    let mut number = 0;
    for group in groups(rounds, peers) {
        if stored {
            let flags = group.iter().map(|round| WordOp::Await {
                address: outbox.flag(round.sent.peer, round.sent.signal, epoch),
                value: epoch.get(),
            });
            // SAFETY: flags of the outbox.
            unsafe { words_async(device, flags, stream) }?;
        }
        watch.group(Use::Overlapped, stream, |messages| {
            group.iter().try_for_each(|round| {
                let Ends { chunk, to, place, from } = Ends::new(&at, exchange, round, rows, epoch);
                let word = if stored {
                    outbox.flag(round.sent.peer, round.sent.signal, epoch)
                } else {
                    outbox.flags().number()
                };
                // SAFETY: chunks and words are in the workspace, or the caller's rows.
                unsafe {
                    // A chunk without rows is its signal alone, which both sides know.
                    if round.sent.bytes > 0 {
                        messages.send(chunk, host_size(round.sent.bytes), to)?;
                    }
                    messages.send(word, WORD, to)?;
                    if round.received.bytes > 0 {
                        messages.receive(place, host_size(round.received.bytes), from)?;
                    }
                    messages.receive(outbox.word(round.received.signal), WORD, from)
                }
            })
        })?;
        number += group.len();
        for words in words_of(group) {
            let (from, to) =
                (outbox.word(words.signal), pad + signal_offset(words.signal, epoch.half()));
            let pitch = signal_offset(words.apart, 0) - signal_offset(0, 0);
            // SAFETY: all words are in the workspace.
            unsafe {
                if words.count == 1 {
                    copy_async(device, to, from, WORD, stream)
                } else {
                    let width = WORD as u64;
                    let words = RowCopy {
                        to: Rows { address: to, pitch },
                        from: Rows { address: from, pitch: width * u64::from(words.apart) },
                        rows: words.count as u64,
                        width,
                    };
                    copy_rows_async(device, &words, stream)
                }
            }?;
        }
        group.iter().try_for_each(&mut arrived)?;
        // Once, after the words: the kernel waits for them, and they would wait for each write
        // before.
        if number < rounds.len() {
            note(Step::Messages(number - 1))?;
        }
    }
    Ok(note(Step::Ended)?)
}

/// From where messages take the caller's rows, if they do: where those have gaps, copied without
/// them on `stream` first, as a message is one range of memory.
///
/// # Safety
/// As [`enqueue_rounds`], of the rows.
unsafe fn rows_of(
    device: &CudaDevice,
    stream: usize,
    at: &Memory<'_>,
    exchange: &MessageRounds<'_>,
) -> Result<Option<u64>, CudaError> {
    let Source::Rows(RowTransfers { x, row_stride, row_bytes, rows, .. }) = exchange.source else {
        return Ok(None);
    };
    if row_stride == row_bytes || row_bytes == 0 {
        return Ok(Some(x));
    }
    // The outbox holds a place for each of the rail, so one for the shard.
    let to = Rows { address: at.outbox.stored(at.rank, 0), pitch: row_bytes };
    let from = Rows { address: x, pitch: row_stride };
    // SAFETY: the caller's promise.
    unsafe { copy_rows_async(device, &RowCopy { to, from, rows, width: row_bytes }, stream) }?;
    Ok(Some(to.address))
}

/// Where a round's chunk is sent from and to which node, where the other's comes and from which.
#[derive(Clone, Copy, Debug)]
struct Ends {
    chunk: u64,
    to: u32,
    place: u64,
    from: u32,
}

impl Ends {
    /// In call `epoch`, of the caller's rows or of what was stored.
    fn new(
        at: &Memory<'_>,
        exchange: &MessageRounds<'_>,
        round: &Round,
        rows: Option<u64>,
        epoch: Epoch,
    ) -> Self {
        let &Round { offset, sent, received, .. } = round;
        let (nodes, place_bytes) = (at.outbox.nodes(), exchange.place_bytes);
        let place = match &exchange.source {
            Source::Rows(rows) => rows.place(received.place),
            Source::Stored { .. } => u64::from(received.place) * place_bytes,
        };
        let half = at.half(epoch);
        Self {
            chunk: rows.unwrap_or_else(|| at.outbox.stored(sent.peer, place_bytes)) + offset,
            // A rail has a rank in each node.
            to: nodes.node_of(sent.peer),
            place: half + place + offset,
            from: nodes.node_of(received.peer),
        }
    }
}

/// Words that one copy takes to the pad: so many, of signals that are equally far apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    signal: u32,
    apart: u32,
    count: usize,
}

/// What the words of a group are copied as: all at once where that can be, as a copy takes a few us
/// whatever its size.
fn words_of(group: &[Round]) -> Vec<Words> {
    let mut signals: Vec<u32> = group.iter().map(|round| round.received.signal).collect();
    signals.sort_unstable();
    let one = |&signal: &u32| Words { signal, apart: 1, count: 1 };
    match signals[..] {
        [signal, next, ..] if signals.windows(2).all(|pair| pair[1] - pair[0] == next - signal) => {
            vec![Words { signal, apart: next - signal, count: signals.len() }]
        }
        _ => signals.iter().map(one).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::layout::RowLayout;
    use flux_core::program::{Chunk, End, Schedule, TileProgram, in_batches_of};
    use flux_core::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// Chunks by source and reader, in order: the group that each goes in, and its bytes.
    type Ways = BTreeMap<(u32, u32), Vec<(usize, u64)>>;

    /// Notes what `rank` sends and receives in a call with these rounds.
    fn note(rank: Rank, rounds: &[Round], peers: u32, (sent, received): (&mut Ways, &mut Ways)) {
        for (number, group) in groups(rounds, peers).enumerate() {
            for round in group {
                sent.entry((rank.get(), round.sent.peer.get()))
                    .or_default()
                    .push((number, round.sent.bytes));
                received
                    .entry((round.received.peer.get(), rank.get()))
                    .or_default()
                    .push((number, round.received.bytes));
            }
        }
    }

    fn nodes(count: u32, of: u32) -> Nodes {
        Nodes::new(WorldSize::new(count * of).unwrap(), count).unwrap()
    }

    /// What all ranks send and receive in a call of so many rows.
    fn messages(
        op: OpKind,
        nodes: Nodes,
        rows: usize,
        (chunk, group, flattened): (u32, u32, bool),
        peers: u32,
    ) -> (Ways, Ways) {
        let world = nodes.world();
        let problem =
            Problem::new(op, rows, 16 * world.index(), 16 * world.index(), DType::Bf16, world)
                .unwrap();
        let flattened = flattened && !nodes.are_mixed();
        let chunk = if flattened && op == OpKind::GemmReduceScatter {
            Chunk::Shard
        } else {
            Chunk::Tiles(chunk)
        };
        let rows = if flattened { RowLayout::Flattened } else { RowLayout::PerShard };
        let schedule = Schedule { chunk, group, rows, ..Schedule::of(TileShape::new(2, 16, 16)) };
        let (mut sent, mut received) = (Ways::new(), Ways::new());
        for rank in world.ranks() {
            let rounds = TileProgram::build_across(&problem, rank, &schedule, nodes)
                .unwrap()
                .rounds()
                .unwrap();
            // As ops have them.
            let rows = op == OpKind::AllGatherGemm && !nodes.are_mixed();
            let rounds = if rows { in_batches_of(&rounds, peers) } else { rounds };
            note(rank, &rounds, peers, (&mut sent, &mut received));
        }
        (sent, received)
    }

    fn group(signals: &[u32]) -> Vec<Round> {
        let end = |&signal: &u32| End { peer: Rank::new(0), place: 0, signal, bytes: 8 };
        signals
            .iter()
            .map(|signal| Round {
                step: 1,
                offset: 0,
                bytes: 8,
                sent: end(signal),
                received: end(signal),
            })
            .collect()
    }

    #[test]
    fn the_words_of_a_chunk_from_all_peers_are_one_copy() {
        assert_eq!(words_of(&group(&[9, 1, 5])), [Words { signal: 1, apart: 4, count: 3 }]);
        assert_eq!(words_of(&group(&[7, 2])), [Words { signal: 2, apart: 5, count: 2 }]);
        assert_eq!(words_of(&group(&[3])), [Words { signal: 3, apart: 1, count: 1 }]);
        assert_eq!(words_of(&group(&[0, 1, 3])).len(), 3);
    }

    proptest! {
        /// NCCL matches the messages from one rank to another by their order alone.
        #[test]
        fn each_peer_receives_what_is_sent_in_the_same_group(
            op in prop_oneof![Just(OpKind::AllGatherGemm), Just(OpKind::GemmReduceScatter)],
            (count, of) in prop_oneof![(2..=16_u32, Just(1)), (2..=4_u32, 2..=4_u32)],
            rows in 1..=99_usize, (chunk, group, flattened) in (1..=4_u32, 1..=17_u32, any::<bool>()), peers in 1..=16_u32
        ) {
            let nodes = nodes(count, of);
            let (sent, received) = messages(op, nodes, rows, (chunk, group, flattened), peers);
            prop_assert_eq!(sent.len(), nodes.world().index() * nodes.others() as usize);
            prop_assert_eq!(sent, received);
        }

        #[test]
        fn every_word_is_copied_once(
            mut signals in prop::collection::btree_set(0..40_u32, 1..8).prop_map(|set| set.into_iter().collect::<Vec<_>>()),
            turn in 0..8_usize,
        ) {
            let turn = turn % signals.len();
            signals.rotate_left(turn);
            let mut copied: Vec<u32> =
                words_of(&group(&signals)).iter().flat_map(|words| (0..words.count).map(|i| words.signal + i as u32 * words.apart)).collect();
            copied.sort_unstable();
            signals.sort_unstable();
            prop_assert_eq!(copied, signals);
        }
    }
}
