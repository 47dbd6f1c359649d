//! Distance of the model's choice to the fastest timed plan.

use crate::fixture::{Row, rows};
use flux_core::plan::{CommMode, Mover};
use std::collections::BTreeMap;

/// Least plans of a line that is compared.
const PLANS: usize = 3;

/// Percent by which the model's first plan, and the best of its first three, are slower than the
/// fastest plan of a line.
struct Behind {
    line: String,
    first: f64,
    of_three: f64,
}

/// Rows of plans that were timed side by side, by line; one problem each.
fn lines() -> BTreeMap<String, Vec<Row>> {
    let mut lines = BTreeMap::<String, Vec<Row>>::new();
    for row in rows("timed-plans.csv") {
        let line =
            ["line", "device", "world", "op", "m", "n"].map(|column| row.get(column)).join(" ");
        lines.entry(line).or_default().push(row);
    }
    lines.retain(|_, rows| rows.len() >= PLANS);
    lines
}

fn behind(line: &str, rows: &[Row]) -> Behind {
    let (problem, target) = (rows[0].problem(), rows[0].target());
    let mut ranked: Vec<_> = rows
        .iter()
        .map(|row| (row.plan().cost_ns(&problem, &target), row.number("t_ms")))
        .collect();
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0));
    let fastest =
        |of: usize| ranked.iter().take(of).map(|plan| plan.1).fold(f64::INFINITY, f64::min);
    let percent = |of| (fastest(of) / fastest(ranked.len()) - 1.0) * 100.0;
    Behind { line: line.to_owned(), first: percent(1), of_three: percent(3) }
}

#[test]
fn the_models_choice_is_near_the_fastest_plan_that_was_timed() {
    let behind: Vec<_> = lines().iter().map(|(line, rows)| behind(line, rows)).collect();
    let mean = |of: fn(&Behind) -> f64| behind.iter().map(of).sum::<f64>() / behind.len() as f64;
    let (first, of_three) = (mean(|line| line.first), mean(|line| line.of_three));
    let worst = behind.iter().max_by(|a, b| a.first.total_cmp(&b.first)).unwrap();
    let text = format!(
        "{} lines: {first:.2} % in the mean, {:.1} % at most ({}), best of three {of_three:.2} %",
        behind.len(),
        worst.first,
        worst.line
    );
    println!("{text}");
    assert!(behind.len() >= 250 && first < 1.5 && worst.first < 15.0 && of_three < 0.3, "{text}");
}

/// Schedules derived from frozen plans are those of the records.
#[test]
fn what_the_records_say_follows_from_their_plans() {
    let (mut rows_in_all, mut other) = (0, 0);
    for row in rows("frozen-medians.csv").iter().filter(|row| row.get("transport") == "nvlink") {
        let (problem, target, plan) = (row.problem(), row.target(), row.plan());
        let schedule = plan.schedule(&problem, &target);
        assert_eq!(
            schedule.in_mainloop.to_string(),
            row.get("in_mainloop_partials"),
            "{problem}: {plan}"
        );
        assert_eq!(schedule.prologue.to_string(), row.get("prologue_shards"), "{problem}: {plan}");
        rows_in_all += 1;
        other += u32::from(schedule.chunk_ordered.to_string() != row.get("chunk_ordered_shards"));
        assert_eq!(
            plan.canonical(&problem, &target).canonical(&problem, &target),
            plan.canonical(&problem, &target)
        );
        let copies = plan.comm == CommMode::Fused { mover: Mover::CopyEngine };
        assert!(
            !copies || plan.canonical(&problem, &target).comm == plan.comm,
            "{problem}: {plan}"
        );
    }
    // The records have a few rows in chunk order over peer memory.
    assert!(rows_in_all >= 800 && other <= 4, "{other} of {rows_in_all}");
}
