//! Calls that fail: who records what, and what is left unsaid.

use super::{OPS, TILE, problem, schedule};
use crate::common::lateness::scaled;
use crate::common::{World, device, programs, target};
use flux_core::layout::{RowLayout, fault};
use flux_core::program::{Chunk, Schedule};
use flux_core::signal::Epoch;
use flux_core::{DType, Nodes, OpKind};
use flux_kernels::Variant;
use flux_kernels::harness::{Fill, Seeds, VerifyReport};
use std::time::Duration;

#[test]
fn missing_rank_ends_in_a_timeout_that_names_it_and_leaves_the_device_usable() {
    let Some(context) =
        device("missing_rank_ends_in_a_timeout_that_names_it_and_leaves_the_device_usable")
    else {
        return;
    };
    for (op, k, in_mainloop) in [(OPS[0], 256, 0), (OPS[1], 256, 0), (OPS[1], 1024, 1)] {
        let p = problem(op, 256, 512, k, DType::Bf16, 2);
        let schedule = Schedule { in_mainloop, ..schedule(TILE, Chunk::Shard) };
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        w.deadline_ns = 50_000_000;
        w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
        w.enqueue(0);
        w.synchronize();
        let record = w.fault(0);
        assert_eq!(
            (record.state, record.code, record.wait, record.rank, record.peer),
            (1, fault::TIMEOUT, fault::SIGNAL, 0, 1),
            "{op}"
        );
        assert_eq!(w.epoch(0), 1, "a failed call does not advance the epoch");
        // Rank 1 finds all that it awaits, and that its peer has given up: what its peer's streams
        // do by now may have overwritten it.
        w.enqueue(1);
        w.synchronize();
        let record = w.fault(1);
        assert_eq!(
            (record.state, record.code, record.rank, record.abort),
            (1, fault::ABORTED, 0, fault::TIMED_OUT),
            "{op}"
        );
        assert_eq!(w.epoch(1), 1, "{op}: a call of a rank whose peer has given up is not closed");
        // The context still works: a new world, complete, is right.
        let mut w = World::new(&context, p, &schedule, Epoch::FIRST);
        let seeds = Seeds { x: 5, w: 6 };
        w.prepare(seeds, Fill::SmallInts);
        w.call();
        assert!(w.verify(seeds, Fill::SmallInts).iter().all(VerifyReport::passed), "{op}");
    }
}

#[test]
fn calls_after_a_failed_one_announce_nothing() {
    let Some(context) = device("calls_after_a_failed_one_announce_nothing") else { return };
    for (op, rows, in_flight_limit) in [
        (OPS[0], RowLayout::PerShard, 0),
        (OPS[0], RowLayout::Flattened, 0),
        (OPS[1], RowLayout::PerShard, 0),
        (OPS[1], RowLayout::Flattened, 0),
        (OPS[1], RowLayout::Flattened, 1),
        (OPS[2], RowLayout::PerShard, 0),
        (OPS[2], RowLayout::Flattened, 0),
        (OPS[2], RowLayout::Flattened, 1),
    ] {
        // Fewer pieces of the shard, and fewer tiles, than CTAs: each launch has CTAs that leave
        // nothing out.
        let p = problem(op, 8, 256, 256, DType::Bf16, 2);
        let mut w = World::new(
            &context,
            p,
            &Schedule { rows, ..schedule(TILE, Chunk::Shard) },
            Epoch::FIRST,
        );
        w.pace.in_flight_limit = in_flight_limit;
        w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
        w.poison(0);
        (0..2 * w.workers).for_each(|_| w.enqueue(0));
        w.synchronize();
        assert!(
            w.signals(1).iter().all(|&word| word == 0),
            "{op}, {rows:?}, in-flight limit {in_flight_limit}: {:?}",
            w.signals(1)
        );
        assert_eq!(w.epoch(0), 1, "{op}, {rows:?}, in-flight limit {in_flight_limit}");
    }
}

#[test]
fn calls_of_different_ops_fail_on_all_ranks() {
    let Some(context) = device("calls_of_different_ops_fail_on_all_ranks") else { return };
    for (op, k, in_mainloop) in [(OPS[0], 256, 0), (OPS[1], 256, 0), (OPS[1], 1024, 1)] {
        let p = problem(op, 256, 512, k, DType::Bf16, 3);
        let schedule = Schedule { in_mainloop, ..schedule(TILE, Chunk::Shard) };
        // The call before the wrap, and that whose number is what a pad's words begin as.
        for first in [u32::MAX, 0] {
            let mut w = World::new(&context, p, &schedule, Epoch::new(first));
            w.deadline_ns = scaled(Duration::from_secs(5)).as_nanos() as u64;
            w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
            for rank in 0..3 {
                w.op = if rank == 1 { 9 } else { 4 };
                w.enqueue(rank);
            }
            w.synchronize();
            for rank in 0..3 {
                let (record, own) = (w.fault(rank), if rank == 1 { 9 } else { 4 });
                assert_eq!(w.epoch(rank), first, "{op}: rank {rank} has not closed the call");
                // A rank that finds another's failure first records it; a different op is recorded
                // by every rank, whatever it waits for.
                let disagreed = (record.code, record.expected, record.seen)
                    == (fault::DISAGREED, own, 13 - own);
                assert!(
                    disagreed
                        || (record.code, record.abort) == (fault::ABORTED, fault::IN_ANOTHER_OP),
                    "{op}: {record:?}"
                );
            }
            assert!((0..3).any(|rank| w.fault(rank).code == fault::DISAGREED), "{op}");
        }
    }
}

#[test]
fn a_relay_whose_node_peer_has_given_up_sends_no_sum() {
    let Some(context) = device("a_relay_whose_node_peer_has_given_up_sends_no_sum") else { return };
    let p = problem(OpKind::GemmReduceScatter, 128, 512, 512, DType::Bf16, 4);
    let nodes = Nodes::new(p.world(), 2).expect("two nodes of two");
    let programs = programs(p, &schedule(TILE, Chunk::Tiles(1)), nodes);
    let variant = Variant::of(&programs[0], target(&context)).expect("a variant");
    let awaits: Vec<_> = programs[1].awaits.iter().filter(|a| a.peer == 3).copied().collect();
    let mut w = World::with(&context, programs, variant, Epoch::FIRST);
    w.deadline_ns = 200_000_000;
    w.prepare(Seeds { x: 1, w: 2 }, Fill::Uniform);
    // Rank 3 relays to rank 1 what 2 has sent it.
    w.give_up(2, 3);
    (0..4).for_each(|rank| w.enqueue(rank));
    w.synchronize();
    let record = w.fault(3);
    assert_eq!((record.code, record.rank, record.abort), (fault::ABORTED, 2, fault::TIMED_OUT));
    assert!(!awaits.is_empty(), "rank 1 awaits sums of rank 3");
    assert!(
        awaits.iter().all(|a| w.signal(1, a.signal) != Epoch::FIRST.get()),
        "a sum was announced"
    );
    assert_ne!(w.fault(1).state, 0, "rank 1 has not closed the call");
}
