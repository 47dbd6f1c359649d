//! Ranks as threads, over the control plane that threads have.

use super::*;
use crate::backends::fault::Fault;
use crate::bootstrap::control::{LocalControl, Notice, Watcher};
use crate::reason;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Instant;

const COMMUNICATOR: u32 = 3;

/// A rank with its end of the control plane.
struct Node {
    calls: Arc<PeerCalls>,
    /// Why its calls have failed; 0 for those that work.
    failed: Arc<AtomicU32>,
    /// Whether it hears nothing, as a process that was stopped.
    stopped: Arc<AtomicBool>,
    heard: Arc<AtomicU32>,
    _control: Arc<dyn ControlPlane>,
    _watcher: Arc<Watcher>,
}

fn nodes(count: u32, first: Epoch) -> Vec<Node> {
    let world = WorldSize::new(count).unwrap();
    let node = |end: LocalControl| {
        let rank = end.rank();
        let control: Arc<dyn ControlPlane> = Arc::new(end);
        let handle = Arc::downgrade(&control);
        let calls = Arc::new(PeerCalls::over(handle, COMMUNICATOR, (rank, world), first));
        let (failed, stopped, heard) = (Arc::default(), Arc::default(), Arc::default());
        let watcher: Arc<Watcher> = {
            let (calls, failed, stopped, heard): (_, Arc<AtomicU32>, Arc<AtomicBool>, _) =
                (Arc::clone(&calls), Arc::clone(&failed), Arc::clone(&stopped), Arc::clone(&heard));
            Arc::new(move |notice| {
                let Notice::Told { by, communicator: COMMUNICATOR, words } = notice else { return };
                if !stopped.load(Ordering::Relaxed) {
                    AtomicU32::fetch_add(&heard, 1, Ordering::Relaxed);
                    let failed = |_| Some(failed.load(Ordering::Relaxed)).filter(|&why| why != 0);
                    calls.hear(by, words, failed);
                }
            })
        };
        control.watch(Arc::downgrade(&watcher));
        Node { calls, failed, stopped, heard, _control: control, _watcher: watcher }
    };
    LocalControl::world_of(world).into_iter().map(node).collect()
}

/// Has each node make call `epoch`.
fn all_say(nodes: &[Node], epoch: Epoch, op: u32) {
    for node in nodes {
        node.calls.say(epoch, op);
    }
}

/// What `node` finds wrong.
fn fault(node: &Node) -> Option<Fault> {
    node.calls.fault().map(|record| Fault::from_record(&record, Vec::new()))
}

#[test]
fn one_message_tells_of_many_calls_and_none_is_sent_twice() {
    let nodes = nodes(3, Epoch::FIRST);
    let mut told = nodes[0].calls.untold();
    nodes[0].calls.tell(&mut told);
    let mut epoch = Epoch::FIRST;
    for _ in 0..100 {
        all_say(&nodes, epoch, 7);
        epoch = epoch.next();
    }
    for _ in 0..3 {
        nodes[0].calls.tell(&mut told);
    }
    for peer in &nodes[1..] {
        assert_eq!(peer.heard.load(Ordering::Relaxed), 1);
        assert_eq!(
            (fault(peer), peer.calls.silent_in(epoch.before(1)).unwrap().0.get() > 0),
            (None, true)
        );
    }
}

#[test]
fn ranks_that_make_other_calls_find_it_however_far_one_is_ahead() {
    for first in [Epoch::FIRST, Epoch::new(u32::MAX - 1)] {
        for ahead in [0, 5] {
            let nodes = nodes(2, first);
            let told: Vec<_> = nodes.iter().map(|node| node.calls.untold()).collect();
            nodes[0].calls.say(first, 7);
            nodes[1].calls.say(first, 8);
            let mut epoch = first;
            for _ in 0..ahead {
                epoch = epoch.next();
                nodes[1].calls.say(epoch, 7);
            }
            for (node, mut told) in nodes.iter().zip(told) {
                node.calls.tell(&mut told);
            }
            let found: Vec<_> = nodes.iter().filter_map(fault).collect();
            // Who is ahead remembers the call that the other is in.
            assert_eq!(found.len(), if ahead == 0 { 2 } else { 1 });
            assert!(
                found.iter().all(
                    |fault| matches!(fault, Fault::Disagreed { epoch, .. } if *epoch == first)
                ),
                "{found:?}"
            );
        }
    }
}

#[test]
fn a_rank_that_has_not_made_a_call_is_named_with_its_last() {
    let nodes = nodes(3, Epoch::FIRST);
    let mut told: Vec<_> = nodes.iter().map(|node| node.calls.untold()).collect();
    let next = Epoch::FIRST.next();
    for (node, told) in nodes.iter().zip(&mut told) {
        node.calls.say(Epoch::FIRST, 7);
        if node.calls.rank.get() != 1 {
            node.calls.say(next, 7);
        }
        node.calls.tell(told);
    }
    assert_eq!(nodes[0].calls.silent_in(next), Some((Rank::new(1), Epoch::FIRST)));
    nodes[1].calls.say(next, 7);
    nodes[1].calls.tell(&mut told[1]);
    assert_eq!(nodes[0].calls.silent_in(next), None);
}

#[test]
fn who_asks_hears_of_a_peer_whose_calls_have_failed_and_of_other_calls_at_once() {
    let ask = |other: u32, failed: u32| {
        let nodes = nodes(2, Epoch::FIRST);
        nodes[0].calls.say(Epoch::FIRST, 7);
        nodes[1].calls.say(Epoch::FIRST, other);
        nodes[1].failed.store(failed, Ordering::Relaxed);
        nodes[0].calls.ask(Epoch::FIRST);
        fault(&nodes[0])
    };
    assert_eq!(ask(7, 0), None);
    assert!(matches!(ask(8, 0), Some(Fault::Disagreed { .. })));
    let aborted = Fault::Aborted { rank: Rank::new(1), reason: reason::TIMED_OUT };
    assert_eq!(ask(7, reason::TIMED_OUT), Some(aborted));
}

#[test]
fn a_peer_that_does_not_answer_is_waited_for_once_and_one_that_has_left_never() {
    let nodes = nodes(3, Epoch::FIRST);
    all_say(&nodes, Epoch::FIRST, 7);
    nodes[2].calls.close();
    for node in &nodes[1..] {
        node.stopped.store(true, Ordering::Relaxed);
    }
    let began = Instant::now();
    nodes[0].calls.ask(Epoch::FIRST);
    assert!(began.elapsed() >= MOMENT, "rank 1 is waited for");
    let (heard, began) = (nodes[0].heard.load(Ordering::Relaxed), Instant::now());
    for _ in 0..1000 {
        nodes[0].calls.ask(Epoch::FIRST);
    }
    assert!(began.elapsed() < MOMENT && heard == 1, "{heard}");
    assert_eq!(fault(&nodes[0]), None);
    // Rank 2 had left, and rank 1 goes on.
    nodes[1].stopped.store(false, Ordering::Relaxed);
    nodes[2].calls.say(Epoch::FIRST.next(), 7);
    nodes[2].calls.close();
    let began = Instant::now();
    nodes[0].calls.ask(Epoch::FIRST.next());
    assert!(began.elapsed() < MOMENT);
}

#[test]
fn an_older_word_that_comes_late_changes_nothing() {
    let nodes = nodes(2, Epoch::FIRST);
    let mut words = Vec::new();
    for call in 0..3 {
        let epoch = Epoch::new(Epoch::FIRST.get() + call);
        all_say(&nodes, epoch, 5 + call);
        let last = nodes[1].calls.own().last();
        words.push([last.epoch().get(), last.history(), about::CALLS, 0]);
    }
    for words in words.iter().rev() {
        nodes[0].calls.hear(Rank::new(1), *words, |_| None);
    }
    assert_eq!(nodes[0].calls.silent_in(Epoch::new(Epoch::FIRST.get() + 2)), None);
    // From no rank, or about nothing that this version knows.
    nodes[0].calls.hear(Rank::new(9), words[0], |_| None);
    nodes[0].calls.hear(Rank::new(1), [1, 0, 77, 0], |_| None);
    assert_eq!(fault(&nodes[0]), None);
}
