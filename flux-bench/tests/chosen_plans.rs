//! The plan that an op chooses is near the fastest of those that were timed beside each other.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_core::plan::{KSplit, Plan, RowMapping};
use flux_core::program::Schedule;
use flux_core::{DType, OpKind, Problem, WorldSize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Lines with fewer plans say little of a choice.
const PLANS: usize = 3;

/// Plans of one problem that were timed beside each other, with their milliseconds.
struct Line {
    problem: Problem,
    plans: Vec<(Plan, f64)>,
}

/// The lines of `results/timed-plans.csv` that were timed over this transport.
fn lines(transport: &str) -> Vec<Line> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results/timed-plans.csv");
    let text = fs::read_to_string(path).unwrap();
    let mut rows = text.lines().filter(|line| !line.starts_with('#'));
    let head: Vec<&str> = rows.next().unwrap().split(',').collect();
    let column = |name: &str| head.iter().position(|&column| column == name).unwrap();
    let mut lines = BTreeMap::<String, Line>::new();
    for row in rows {
        let cells: Vec<&str> = row.split(',').collect();
        let cell = |name: &str| cells[column(name)];
        if cell("transport") != transport {
            continue;
        }
        let op = if cell("op") == "ag_gemm" { OpKind::AllGatherGemm } else { OpKind::GemmReduceScatter };
        let [m, n, k] = ["m", "n", "k"].map(|name| cell(name).parse().unwrap());
        assert_eq!(cell("dtype"), "bf16");
        let world = WorldSize::new(cell("world").parse().unwrap()).unwrap();
        let problem = Problem::new(op, m, n, k, DType::Bf16, world).unwrap();
        let line = lines.entry(cell("line").to_owned()).or_insert_with(|| Line { problem, plans: Vec::new() });
        assert_eq!(line.problem, problem, "{row}");
        line.plans.push((cell("plan").parse().unwrap(), cell("t_ms").parse().unwrap()));
    }
    lines.into_values().collect()
}

/// Tile, rows, k and slices of a plan.
type Key = (flux_core::TileShape, RowMapping, KSplit, u32);

fn chosen(problem: &Problem) -> Key {
    let schedule = Schedule::heuristic(problem);
    let rows = if schedule.stack { RowMapping::Flattened } else { RowMapping::PerShard { group: schedule.band } };
    let k = match (schedule.splits, schedule.shares) {
        (1, 1) => KSplit::Whole,
        (1, _) => KSplit::StreamK,
        (splits, _) => KSplit::SplitK(splits),
    };
    (schedule.tile, rows, k, schedule.k_slices)
}

/// The choice stands in so many lines at least, and takes at most so many percent more than the
/// fastest, in the mean and at worst.
fn assert_near(transport: &str, least_lines: usize, mean_percent: f64, worst_percent: f64) {
    let mut above = Vec::new();
    for Line { problem, plans } in lines(transport).into_iter().filter(|line| line.plans.len() >= PLANS) {
        let (tile, rows, k, slices) = chosen(&problem);
        let fastest = plans.iter().map(|plan| plan.1).fold(f64::INFINITY, f64::min);
        let times = |same: &dyn Fn(&Plan) -> bool| plans.iter().find(|(plan, _)| same(plan)).map(|plan| plan.1);
        let same = |plan: &Plan| (plan.tile, plan.rows, plan.k) == (tile, rows, k);
        let exact = times(&|plan| same(plan) && plan.k_slices == slices);
        if let Some(time) = exact.or_else(|| times(&same)) {
            above.push(((time / fastest - 1.0) * 100.0, problem));
        }
    }
    above.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mean = above.iter().map(|line| line.0).sum::<f64>() / above.len() as f64;
    let (worst, problem) = above.last().unwrap();
    let text = format!("{} lines, {mean:.2} % in the mean, {worst:.1} % at worst ({problem})", above.len());
    assert!(above.len() >= least_lines && mean < mean_percent && *worst < worst_percent, "{text}");
    println!("{text}");
}

#[test]
fn the_choice_is_near_the_fastest_over_links() {
    assert_near("nvlink", 120, 0.6, 5.0);
}

#[test]
fn the_choice_is_near_the_fastest_as_one_rank_of_many() {
    assert_near("local", 58, 1.6, 9.0);
}
