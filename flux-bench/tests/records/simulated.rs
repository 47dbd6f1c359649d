//! What is simulated of the committed results is what was measured, within what the model is said
//! to be off by.

use flux_bench::{
    Compared, LEAST_ROWS, Layer, PlanArgs, Row, Simulation, compare, layers, parse_op, plans,
    read_report, simulated_published, simulated_table, world,
};
use flux_core::DType;
use flux_core::machine::Machine;
use flux_core::plan::{Plan, Target};
use std::path::Path;

/// Two runs of one GEMM on one machine differ by 7 %, and long calls slow the clock down.
const AT_MOST: f64 = 10.0;
/// So much of that may be another machine's clocks: the median of its rows' deviations.
const CLOCKS: f64 = 7.0;
/// Deviations around the median of another machine's rows.
const AROUND_CLOCKS: f64 = 11.0;
/// Half of the rows of four H100 are met better than that.
const HALF: f64 = 4.0;
/// The same of another machine than the model's rates are of.
const AT_MOST_ELSEWHERE: f64 = 11.0;
const HALF_ELSEWHERE: f64 = 6.0;

/// The deviations of the medians in percent, ascending, of at least so many rows with today's
/// plan.
fn deviations(name: &str, machine: &Machine, least: usize) -> Vec<f64> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results").join(name);
    let report = read_report(&path).unwrap();
    let compared = compare(&report, PlanArgs::default(), machine).unwrap();
    // Copies through the host begin too late for less, and some rows were disturbed.
    let least_rows = if machine.host_staged { 2 * LEAST_ROWS } else { LEAST_ROWS };
    let steady = |row: &Row| !machine.host_staged || row.t_op_ms.p90 < 1.2 * row.t_op_ms.p10;
    let rows = compared
        .iter()
        .zip(&report.rows)
        .filter(|(_, row)| steady(row))
        .map(|(compared, _)| compared);
    let same = rows.filter(|row| row.head.m >= least_rows && row.same_plan);
    let mut off: Vec<f64> = same.map(|row| row.t_op_ms.off()).collect();
    assert!(off.len() >= least, "{name}: only {} rows are of today's plans", off.len());
    off.sort_by(f64::total_cmp);
    off
}

#[test]
fn committed_rows_are_met_within_the_tolerance() {
    // Another machine than the one that was fitted, quicker than that: all rows but those at the
    // power limit are simulated too long.
    let mut four: Vec<f64> =
        deviations("h200-x4-nvlink.json", &Machine::H200, 15).into_iter().map(f64::abs).collect();
    four.sort_by(f64::total_cmp);
    assert!(
        four.iter().all(|&off| off <= AT_MOST_ELSEWHERE)
            && four[(four.len() - 1) / 2] <= HALF_ELSEWHERE,
        "{four:?}"
    );
    // A third, whose clocks are its own: what they are off by all rows have in common.
    let others = deviations("h200-x2-nvlink.json", &Machine::H200, 15);
    let clocks = others[others.len() / 2];
    assert!(clocks.abs() <= CLOCKS, "{clocks:.1} % of {others:?}");
    assert!(others.iter().all(|off| (off - clocks).abs() <= AROUND_CLOCKS), "{others:?}");
}

#[test]
fn so_are_those_of_h100_over_links_and_through_the_host() {
    for (name, machine, least, half, most) in [
        ("h100-x4-nvlink.json", Machine::H100, 15, HALF, AT_MOST),
        ("h100-x2-nvlink.json", Machine::H100, 15, 4.5, AT_MOST),
        // The plans of this record do not say in which order chunks went: one row is 18 % off.
        ("h100-x2-pcie.json", Machine::H100_PAIR_BY_HOST, 12, 3.0, 18.0),
    ] {
        let mut off: Vec<f64> =
            deviations(name, &machine, least).into_iter().map(f64::abs).collect();
        off.sort_by(f64::total_cmp);
        assert!(
            off.iter().all(|&off| off <= most) && off[(off.len() - 1) / 2] <= half,
            "{name}: {off:?}"
        );
    }
}

/// Wherever `simulate` tells a gain over it, the serial path of four GPUs is known within 10 %, but
/// for a row of each record. Two GPUs have clocks of their own: there it is 14 %.
#[test]
fn a_gain_is_told_only_where_the_serial_path_is_known() {
    for (name, machine, most, beyond) in [
        ("h200-x4-nvlink.json", &Machine::H200, 11.0, 1),
        ("h100-x4-nvlink.json", &Machine::H100, 11.0, 0),
        ("h200-x4-ar-nvlink.json", &Machine::H200, 11.0, 0),
        ("h200-x2-nvlink.json", &Machine::H200, 14.0, 4),
        ("h100-x2-nvlink.json", &Machine::H100, 14.0, 3),
    ] {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results").join(name);
        let report = read_report(&path).unwrap();
        let compared = compare(&report, PlanArgs::default(), machine).unwrap();
        let told = |row: &&Compared| row.head.m >= LEAST_ROWS;
        let off: Vec<f64> =
            compared.iter().filter(told).map(|row| row.t_serial_ms.off().abs()).collect();
        assert!(off.iter().all(|&off| off <= most), "{name}: {off:?}");
        assert!(off.iter().filter(|&&off| off > 10.0).count() <= beyond, "{name}: {off:?}");
    }
    let row = |m, machine: Machine| {
        let simulation =
            Simulation::of_layer(layer("gemm_rs", "gpt3", m), named(TRIED[7].3), &machine);
        simulation.unwrap().speed_up(&machine)
    };
    assert!(row(512, Machine::H200).is_some_and(|speed_up| speed_up > 1.0));
    assert_eq!(row(256, Machine::H200), None);
    let text = simulated_table(
        &[Simulation::of_layer(
            layer("gemm_rs", "gpt3", 16),
            PlanArgs::default(),
            &Machine::A100_SXM,
        )
        .unwrap()],
        &Machine::A100_SXM,
    );
    assert!(
        text.contains("no kernel of flux ever ran on that card") && text.ends_with("  -    -\n"),
        "{text}"
    );
}

/// Op, model, m, plan, and T_op of two runs at TP 4 (wide-bands.txt of commit 8bbd3da).
/// `Machine::copy_ns` is fitted to those with slices of k.
const TRIED: [(&str, &str, u32, &str, [f64; 2]); 9] = [
    (
        "ag_gemm",
        "gpt3",
        2048,
        "tile=128x256x64 rows=per-shard:3 chunk=1 comm=fused:copy-engine",
        [0.826, 0.828],
    ),
    (
        "ag_gemm",
        "llama70b",
        2048,
        "tile=128x224x64 rows=per-shard:3 chunk=2 comm=fused:copy-engine",
        [0.336, 0.333],
    ),
    (
        "ag_gemm",
        "gpt3",
        2048,
        "tile=128x256x64 rows=per-shard:2 chunk=1 k-slices=4 comm=fused:copy-engine",
        [0.817, 0.820],
    ),
    (
        "ag_gemm",
        "llama70b",
        2048,
        "tile=128x224x64 rows=per-shard:2 chunk=2 k-slices=4 comm=fused:copy-engine",
        [0.332, 0.333],
    ),
    (
        "ag_gemm",
        "llama70b",
        4096,
        "tile=128x256x64 rows=per-shard:3 chunk=2 comm=fused:copy-engine",
        [0.765, 0.743],
    ),
    ("gemm_rs", "gpt3", 1024, "tile=128x256x64 rows=per-shard:3 chunk=1", [0.464, 0.463]),
    ("gemm_rs", "llama70b", 1024, "tile=128x256x64 rows=per-shard:3 chunk=1", [0.208, 0.209]),
    ("gemm_rs", "llama70b", 512, "tile=128x128x64 rows=per-shard:4 chunk=1", [0.113, 0.113]),
    ("gemm_rs", "llama70b", 512, "tile=128x256x64 rows=per-shard:4 chunk=1", [0.116, 0.116]),
];

fn named(plan: &str) -> PlanArgs {
    PlanArgs { plan: Some(plan.parse().unwrap()), candidate: None }
}

fn layer(op: &str, model: &str, m: u32) -> Layer {
    layers(
        &model.parse().unwrap(),
        &[parse_op(op).unwrap()],
        &[m as usize],
        DType::Bf16,
        world(4).unwrap(),
    )
    .unwrap()
    .remove(0)
}

#[test]
fn the_record_beside_published_times_is_what_is_simulated() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .join("results/simulated-published.txt");
    let simulated = simulated_published().unwrap();
    assert!(simulated.starts_with("SIMULATED, not measured"), "{simulated}");
    assert!(
        std::fs::read_to_string(path).unwrap()
            == format!("$ flux-bench simulate --published\n{simulated}"),
        "{simulated}"
    );
}

#[test]
fn plans_that_were_tried_are_met_too() {
    for (op, model, m, plan, measured) in TRIED {
        let simulated = Simulation::of_layer(layer(op, model, m), named(plan), &Machine::H200)
            .unwrap()
            .op
            .as_secs_f64()
            * 1e3;
        let measured = f64::midpoint(measured[0], measured[1]);
        let off = (simulated / measured - 1.0) * 100.0;
        assert!(
            off.abs() <= AT_MOST,
            "{op} {model} m {m}: {measured:.3} ms measured, {simulated:.3} simulated, with {plan}"
        );
    }
}

#[test]
fn plans_are_those_that_were_simulated() {
    let layer = layer("gemm_rs", "gpt3", 1024);
    let target = Target::peer_memory(Machine::H200, &layer.problem);
    let row = |args| Simulation::of_layer(layer.clone(), args, &Machine::H200).unwrap();
    let (first, other) =
        (row(PlanArgs { plan: None, candidate: Some(0) }), row(named("tile=128x192x64 chunk=1")));
    assert_eq!(first.plan, Plan::ranked(&layer.problem, &target)[0]);
    let text = plans(&[first, other]);
    assert_eq!(text.lines().count(), 2);
    assert!(
        text.lines().next().unwrap().contains("m 1024")
            && text.lines().last().unwrap().contains("tile=128x192x64"),
        "{text}"
    );
}

#[test]
fn a_tile_that_no_kernel_has_is_marked() {
    let row = |cols: u32| {
        let plan = named(&format!("tile=128x{cols}x64 chunk=1"));
        Simulation::of_layer(layer("gemm_rs", "gpt3", 1024), plan, &Machine::H200).unwrap()
    };
    let text = simulated_table(&[row(192), row(136)], &Machine::H200);
    let marked: Vec<bool> = text
        .lines()
        .filter(|line| line.starts_with("gemm_rs"))
        .map(|line| line.ends_with("  no kernel of this tile"))
        .collect();
    assert_eq!(marked, [false, true], "{text}");
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("results/h200-x2-nvlink.json");
    let compared = |args| compare(&read_report(&path).unwrap(), args, &Machine::H200).unwrap();
    assert!(compared(PlanArgs::default()).iter().all(|row| row.kernel));
    assert!(compared(named("tile=128x136x64 chunk=1")).iter().all(|row| !row.kernel));
}

#[test]
fn only_what_was_measured_there_is_compared() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let report = |name: &str| read_report(&root.join("results").join(name)).unwrap();
    let error = |name, machine| {
        compare(&report(name), PlanArgs::default(), machine).unwrap_err().to_string()
    };
    assert_eq!(
        error("h200-x4-nvlink.json", &Machine::H800),
        "measured on NVIDIA H200, and H800 would be simulated"
    );
    assert_eq!(
        error("h200-x2-pcie.json", &Machine::H200),
        "measured over pcie, and only nvlink is simulated of H200"
    );
    assert_eq!(
        error("h100-x2-nvlink.json", &Machine::H100_PAIR_BY_HOST),
        "measured over nvlink, and only pcie is simulated of H100-pair-by-host"
    );
}
