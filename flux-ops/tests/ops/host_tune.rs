//! The tuner on ranks of the host: rows are written, found by the next build on all ranks, and
//! nothing waits for ever.

use flux_ops::{
    AllGatherGemm, BuildError, Builder, DType, GemmReduceScatter, KSplit, Numerics, OpKind, OpSpec,
    Outcome, Plan, PlanOrigin, Scales, TableFileError, TableKind, Timing, TuneError, TuneOptions,
    Tuned, bf16, f16,
};
use flux_transport::{Communicator, Select, World};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const QUICK: TuneOptions =
    TuneOptions { candidates: 2, rounds: 3, budget: Duration::from_mins(1), again: false };

fn on_ranks<R: Send>(ranks: u32, body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    let (body, worlds) = (&body, World::local(ranks).unwrap());
    std::thread::scope(|scope| {
        let start = |world| {
            scope
                .spawn(move || body(&Communicator::connect_blocking(&world, Select::Host).unwrap()))
        };
        let ranks: Vec<_> = worlds.into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn gather(table: &Path) -> Builder<AllGatherGemm<bf16>> {
    AllGatherGemm::builder(32, 64, 128).plan_table(table).workers(1)
}

fn timing(tuned: Tuned) -> Timing {
    match tuned {
        Tuned::Timed(timing) => timing,
        known @ Tuned::Known { .. } => panic!("{known:?}"),
    }
}

/// A table of its own for each rank, as ranks of several hosts have.
fn tables(folder: &tempfile::TempDir) -> [PathBuf; 2] {
    ["rank0.csv", "rank1.csv"].map(|name| folder.path().join(name))
}

#[test]
fn plans_of_8_bit_operands_are_right_and_have_rows_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let tables = tables(&folder);
    on_ranks(2, |comm| {
        for (op, scales) in [
            (OpKind::AllGatherGemm, Scales::Tensor),
            (OpKind::AllGatherGemm, Scales::Row),
            (OpKind::AllGatherGemm, Scales::Block),
            (OpKind::GemmReduceScatter, Scales::Row),
            (OpKind::GemmReduceScatter, Scales::Block),
        ] {
            let numerics = Numerics::e4m3(scales, DType::Bf16);
            let mut spec = OpSpec::new(op, 32, 256, 256, numerics);
            spec.plan_table = Some(tables[comm.rank().index()].clone());
            let timed = timing(spec.tune(comm, &QUICK).unwrap());
            for candidate in &timed.candidates {
                assert!(
                    matches!(candidate.outcome, Outcome::Timed { .. }),
                    "{op} {numerics}: {candidate:?}"
                );
            }
            let known = spec.tune(comm, &QUICK).unwrap();
            assert!(
                matches!(known, Tuned::Known { plan, .. } if plan == timed.plan()),
                "{known:?}"
            );
        }
    });
}

#[test]
fn the_fastest_plan_is_found_by_the_next_build_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let tables = tables(&folder);
    on_ranks(2, |comm| {
        let rank = comm.rank().index();
        let builder = || gather(&tables[rank]);
        let first = timing(builder().tune(comm, &QUICK).unwrap());
        assert_eq!((first.before, first.model), (PlanOrigin::Model, 0), "no table has this layer");
        assert_eq!(first.candidates.len(), 2);
        assert!(
            first
                .candidates
                .iter()
                .all(|candidate| matches!(candidate.outcome, Outcome::Timed { us } if us > 0.0)),
            "{first:?}"
        );
        assert!(first.gain_over(0).unwrap() >= 0.0 && first.us(first.best) <= first.us(0));
        assert_eq!(first.saved.as_deref(), Some(&*tables[rank]));
        // Rank 1's table has no row: rank 0's plan and its origin hold on both.
        let op = builder().build(comm).unwrap();
        assert_eq!(op.plan(32).unwrap(), first.plan());
        assert!(
            op.explain().contains(&format!("to 32: {} (from the user's plan table)", first.plan())),
            "{}",
            op.explain()
        );
        let own =
            [": 1 of 1 rows are for host with kernel sm_90a and driver host", ": no file yet"]
                [rank];
        assert!(
            op.explain().contains(&format!("plan table: {}{own}", tables[rank].display())),
            "{}",
            op.explain()
        );
        assert!(
            comm.explain().contains(&format!("\nplan table: {}", tables[rank].display())),
            "{}",
            comm.explain()
        );
        // Both element types have one speed.
        let known = AllGatherGemm::<f16>::builder(32, 64, 128)
            .plan_table(&tables[rank])
            .tune(comm, &QUICK)
            .unwrap();
        assert!(
            matches!(known, Tuned::Known { plan, us } if plan == first.plan() && us > 0.0),
            "{known:?}"
        );
        let again = timing(builder().tune(comm, &TuneOptions { again: true, ..QUICK }).unwrap());
        assert_eq!(
            (again.before, again.candidates[0].plan),
            (PlanOrigin::Table(TableKind::User), first.plan())
        );
    });
    assert!(!tables[1].exists(), "rank 0 writes");
    assert_eq!(
        std::fs::read_to_string(&tables[0]).unwrap().lines().count(),
        3,
        "head, columns and one row"
    );
}

#[test]
fn a_rank_without_rows_takes_part() {
    on_ranks(2, |comm| {
        let folder = tempfile::tempdir().unwrap();
        let table = folder.path().join("plans.csv");
        for timing in [
            timing(
                AllGatherGemm::<bf16>::builder(1, 64, 128)
                    .plan_table(&table)
                    .workers(1)
                    .tune(comm, &QUICK)
                    .unwrap(),
            ),
            timing(
                GemmReduceScatter::<bf16>::builder(1, 64, 128)
                    .plan_table(&table)
                    .workers(1)
                    .tune(comm, &QUICK)
                    .unwrap(),
            ),
        ] {
            assert!(
                timing
                    .candidates
                    .iter()
                    .any(|candidate| matches!(candidate.outcome, Outcome::Timed { .. })),
                "{timing:?}"
            );
        }
    });
}

#[test]
fn the_rounds_of_rank_0_count() {
    on_ranks(2, |comm| {
        let folder = tempfile::tempdir().unwrap();
        let options = TuneOptions { rounds: [3, 40][comm.rank().index()], ..QUICK };
        let found = timing(gather(&folder.path().join("plans.csv")).tune(comm, &options).unwrap());
        assert!(found.us(found.best).is_some(), "{found:?}");
        comm.barrier().unwrap();
    });
}

/// Both ops keep their rows, and each takes its own.
#[test]
fn a_batch_invariant_op_has_rows_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(2, |comm| {
        let builder = |invariant| {
            GemmReduceScatter::<bf16>::builder(512, 64, 256)
                .batch_invariant(invariant)
                .plan_table(&table)
                .workers(1)
        };
        let by_owner: Plan = "tile=128x128x64 rows=per-shard:1 chunk=1".parse().unwrap();
        let refused = builder(true).plan(by_owner).tune(comm, &QUICK).unwrap_err();
        assert!(
            matches!(
                refused,
                TuneError::Build(BuildError::SumOrder { .. }) | TuneError::Peer { .. }
            ),
            "{refused}"
        );
        let any = timing(builder(false).tune(comm, &QUICK).unwrap());
        let fixed = timing(builder(true).tune(comm, &QUICK).unwrap());
        assert!(fixed.candidates.iter().all(|candidate| candidate.plan.is_flattened() && candidate.plan.k == KSplit::Whole), "{fixed:?}");
        for (invariant, timing) in [(false, any), (true, fixed)] {
            let known = builder(invariant).tune(comm, &QUICK).unwrap();
            assert!(
                matches!(known, Tuned::Known { plan, .. } if plan == timing.plan()),
                "{known:?}"
            );
            let op = builder(invariant).build(comm).unwrap();
            assert_eq!(op.plan(512).unwrap(), timing.plan());
            assert!(op.explain().contains(" (from the user's plan table)"), "{}", op.explain());
        }
    });
    let text = std::fs::read_to_string(&table).unwrap();
    assert_eq!(
        (text.lines().count(), text.matches(",gemm_rs batch-invariant,").count()),
        (4, 1),
        "{text}"
    );
}

/// The plan is that of one weight with all columns.
#[test]
fn an_op_of_several_weights_is_tuned() {
    let folder = tempfile::tempdir().unwrap();
    let [table, _] = tables(&folder);
    on_ranks(2, |comm| {
        let builder = || {
            AllGatherGemm::<bf16>::builder(64, 96, 64)
                .several_weights(&[64, 16, 16])
                .plan_table(&table)
        };
        let plan = timing(builder().tune(comm, &QUICK).unwrap()).plan();
        assert_eq!(builder().build(comm).unwrap().plan(64).unwrap(), plan);
    });
}

#[test]
fn rank_0s_row_wins_where_tables_disagree() {
    let folder = tempfile::tempdir().unwrap();
    let tables = tables(&folder);
    let row = |plan: &str| {
        format!(
            "# flux plan table \
             1\ndevice,kernel,driver,transport,world,op,dtype,n,k,m,plan,us\nhost,sm_90a,host,host,2,gemm_rs,bf16,64,128,32,{plan},1.00\n"
        )
    };
    std::fs::write(&tables[0], row("tile=64x128x64")).unwrap();
    std::fs::write(&tables[1], row("tile=128x128x64 k=stream-k")).unwrap();
    on_ranks(2, |comm| {
        let op = GemmReduceScatter::<bf16>::builder(32, 64, 128)
            .plan_table(&tables[comm.rank().index()])
            .build(comm)
            .unwrap();
        assert_eq!(op.plan(32).unwrap().tile.to_string(), "64x128x64");
        assert!(op.explain().contains("(from the user's plan table)"));
    });
}

#[test]
fn a_scattering_op_is_tuned_on_three_ranks_with_bias_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(3, |comm| {
        let builder =
            GemmReduceScatter::<f16>::builder(48, 64, 192).plan_table(&table).bias(true).workers(1);
        let timing = timing(builder.tune(comm, &QUICK).unwrap());
        assert!(
            timing
                .candidates
                .iter()
                .all(|candidate| matches!(candidate.outcome, Outcome::Timed { .. })),
            "{timing:?}"
        );
    });
}

#[test]
fn a_plan_that_cannot_be_built_is_reported_and_the_others_are_timed() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(2, |comm| {
        // The host executor takes any tile, but no such extent.
        let odd: Plan = "tile=4294967295x128x64".parse().unwrap();
        let timing = timing(gather(&table).plan(odd).tune(comm, &QUICK).unwrap());
        assert_eq!(
            (timing.before, timing.model, timing.gain_over(0)),
            (PlanOrigin::Caller, 1, None)
        );
        assert!(
            matches!(&timing.candidates[0].outcome, Outcome::Failed { reason }
                if reason.starts_with("rank 0: ")),
            "{timing:?}"
        );
        assert!(timing.best > 0 && timing.us(1).is_some());
        comm.barrier().unwrap();
    });
}

#[test]
fn a_budget_that_is_spent_leaves_plans_out_and_saves_no_row_of_one_plan() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(2, |comm| {
        let begun = Instant::now();
        let timing = timing(
            gather(&table)
                .tune(comm, &TuneOptions { budget: Duration::ZERO, rounds: 1000, ..QUICK })
                .unwrap(),
        );
        let outcomes: Vec<_> = timing
            .candidates
            .iter()
            .map(|candidate| candidate.outcome == Outcome::NotBegun)
            .collect();
        assert_eq!((outcomes, timing.saved), (vec![false, true], None));
        assert!(begun.elapsed() < Duration::from_mins(1));
    });
    assert!(!table.exists());
}

#[test]
fn a_table_that_cannot_be_written_is_refused_before_anything_is_timed() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    std::fs::write(&table, "my notes\n").unwrap();
    on_ranks(2, |comm| {
        let refused = gather(&table).tune(comm, &QUICK).unwrap_err();
        match comm.rank().get() {
            0 => assert!(
                matches!(refused, TuneError::Table(TableFileError::NoTable { .. })),
                "{refused}"
            ),
            _ => assert!(refused.to_string().starts_with("rank 0 could not tune: "), "{refused}"),
        }
        // It is ignored by a build, and named.
        let op = gather(&table).build(comm).unwrap();
        assert!(
            op.explain().contains("(by the cost model)")
                && op.explain().contains("plan table: ignored: "),
            "{}",
            op.explain()
        );
    });
    assert_eq!(std::fs::read_to_string(&table).unwrap(), "my notes\n");
}

#[test]
fn ranks_that_tune_different_ops_are_told_so() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(2, |comm| {
        let m = 32 + 32 * comm.rank().index();
        let refused = AllGatherGemm::<bf16>::builder(m, 64, 128)
            .plan_table(&table)
            .tune(comm, &QUICK)
            .unwrap_err();
        assert!(matches!(refused, TuneError::Build(BuildError::Disagreement { .. })), "{refused}");
        // One tunes, the other builds.
        let refused = match comm.rank().get() {
            0 => gather(&table).tune(comm, &QUICK).map(drop).unwrap_err().to_string(),
            _ => gather(&table).build(comm).map(drop).unwrap_err().to_string(),
        };
        assert!(
            refused.contains("the ranks build different ops") && refused.contains("`tune ag_gemm"),
            "{refused}"
        );
        comm.barrier().unwrap();
    });
}

#[test]
fn a_fault_ends_the_tuning_of_all_ranks_and_earlier_rows_stay() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("plans.csv");
    on_ranks(2, |comm| {
        gather(&table).tune(comm, &QUICK).unwrap();
        if comm.rank().get() == 1 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(300));
                    comm.abort(7);
                });
                let long = TuneOptions { rounds: 4000, again: true, ..QUICK };
                AllGatherGemm::<bf16>::builder(256, 512, 512)
                    .plan_table(&table)
                    .workers(1)
                    .tune(comm, &long)
                    .unwrap_err()
            });
        } else {
            let long = TuneOptions { rounds: 4000, again: true, ..QUICK };
            let ended = AllGatherGemm::<bf16>::builder(256, 512, 512)
                .plan_table(&table)
                .workers(1)
                .tune(comm, &long)
                .unwrap_err();
            assert!(
                ended.to_string().contains("abort") || ended.to_string().contains("rank 1"),
                "{ended}"
            );
        }
        assert!(comm.status().is_err());
    });
    assert_eq!(std::fs::read_to_string(&table).unwrap().lines().count(), 3);
}
