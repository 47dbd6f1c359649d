//! The signal protocol in every interleaving and with every stale read that the memory model
//! allows: `src/signal`, unchanged, over loom's atomics. Flawed signals, counters and tickets must
//! each be found.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p flux-core-loom --release`
#![cfg(loom)]

use flux_core::layout::{FaultRecord, WorkspaceSize, fault};
use flux_core::program::{NONE, WorkItem};
use flux_core::signal::{
    Control, Epoch, Left, Poisoned, Protocol, Word, Words, initialise, read_fault,
};
use flux_core::{Rank, WorldSize};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::ops::ControlFlow;

/// The flaw of a word.
#[derive(Clone, Copy, PartialEq)]
enum Flaw {
    None,
    /// Stores are not released.
    RelaxedStore,
    /// Read-modify-writes neither acquire nor release.
    RelaxedIncrement,
}

struct FlawedWord(AtomicU32, Flaw);

impl Word for FlawedWord {
    fn load_acquire(&self) -> u32 {
        self.0.load_acquire()
    }
    fn store_release(&self, value: u32) {
        if self.1 == Flaw::RelaxedStore {
            self.0.store(value, Ordering::Relaxed)
        } else {
            self.0.store_release(value)
        }
    }
    fn increment(&self) -> u32 {
        if self.1 == Flaw::RelaxedIncrement {
            self.0.fetch_add(1, Ordering::Relaxed)
        } else {
            self.0.increment()
        }
    }
    fn claim(&self, value: u32) -> bool {
        self.0.claim(value)
    }
}

/// Flaws by kind of word.
#[derive(Clone, Copy)]
struct Flaws {
    signal: Flaw,
    counter: Flaw,
    ticket: Flaw,
    calling: Flaw,
}
const SOUND: Flaws =
    Flaws { signal: Flaw::None, counter: Flaw::None, ticket: Flaw::None, calling: Flaw::None };

/// The last call before the wrap: a test's calls have epochs `u32::MAX`, 0 and 1.
const FIRST: Epoch = Epoch::new(u32::MAX);
const SIZE: WorkspaceSize = WorkspaceSize { half_bytes: 0, signals: 1, counters: 1 };
const SENDER: Rank = Rank::new(0);
const READER: Rank = Rank::new(1);

/// The words of one rank's pad and blocks.
struct Block {
    signals: [FlawedWord; 2],
    /// The peer's words about its calls of each half.
    calling: [[FlawedWord; 2]; 2],
    control: [FlawedWord; 4],
    counter: FlawedWord,
    fault: [FlawedWord; 16],
    abort: FlawedWord,
}

/// Two ranks; each half of a data region has a cell for each of the peer's workers.
struct RankMemory {
    blocks: [Block; 2],
    data: [[[UnsafeCell<u32>; 2]; 2]; 2],
}

/// The machine as one rank reaches it.
#[derive(Clone)]
struct RankWords(Arc<RankMemory>, Rank);

impl Words for RankWords {
    type Word = FlawedWord;
    fn signal(&self, owner: Rank, index: u32, half: usize) -> &FlawedWord {
        assert_eq!(index, 0);
        &self.0.blocks[owner.index()].signals[half]
    }
    fn calling(&self, owner: Rank, _of: Rank, half: usize) -> [&FlawedWord; 2] {
        self.0.blocks[owner.index()].calling[half].each_ref()
    }
    fn control(&self, word: Control) -> &FlawedWord {
        &self.0.blocks[self.1.index()].control[word as usize]
    }
    fn counter(&self, _index: u32) -> &FlawedWord {
        &self.0.blocks[self.1.index()].counter
    }
    fn fault(&self, index: u32) -> &FlawedWord {
        &self.0.blocks[self.1.index()].fault[index as usize]
    }
    fn abort(&self) -> &FlawedWord {
        &self.0.blocks[self.1.index()].abort
    }
}

fn machine(flaws: Flaws) -> [RankWords; 2] {
    let word = |flaw| FlawedWord(AtomicU32::new(0), flaw);
    let block = || Block {
        signals: std::array::from_fn(|_| word(flaws.signal)),
        calling: std::array::from_fn(|_| std::array::from_fn(|_| word(flaws.calling))),
        control: std::array::from_fn(|control| {
            word(if control == Control::Ticket as usize { flaws.ticket } else { Flaw::None })
        }),
        counter: word(flaws.counter),
        fault: std::array::from_fn(|_| word(Flaw::None)),
        abort: word(Flaw::None),
    };
    let data = std::array::from_fn(|_| {
        std::array::from_fn(|_| std::array::from_fn(|_| UnsafeCell::new(0)))
    });
    let machine = Arc::new(RankMemory { blocks: [block(), block()], data });
    let ranks = [SENDER, READER].map(|rank| RankWords(Arc::clone(&machine), rank));
    for words in &ranks {
        initialise(words, words.1, SIZE, FIRST);
    }
    ranks
}

fn patient(_looks: u64) -> ControlFlow<()> {
    thread::yield_now();
    ControlFlow::Continue(())
}

/// Explores every schedule with at most this many preemptions, loom's measure of depth.
fn explore(preemptions: usize, test: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(test);
}

/// Writes a worker's cell at the peer; the last of `workers` raises.
fn send(call: Protocol<'_, RankWords>, words: &RankWords, worker: usize, workers: u32) {
    let peer = Rank::new(1 - words.1.get());
    // SAFETY: none is claimed: loom checks whether the access is exclusive.
    words.0.data[peer.index()][call.half()][worker]
        .with_mut(|cell| unsafe { *cell = call.epoch().get() });
    let counter = if workers > 1 { 0 } else { NONE };
    let item = WorkItem {
        dest: peer.get(),
        raise: 0,
        counter,
        raise_after: workers,
        ..WorkItem::default()
    };
    call.complete(&item, [peer]).expect("nothing fails");
}

/// Awaits the signal and reads the cells of the peer's workers.
fn receive(call: Protocol<'_, RankWords>, words: &RankWords, workers: usize) {
    call.wait(0, Rank::new(1 - words.1.get()), patient).expect("nothing fails");
    for cell in &words.0.data[words.1.index()][call.half()][..workers] {
        // SAFETY: as in `send`.
        assert_eq!(
            cell.with(|cell| unsafe { *cell }),
            call.epoch().get(),
            "the payload of another call"
        );
    }
}

/// What a rank does in each of its calls.
#[derive(Clone, Copy, PartialEq)]
enum Part {
    Both,
    Sends,
    Receives,
}

/// Consecutive calls; the third uses the half of the first again.
fn calls(flaws: Flaws, calls: u32, parts: [Part; 2]) {
    explore(3, move || {
        let [first, second] = machine(flaws);
        let other = thread::spawn(move || calls_of(&second, calls, parts[1]));
        calls_of(&first, calls, parts[0]);
        other.join().expect("the other rank ends");
    });
}

/// A rank's calls, by one worker.
fn calls_of(words: &RankWords, calls: u32, part: Part) {
    for _ in 0..calls {
        let call = Protocol::open(words, words.1);
        if part != Part::Receives {
            send(call, words, 0, 1);
        }
        if part != Part::Sends {
            receive(call, words, 1);
        }
        assert_eq!(call.leave(1, false, patient), Ok(Left::Closed));
    }
}

/// Two workers of a rank read in its first call. The one that closes it makes the next call, after
/// which the peer overwrites what both have read.
fn readers(flaws: Flaws) {
    explore(2, move || {
        let [first, second] = machine(flaws);
        let peer = thread::spawn(move || {
            calls_of(&second, 2, Part::Both);
            send(Protocol::open(&second, READER), &second, 0, 1);
        });
        let work = |words: RankWords| {
            let call = Protocol::open(&words, SENDER);
            receive(call, &words, 1);
            if call.leave(2, false, patient) == Ok(Left::Closed) {
                calls_of(&words, 1, Part::Both);
            }
        };
        let call = Protocol::open(&first, SENDER);
        send(call, &first, 0, 1);
        // One worker awaits first: two that spin beside each other have no end in the model.
        call.wait(0, READER, patient).expect("nothing fails");
        let other = first.clone();
        let other = thread::spawn(move || work(other));
        work(first);
        for thread in [peer, other] {
            thread.join().expect("every thread ends");
        }
    });
}

/// Two workers of the sender fill one chunk, `calls` times.
fn chunk(flaws: Flaws, calls: u32) {
    explore(2, move || {
        let [sender, reader] = machine(flaws);
        for _ in 0..calls {
            let workers: Vec<_> = (0..2)
                .map(|worker| {
                    let sender = sender.clone();
                    thread::spawn(move || {
                        let call = Protocol::open(&sender, SENDER);
                        send(call, &sender, worker, 2);
                        call.leave(2, false, patient).expect("nothing fails")
                    })
                })
                .collect();
            let call = Protocol::open(&reader, READER);
            receive(call, &reader, 2);
            assert_eq!(call.leave(1, false, patient), Ok(Left::Closed));
            let left: Vec<Left> =
                workers.into_iter().map(|worker| worker.join().expect("a worker ends")).collect();
            assert!(left == [Left::Closed, Left::Early] || left == [Left::Early, Left::Closed]);
            assert_eq!(
                sender.counter(0).load_acquire(),
                0,
                "the counter is ready for the next call"
            );
        }
    });
}

#[test]
fn a_payload_is_whole_when_its_signal_is_seen_and_stays_until_its_reader_has_ended_the_call() {
    calls(SOUND, 3, [Part::Both; 2]);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_publish_is_caught() {
    calls(Flaws { signal: Flaw::RelaxedStore, ..SOUND }, 1, [Part::Both; 2]);
}

/// A rank may reuse a half because it has heard from every peer.
#[test]
#[should_panic(expected = "Causality violation")]
fn reuse_of_a_half_by_a_rank_that_hears_from_nobody_is_caught() {
    calls(SOUND, 3, [Part::Sends, Part::Receives]);
}

#[test]
fn the_last_worker_to_leave_goes_on_for_all() {
    readers(SOUND);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_ticket_is_caught() {
    readers(Flaws { ticket: Flaw::RelaxedIncrement, ..SOUND });
}

#[test]
fn the_last_worker_of_a_chunk_publishes_for_all_and_the_counter_wraps() {
    chunk(SOUND, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_chunk_counter_is_caught() {
    chunk(Flaws { counter: Flaw::RelaxedIncrement, ..SOUND }, 1);
}

#[test]
fn of_two_failing_waits_one_leaves_a_whole_record_and_both_end() {
    explore(3, || {
        let [sender, reader] = machine(SOUND);
        drop(sender);
        let give_up = |_| ControlFlow::Break(());
        let waiting = reader.clone();
        let other = thread::spawn(move || Protocol::open(&waiting, READER).leave(1, true, give_up));
        let call = Protocol::open(&reader, READER);
        assert_eq!(call.wait(0, SENDER, give_up), Err(Poisoned));

        let signal = FaultRecord {
            state: 1,
            code: fault::TIMEOUT,
            wait: fault::SIGNAL,
            rank: 1,
            peer: 0,
            expected: FIRST.get(),
            seen: FIRST.before(1).get(),
            epoch: FIRST.get(),
            ..FaultRecord::default()
        };
        let pushed = FaultRecord { wait: fault::PUSHED, peer: 1, ..signal };
        let whole =
            |record: FaultRecord| assert!(record == signal || record == pushed, "{record:?}");
        read_fault(&reader).into_iter().for_each(whole);
        assert_eq!(other.join().expect("the wait ends"), Err(Poisoned));
        whole(read_fault(&reader).expect("there is a record"));
    });
}

/// Calls of two ranks that announce their ops; the result of each rank's last call.
fn announced(flaws: Flaws, ops: [&'static [u32]; 2]) {
    explore(3, move || {
        let [first, second] = machine(flaws);
        let other = thread::spawn(move || announced_by(&second, ops[1]));
        let left = [announced_by(&first, ops[0]), other.join().expect("the other rank ends")];
        let agree = ops[0] == ops[1];
        assert_eq!(
            left,
            if agree { [Ok(Left::Closed); 2] } else { [Err(Poisoned); 2] },
            "both ranks see it"
        );
        if !agree {
            let record = read_fault(&first).expect("a record");
            assert_eq!(
                (record.code, record.peer, record.expected, record.seen),
                (fault::DISAGREED, 1, 1, 2)
            );
        }
    });
}

fn announced_by(words: &RankWords, ops: &[u32]) -> Result<Left, Poisoned> {
    let mut left = Err(Poisoned);
    for &op in ops {
        let call = Protocol::open(words, words.1).of(op, WorldSize::new(2).expect("a world"));
        call.announce();
        left = call.leave(1, false, patient);
        let _closed = left?;
    }
    left
}

#[test]
fn ranks_in_calls_of_one_op_close_them() {
    // The third uses the words of the first again.
    announced(SOUND, [&[1, 2, 3]; 2]);
}

#[test]
fn ranks_in_calls_of_different_ops_all_fail() {
    announced(SOUND, [&[1], &[2]]);
}

#[test]
#[should_panic(expected = "both ranks see it")]
fn an_op_that_is_not_released_with_its_call_is_caught() {
    announced(Flaws { calling: Flaw::RelaxedStore, ..SOUND }, [&[1, 2, 3]; 2]);
}
