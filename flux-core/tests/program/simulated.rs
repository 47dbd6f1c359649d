//! Properties of every simulated call.
//!
//! A slower machine is not always a slower call: messages that change their order may suit a reader
//! better. With three ranks and more, a late message may overtake another at a reader's link; with
//! several workers, a late item may send behind another. One worker with one peer keeps the order.

use crate::strategies::{Call, any_calls, plain_calls};
use flux_core::OpKind;
use flux_core::layout::slot_bytes;
use flux_core::machine::Machine;
use flux_core::plan::Mover;
use flux_core::program::{Sink, TileProgram, check};
use flux_core::simulate::{RankTotals, simulate};
use proptest::prelude::*;
use std::time::Duration;

/// Machines on which computing, memory, links or fixed costs take longest.
fn machines() -> impl Strategy<Value = Machine> {
    let rates = (1..=40_u32, 1..=5000_u64, 1..=5000_u64, 1..=5000_u64, 1..=5000_u64);
    let times = (0..=5000_u64, 0..=5000_u64, 0..=5000_u64, 0..=5000_u64);
    (rates, times).prop_map(
        |(
            (multiprocessors, clock_mhz, memory, link, add),
            (signal_ns, tile_ns, begins, copy_ns),
        )| Machine {
            multiprocessors,
            ops_per_cycle: 64,
            clock_mhz,
            memory_bytes_per_us: memory,
            link_bytes_per_us: link,
            both_ways_bytes_per_us: link,
            add_bytes_per_us: add,
            signal_ns,
            tile_ns,
            push_begins_ns: begins,
            copy_begins_ns: begins,
            copy_ns,
            ..Machine::H200
        },
    )
}

fn movers() -> impl Strategy<Value = Mover> {
    prop_oneof![Just(Mover::Kernel), Just(Mover::CopyEngine)]
}

/// Bytes that a rank sends and receives at least: its shard, the peers' rows, or their slots.
fn least_traffic(program: &TileProgram) -> (u64, u64) {
    let (problem, peers) = (&program.problem, u64::from(program.problem.world().peers()));
    let own = problem.shard_rows(program.rank).len() as u64;
    let others = u64::from(problem.m()) - own;
    let [x_row, y_row] = [problem.k(), problem.n()].map(|columns| u64::from(columns) * 2);
    match problem.op() {
        OpKind::AllGatherGemm => (peers * own * x_row, others * x_row),
        OpKind::GemmReduceScatter if program.rows.is_flattened() => {
            (others * y_row, peers * own * y_row)
        }
        OpKind::GemmAllReduce if program.rows.has_two_exchanges() => {
            let both = others * y_row + peers * own * y_row;
            (both, both)
        }
        OpKind::GemmAllReduce if program.rows.is_flattened() => {
            let all = peers * u64::from(problem.m()) * y_row;
            (all, all)
        }
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => {
            let slots =
                peers * u64::from(program.slots_per_source) * slot_bytes(problem, program.tile);
            let results = if problem.op() == OpKind::GemmAllReduce {
                [peers * own * y_row, others * y_row]
            } else {
                [0; 2]
            };
            (slots + results[0], slots + results[1])
        }
    }
}

/// Workers of a rank.
fn workers(call: &Call, machine: &Machine) -> u32 {
    let tiles = call.0[0]
        .items
        .iter()
        .filter(|item| item.sink != Sink::ReduceRows && item.sink != Sink::Copy)
        .count();
    machine.multiprocessors.min(tiles as u32)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_verified_call_ends_and_takes_no_less_than_its_parts(
        call in any_calls(1..=6),
        machine in machines(),
        pushes in movers(),
    ) {
        check::verify(&call.0).unwrap();
        let simulated = simulate(&call.0, &machine, pushes).unwrap();
        let workers = workers(&call, &machine);
        for (rank, program) in simulated.ranks.iter().zip(&call.0) {
            let RankTotals { done, multiplied, multiplying, waiting, adding, sent, received } =
                *rank;
            prop_assert!(multiplied <= done && done <= simulated.time);
            // All work of its workers fits between begin and end.
            let finishing = Duration::from_nanos(machine.tile_ns) * program.computed().len() as u32;
            let room = done.checked_sub(Duration::from_nanos(machine.begin_ns)).unwrap() * workers;
            prop_assert!(
                multiplying + waiting + adding + finishing <= room,
                "{rank:?} on {workers} workers"
            );
            let steps: u64 = program.items.iter().map(|item| u64::from(item.k_steps)).sum();
            let ops = 2
                * u64::from(program.tile.m)
                * u64::from(program.tile.n)
                * u64::from(program.tile.k)
                * steps;
            prop_assert!(
                multiplying
                    >= Duration::from_micros(ops / (machine.ops_per_cycle * machine.clock_mhz))
            );
            prop_assert_eq!((sent, received), least_traffic(program));
        }
        for (rank, tracks) in simulated.ranks.iter().zip(&simulated.tracks) {
            for track in tracks {
                let begin = Duration::from_nanos(machine.begin_ns);
                prop_assert!(track.begin() == begin && track.end() <= rank.done, "{track:?}");
            }
        }
        prop_assert!(simulated.time >= simulated.on_links(&machine));
        prop_assert_eq!(simulate(&call.0, &machine, pushes).unwrap(), simulated, "the same again");
    }

    #[test]
    fn with_one_peer_slower_links_never_make_a_worker_faster(
        call in any_calls(2..=2),
        machine in machines(),
        pushes in movers(),
        percent in 1..100_u64,
    ) {
        let machine = Machine { multiprocessors: 1, ..machine };
        let slower = Machine {
            link_bytes_per_us: machine.link_bytes_per_us * percent / 100,
            both_ways_bytes_per_us: machine.both_ways_bytes_per_us * percent / 100,
            ..machine
        };
        let [fast, slow] =
            [machine, slower].map(|machine| simulate(&call.0, &machine, pushes).unwrap().time);
        prop_assert!(slow >= fast, "{slow:?} instead of {fast:?}");
    }

    #[test]
    fn with_one_peer_the_way_through_the_host_never_makes_a_worker_faster(
        call in any_calls(2..=2),
        machine in machines(),
    ) {
        // A kernel pushes the own rows between the peer's, copy engines at once.
        prop_assume!(call.0.iter().all(|program| {
            program.transfers.iter().all(|transfer| transfer.dest != program.rank.get())
        }));
        // Copy engines have no cost of pushed pieces.
        let links = Machine { multiprocessors: 1, push_ns: 0, push_round_ns: 0, ..machine };
        let host = Machine { host_staged: true, ..links };
        let [links, host] =
            [links, host].map(|machine| simulate(&call.0, &machine, Mover::Kernel).unwrap());
        prop_assert!(host.time >= links.time, "{:?} instead of {:?}", host.time, links.time);
        prop_assert!(host.ranks.iter().zip(&call.0).all(|(rank, program)| (
            rank.sent,
            rank.received
        ) == least_traffic(
            program
        )));
    }

    #[test]
    fn without_waits_and_links_it_is_the_busiest_worker_that_counts(
        call in plain_calls(1..=1),
        machine in machines(),
    ) {
        let simulated = simulate(&call.0, &machine, Mover::Kernel).unwrap();
        let items = call.0[0].items.len() as u64;
        let most = items.div_ceil(u64::from(workers(&call, &machine)));
        let [rank] = simulated.ranks[..] else { panic!("one rank") };
        prop_assert_eq!(
            (rank.waiting, rank.adding, rank.sent),
            (Duration::ZERO, Duration::ZERO, 0)
        );
        prop_assert!(rank.done >= Duration::from_nanos(machine.begin_ns + most * machine.tile_ns));
        prop_assert_eq!(simulated.time, rank.done + Duration::from_nanos(machine.end_ns));
    }
}
