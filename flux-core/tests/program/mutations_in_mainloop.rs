//! The rules and the order of in-mainloop accumulation, broken on purpose.

use crate::mutations::{assert_violates, pick, pick_item};
use crate::strategies::{Call, Knobs, knob_calls};
use flux_core::OpKind::GemmReduceScatter;
use flux_core::program::check::{Violation, verify};
use flux_core::program::{Await, Sink, WorkItem};
use proptest::prelude::*;
use proptest::sample::Index;

/// Calls with room along `k` for at least two mainloop partial tiles.
fn mainloop_calls() -> impl Strategy<Value = Call> {
    let knobs = (2..=7_u32).prop_map(|in_mainloop| Knobs { in_mainloop, ..Knobs::PLAIN });
    knob_calls(GemmReduceScatter, 3..=8, 19..=40, knobs)
}

fn reduces(item: &WorkItem) -> bool {
    item.sink == Sink::Reduce
}

proptest! {
    #[test]
    fn partial_tiles_are_added_as_they_are_sent(call in mainloop_calls()) {
        prop_assert_eq!(verify(&call.0), Ok(()));
        for p in &call.0 {
            let world = p.problem.world();
            prop_assert!(p.in_mainloop >= 2 && p.in_mainloop <= world.peers());
            let (first, gap) = p.in_mainloop_steps();
            prop_assert!(
                first >= 1 && gap >= 4 && first + p.in_mainloop * gap + 2 <= p.k_steps(),
                "two steps for the consumer that is behind"
            );
            for item in p.items.iter().filter(|item| reduces(item)) {
                let entries = p.awaits_of(item).iter().chain(p.late_awaits_of(item));
                let sources: Vec<u32> = entries.map(|entry| entry.peer).collect();
                // The rank before this one sends first.
                let expected: Vec<u32> =
                    (1..world.get()).map(|step| p.rank.before(step, world).get()).collect();
                prop_assert_eq!(sources, expected);
                prop_assert!(
                    p.awaits_of(item)
                        .iter()
                        .all(|entry| entry.k_step >= first && entry.k_step < p.k_steps())
                );
            }
        }
    }

    #[test]
    fn form_of_mainloop_partial_tiles(
        call in mainloop_calls(),
        rank: Index,
        item: Index,
        kind in 0..5,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, reduces);
        let entry = p.items[index].await_first as usize;
        match kind {
            0 => p.awaits[entry].k_step -= 1,
            1 => p.items[index].await_count -= 1,
            2 => p.in_mainloop -= 1,
            3 => p.in_mainloop = p.k_steps(),
            _ => p.awaits[entry + 1].k_step = p.awaits[entry].k_step,
        }
        assert_violates!(call, Violation::Form { .. });
    }

    #[test]
    fn mainloop_partial_tiles_that_are_not_awaited(
        call in mainloop_calls(),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, reduces);
        // Both are awaited, each at the other's step.
        let entry = p.items[index].await_first as usize;
        let [first, second] = [p.awaits[entry], p.awaits[entry + 1]];
        (p.awaits[entry].signal, p.awaits[entry].peer) = (second.signal, second.peer);
        (p.awaits[entry + 1].signal, p.awaits[entry + 1].peer) = (first.signal, first.peer);
        assert_violates!(call, Violation::Unguarded { what: "slot", .. });
    }
    /// A valid split tile, except for the steps at which its fix-up item adds.
    #[test]
    fn mainloop_partial_tiles_of_an_item_without_its_last_step(
        call in mainloop_calls(),
        rank: Index,
        item: Index,
    ) {
        let mut call = call;
        for p in &mut call.0 {
            (p.signals, p.split_k_slots) = (p.signals + 1, 1);
        }
        let p = pick(&mut call, rank);
        let index = pick_item(&p.items, item, reduces);
        let (all, raise, dest) = (p.k_steps(), p.signals - 1, p.rank.get());
        let fix_up = p.items[index];
        let late = p.late_awaits_of(&fix_up).to_vec();
        let late_first = p.awaits.len() as u32;
        p.awaits.push(Await { signal: raise, peer: dest, k_step: 0 });
        p.awaits.extend(late);
        let k = WorkItem {
            k_first: all - 1,
            k_steps: 1,
            part: 0,
            sink: Sink::Partial,
            raise,
            raise_after: 1,
            dest,
            ..WorkItem::default()
        };
        let partial_item = WorkItem {
            a_source: fix_up.a_source,
            a_outer: fix_up.a_outer,
            row: fix_up.row,
            rows: fix_up.rows,
            col: fix_up.col,
            cols: fix_up.cols,
            ..k
        };
        p.items[index] = WorkItem {
            k_steps: all - 1,
            part: 0,
            parts: 1,
            late_first,
            late_count: fix_up.late_count + 1,
            ..fix_up
        };
        p.items.insert(index, partial_item);
        assert_violates!(call, Violation::InMainloopOfPart { item, k_steps, all: of, .. }
            if (item, k_steps + 1, of) == (index + 1, all, all));
    }

    /// The program counts one more than each item adds.
    #[test]
    fn more_mainloop_partial_tiles_than_there_are(
        call in knob_calls(GemmReduceScatter, 2..=3, 30..=40, Just(Knobs::PLAIN)),
        rank: Index,
    ) {
        let mut call = call;
        let p = pick(&mut call, rank);
        let peers = p.problem.world().peers();
        p.in_mainloop = peers + 1;
        let (first, gap) = p.in_mainloop_steps();
        for (entry, number) in p.awaits.iter_mut().zip((0..peers).cycle()) {
            entry.k_step = first + number * gap;
        }
        for item in p.items.iter_mut().filter(|item| reduces(item)) {
            (item.await_first, item.await_count, item.await_group) = (item.late_first, peers, 1);
            (item.late_first, item.late_count) = (0, 0);
        }
        assert_violates!(call, Violation::FewerThanInMainloop { partials, in_mainloop, .. }
            if (partials, in_mainloop) == (peers, peers + 1));
    }
}
