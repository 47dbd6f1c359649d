//! The tuner on GPUs: plans are timed by events, checked, and found by the next build.

use crate::common::launched::places;
use crate::common::suite;
use crate::common::{Machine, Node};
use flux_core::plan::{PlanOrigin, TableKind};
use flux_ops::{AllGatherGemm, Builder, GemmReduceScatter, Outcome, TuneOptions, Tuned, bf16, f16};

/// Runs a test where it can run.
fn on_gpus(test: fn(Machine)) {
    let places = crate::common::gpus::count().map(places);
    crate::common::where_found::run("gpu_tune", places.map(Machine::Gpus), test);
}

fn on_node<Op>(builder: Builder<Op>, node: &Node, table: &std::path::Path) -> Builder<Op> {
    let builder = builder.plan_table(table);
    match node.workers {
        Some(workers) => builder.workers(workers),
        None => builder,
    }
}

/// Every candidate of the model is right and timed.
fn assert_timed(tuned: Tuned, before: PlanOrigin) -> flux_ops::Timing {
    let Tuned::Timed(timing) = tuned else { panic!("{tuned:?}") };
    assert!(timing.candidates.len() > 1 && timing.before == before, "{timing:?}");
    assert!(
        timing
            .candidates
            .iter()
            .all(|candidate| matches!(candidate.outcome, Outcome::Timed { us } if us > 1.0)),
        "{timing:?}"
    );
    timing
}

#[test]
fn the_fastest_plan_is_found_by_the_next_build_on_all_ranks() {
    on_gpus(|machine| {
        // Copies within a GPU run on its SMs, of which kernels of ranks that share it leave none.
        let worlds = if matches!(machine, Machine::Gpus(1)) { &[1][..] } else { &[1, 2, 4] };
        for world in machine.worlds(worlds) {
            let (w, folder) = (world as usize, tempfile::tempdir().unwrap());
            let table = folder.path().join("plans.csv");
            machine.run(world, suite::defaults, |node| {
                let gather = || {
                    on_node(AllGatherGemm::<bf16>::builder(520 * w, 1032 * w, 2048), node, &table)
                };
                let scatter = || {
                    on_node(
                        GemmReduceScatter::<f16>::builder(520 * w, 2056, 1024 * w),
                        node,
                        &table,
                    )
                };
                let options = TuneOptions::default();
                let timing =
                    assert_timed(gather().tune(&node.comm, &options).unwrap(), PlanOrigin::Model);
                let op = gather().build(&node.comm).unwrap();
                assert_eq!(op.plan(op.max_m()).unwrap(), timing.plan(), "{}", op.explain());
                let timing =
                    assert_timed(scatter().tune(&node.comm, &options).unwrap(), PlanOrigin::Model);
                let op = scatter().build(&node.comm).unwrap();
                assert_eq!(op.plan(op.max_m()).unwrap(), timing.plan());
                assert!(matches!(
                    gather().tune(&node.comm, &options).unwrap(),
                    Tuned::Known { .. }
                ));
                let again = TuneOptions { again: true, ..options };
                assert_timed(
                    scatter().tune(&node.comm, &again).unwrap(),
                    PlanOrigin::Table(TableKind::User),
                );
            });
        }
    });
}
