//! What the heuristic chooses for rows between whole tiles is near the fastest of the plans that were timed beside each other.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use flux_core::program::Schedule;
use flux_core::{DType, OpKind, Problem, WorldSize};
use std::fs;
use std::path::Path;

/// Tables of plans beside each other, and on how many GPUs: a line for each shape and machine, with the fastest, and what was chosen when they were timed.
const TABLES: [(&str, u32); 3] = [("plans-of-rows.txt", 2), ("tile-rows.txt", 2), ("slices-tp4.txt", 4)];
/// Lines with so many plans say something of a choice.
const PLANS: usize = 3;
/// Of the lines in which today's choice stands, some 124: how many there are at least, and by how many percent it may be above the fastest, in the mean and at most. A choice that changes
/// to a plan that stands in no line makes them fewer.
const LEAST: usize = 120;
const MEAN: f64 = 0.6;
const MOST: f64 = 5.0;

/// Op, model, rows, and the milliseconds of each plan.
type Line = (OpKind, String, usize, Vec<(String, f64)>);

/// A plan as the tables write it: tile, whether it spans shards or in which bands it does not, slices, splits, shared and early.
fn written(schedule: &Schedule) -> String {
    let Schedule { tile, band, k_chunks, splits, shares, stack, early, .. } = *schedule;
    let more = |letter: &str, number: u32, least: u32| (number > least).then(|| format!("{letter}{number}"));
    let words = [
        Some(format!("{}x{}", tile.m, tile.n)),
        Some(if stack { "S".to_owned() } else { format!("u b{band}") }),
        more("k", k_chunks, 1),
        more("/", splits, 1),
        (shares > 1).then(|| "sh".to_owned()),
        more("e", early, 0),
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// A plan without its number of slices.
fn in_any_slices(plan: &str) -> String {
    plan.split_whitespace().filter(|word| !word.starts_with('k')).collect::<Vec<_>>().join(" ")
}

/// A line of a table, if it is one: `op model rows serial X: plan time | plan time`, a chosen plan with a mark.
fn line(text: &str) -> Option<Line> {
    let (head, plans) = text.split_once(": ")?;
    let mut words = head.split_whitespace();
    let op = match words.next()? {
        "ag_gemm" => OpKind::AllGatherGemm,
        "gemm_rs" => OpKind::GemmReduceScatter,
        _ => return None,
    };
    let (model, rows) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    let timed = |plan: &str| {
        let (plan, time) = plan.trim().rsplit_once(' ')?;
        Some((plan.trim_end_matches(['*', '+']).to_owned(), time.parse().ok()?))
    };
    Some((op, model, rows, plans.split('|').filter_map(timed).collect()))
}

#[test]
fn what_is_chosen_is_near_the_fastest_that_was_timed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results/tuning");
    let texts = TABLES.map(|(name, world)| (fs::read_to_string(folder.join(name)).unwrap(), world));
    let lines: Vec<(u32, Line)> = texts.iter().flat_map(|(text, world)| text.lines().filter_map(line).map(|line| (*world, line))).collect();
    let (mut over, mut absent) = (Vec::new(), 0);
    for (world, (op, model, m, plans)) in lines.iter().filter(|(_, (.., plans))| plans.len() >= PLANS) {
        let (wide, narrow) = if model == "gpt3" { (49152, 12288) } else { (28672, 8192) };
        let (n, k) = if *op == OpKind::AllGatherGemm { (wide, narrow) } else { (narrow, wide) };
        let problem = Problem::new(*op, *m, n, k, DType::Bf16, WorldSize::new(*world).unwrap()).unwrap();
        let chosen = written(&Schedule::heuristic(&problem));
        let fastest = plans.iter().map(|plan| plan.1).fold(f64::INFINITY, f64::min);
        // Else the same in another number of slices, which are fewer since: with so few as are chosen calls take up to 4 % less time (slices-tp4.txt, 4.).
        let same = plans
            .iter()
            .find(|plan| plan.0 == chosen)
            .or_else(|| plans.iter().find(|plan| in_any_slices(&plan.0) == in_any_slices(&chosen)));
        match same {
            Some((_, time)) => over.push(((time / fastest - 1.0) * 100.0, format!("{problem}: {chosen}"))),
            None => absent += 1,
        }
    }
    over.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mean = over.iter().map(|row| row.0).sum::<f64>() / over.len() as f64;
    let worst = over.last().unwrap();
    println!("{} lines, {mean:.2} % in the mean, {:.1} % at most ({}); {absent} without today's choice", over.len(), worst.0, worst.1);
    assert!(over.len() >= LEAST && mean < MEAN && worst.0 < MOST, "{} lines, {mean:.2} %, {worst:?}", over.len());
}
