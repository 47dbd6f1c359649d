//! The ops on GPUs whose ranks reach each other through the host only: what must hold on any
//! machine, and that the way makes no difference.
//!
//! Ranks are threads with a GPU each, or processes of a launch (`common/launched.rs`), with any
//! number on each. Where there are not two GPUs and no launch, one line says so and all are
//! skipped.

use crate::common::launched::places;
use crate::common::suite;
use crate::common::{Case, Check, Machine, OPS, OpOptions, Values, build_case};
use cudarc::driver::sys::CUstreamCaptureMode;
use flux_core::plan::{Chunk, KSplit, Plan, RowMapping};
use flux_core::tile::Generation;
use flux_core::{DType, Partials, TileShape};
use flux_kernels::KernelTarget;
use flux_ops::CallError;
use flux_transport::TransportError;
use half::bf16;

/// Runs a test where it can run.
fn on_gpus(test: fn(Machine)) {
    let several = |count| {
        if count > 1 {
            Ok(Machine::Staged(count))
        } else {
            Err(format!("2 GPUs needed, {count} here"))
        }
    };
    let places = crate::common::gpus::count().map(places);
    crate::common::where_found::run("gpu_pcie", places.and_then(several), test);
}

tests_of_any_machine!(on_gpus);

#[test]
fn a_thousand_calls_in_a_row() {
    on_gpus(|machine| suite::many_calls_in_a_row(machine, 1000));
}

#[test]
fn calls_in_different_orders_fail_on_every_rank() {
    on_gpus(suite::calls_in_different_orders_fail_on_every_rank);
}

#[test]
fn the_way_through_the_host_changes_no_bit_of_a_batch_invariant_op() {
    on_gpus(|staged| {
        let Machine::Staged(count) = staged else { unreachable!("as made above") };
        suite::transports_change_no_bit_of_a_batch_invariant_op(staged, Machine::Gpus(count));
    });
}

/// With one plan the sums have one order: the bits are those of ranks that store to each other.
#[test]
fn the_way_through_the_host_changes_no_bit() {
    on_gpus(|staged| {
        let plan = Plan::of(staged.tiles()[0]);
        let by_tile = Plan { chunk: Chunk::Tiles(1), ..plan };
        for (world, op) in
            staged.worlds(&[2, 3, 4, 6, 8]).into_iter().flat_map(|world| OPS.map(|op| (world, op)))
        {
            let [_, n, k] = suite::unaligned(staged, op, world);
            let (many, few) = ([257 * world as usize, n, k], suite::few_rows(staged, op, world));
            // Few rows go by the kernels themselves, tile by tile, or by copy engines at once.
            let flattened =
                [plan, by_tile].map(|plan| (few, Plan { rows: RowMapping::Flattened, ..plan }));
            // Rows in another order have other tiles in the last wave, which stream-K splits.
            let k = if op.reduces() { KSplit::StreamK } else { KSplit::SplitK(2) };
            for (shape, plan) in
                [(many, by_tile), (many, Plan { k, ..by_tile })].into_iter().chain(flattened)
            {
                let case = Case::<bf16>::new(op, shape, world, Values::Reals, 41);
                let results = |machine: Machine| {
                    machine.run(world, suite::defaults, |node| {
                        suite::call(&build_case(&case, OpOptions::of(plan), node), &case, node)
                            .unwrap()
                    })
                };
                let Machine::Staged(count) = staged else { unreachable!("as made above") };
                let (there, here) = (results(Machine::Gpus(count)), results(staged));
                for (rank, (a, b)) in there.iter().zip(&here).enumerate() {
                    assert!(
                        a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()),
                        "{}, {plan}, on rank {rank}",
                        case.problem
                    );
                }
            }
        }
    });
}

/// Tiles of several waves leave with a limit to those in flight, tiles of one wave all at once; the
/// sum is the same.
#[test]
fn the_in_flight_limit_changes_no_bit() {
    on_gpus(|machine| {
        let whole = KSplit::Whole;
        let tiles = [
            (128, 64, whole),
            (128, 64, KSplit::SplitK(2)),
            (64, 128, whole),
            (208, 128, whole),
            (128, 256, whole),
        ];
        let generation =
            KernelTarget::of(flux_cuda::device_info(0).unwrap().compute).unwrap().generation;
        let with_kernel = |&(rows, columns, _): &(u32, u32, KSplit)| {
            generation.scatters(TileShape::new(rows, columns, 64), DType::Bf16.into())
        };
        let cases = machine
            .worlds(&[2, 3, 4, 6])
            .into_iter()
            .flat_map(|world| tiles.map(|tile| (world, tile)));
        let cases = cases
            .flat_map(|case| [Partials::Output, Partials::F32].map(|partials| (case, partials)));
        for ((world, (rows, columns, k)), partials) in
            cases.filter(|((_, tile), _)| with_kernel(tile))
        {
            let w = world as usize;
            let case =
                Case::<bf16>::new(OPS[1], [150 * w, 1000, 264 * w], world, Values::Reals, 47)
                    .with_partials(partials);
            let tile = TileShape::new(rows, columns, 64);
            let plan =
                Plan { chunk: Chunk::Tiles(1), rows: RowMapping::Flattened, k, ..Plan::of(tile) };
            let results = |workers, limited| {
                let options = OpOptions { workers, ..OpOptions::of(plan) };
                machine.run(world, suite::defaults, |node| {
                    let op = build_case(&case, options, node);
                    // Ranks that share a GPU have fewer workers by themselves. The portable kernel
                    // has no limit.
                    let limited = limited && generation == Generation::Hopper;
                    assert!(
                        op.explain().contains(" CTAs at once") == limited || node.workers.is_some(),
                        "{}",
                        op.explain()
                    );
                    (0..3).map(|_| suite::call(&op, &case, node).unwrap()).collect::<Vec<_>>()
                })
            };
            let (at_once, limited) = (results(None, false), results(Some(3), true));
            for (rank, (a, b)) in at_once.iter().zip(&limited).enumerate() {
                let first = &a[0];
                assert!(
                    a.iter().chain(b).all(|call| call == first),
                    "{}, {plan}, on rank {rank}",
                    case.problem
                );
            }
        }
    });
}

#[test]
fn a_capture_is_refused_and_the_communicator_works_on() {
    on_gpus(|machine| {
        for op in OPS {
            let case =
                Case::<bf16>::new(op, suite::unaligned(machine, op, 2), 2, Values::Integers, 43);
            let expected = case.expected_on(machine);
            machine.run(2, suite::defaults, |node| {
                let op = build_case(&case, OpOptions::default(), node);
                case.assert_equal(
                    &expected,
                    &op,
                    node.rank,
                    &suite::call(&op, &case, node).unwrap(),
                    "a call",
                );
                let stream = node.cuda_stream().unwrap();
                let begun = {
                    stream
                        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
                        .unwrap();
                    node.comm.begin(node.stream()).err()
                };
                // SAFETY: the capture was begun above, on this thread; what it made is thrown away.
                unsafe { cudarc::driver::result::stream::end_capture(stream.cu_stream()) }.ok();
                assert!(matches!(begun, Some(TransportError::NotCapturable { .. })), "{begun:?}");
                let again = suite::call(&op, &case, node);
                assert!(!matches!(again, Err(CallError::Launch(_))));
                case.assert_equal(&expected, &op, node.rank, &again.unwrap(), "a call");
            });
        }
    });
}
