//! Summary and trace events of a made-up call.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use super::{Args, Traced, events, summary};
use flux_core::plan::Plan;
use flux_core::program::{Sink, WorkItem};
use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};
use flux_ops::{ItemStamps, TimedItem, Timeline, WorkerStamps};
use serde_json::Value;

const START: u64 = 7_000_000_000;

/// Two ranks of two CTAs with three items each: a long send, another send, and a reduction.
pub(crate) fn call() -> (Problem, Vec<Traced>) {
    let problem = Problem::new(
        OpKind::GemmReduceScatter,
        256,
        256,
        128,
        DType::Bf16,
        WorldSize::new(2).unwrap(),
    )
    .unwrap();
    let ranks = (0..2).map(|rank| {
        let start = START + u64::from(rank) * 1_000_000;
        let items = (0..6).map(|i| timed(i, start)).collect();
        let worker = |cta: u32| WorkerStamps {
            entered: start + u64::from(cta) * 32,
            left: start + 70_500 + u64::from(cta) * 1000,
            multiprocessor: 100 + cta,
            reserved: 0,
            push_begun: start + 2_000 + u64::from(cta) * 500,
            first_delivered: start + 5_000,
            last_delivered: 0,
            first_rows: if cta == 0 { start + 9_000 } else { 0 },
        };
        let timeline =
            Timeline { rank: Rank::new(rank), items, workers: vec![worker(0), worker(1)] };
        let (plan, words) = (Plan::of(TileShape::new(128, 128, 64)), "a plan".to_owned());
        Traced { timeline, call_ms: 0.0725, on_gpu: true, plan, words }
    });
    (problem, ranks.collect())
}

fn timed(i: u64, start: u64) -> TimedItem {
    let (turn, cta) = (i / 2, i % 2);
    let reduces = turn == 2;
    let at = |us: u64| start + (20 * turn + us) * 1000 + cta * 500;
    let times = ItemStamps {
        opened: at(1),
        rows_there: at(1),
        loaded: at(15),
        partials_there: if reduces { at(22) } else { 0 },
        multiplied: at(17),
        summed: if reduces { at(23) } else { at(17) },
        written: if reduces { at(24) } else { at(18) },
        // A send's write completes after the next item's result is there.
        sent: if reduces { at(26) } else { at(40) },
    };
    let sink = if reduces { Sink::Reduce } else { Sink::Send };
    TimedItem {
        item: WorkItem {
            sink,
            partials: u32::from(reduces),
            row: 128 * u32::try_from(turn).unwrap(),
            ..WorkItem::default()
        },
        times,
    }
}

#[test]
fn the_summary_has_a_row_for_every_wave_and_sink() {
    let (problem, ranks) = call();
    let text = summary(&problem, &ranks);
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(text.lines().filter(|line| line.starts_with("rank ")).count(), 2, "{text}");
    assert!(
        text.contains("push begun: 2.0/2.5/2.5 on 2 workers")
            && text.contains("first rows there: 9.0/9.0/9.0 on 1 workers"),
        "{text}"
    );
    assert!(!text.contains("last chunk delivered"), "{text}");
    let head = "rank 1: 2 workers, last began 0.0, left 70.5/71.5/71.5; call 72.5 by events";
    assert!(text.contains(head), "{text}");
    let of =
        |first: &[&str]| lines.iter().rev().find(|line| line.starts_with(first)).unwrap().clone();
    assert_eq!(
        of(&["0", "send"])[2..],
        [
            "2",
            "1.0/1.5/1.5",
            "15.0/15.5/15.5",
            "17.0/17.5/17.5",
            "-",
            "17.0/17.5/17.5",
            "40.0/40.5/40.5"
        ]
    );
    let reduce = [
        "2",
        "41.0/41.5/41.5",
        "55.0/55.5/55.5",
        "57.0/57.5/57.5",
        "62.0/62.5/62.5",
        "63.0/63.5/63.5",
        "66.0/66.5/66.5",
    ];
    assert_eq!(of(&["2", "reduce"])[2..], reduce);
}

#[test]
fn spans_of_a_thread_nest_and_lie_within_their_cta() {
    let (problem, ranks) = call();
    let trace: Value =
        serde_json::from_str(&serde_json::to_string(&events(&problem, &ranks)).unwrap()).unwrap();
    let all = trace["traceEvents"].as_array().unwrap();
    let spans: Vec<&Value> = all.iter().filter(|e| e["ph"] == "X").collect();
    let number = |e: &Value, key: &str| e[key].as_f64().unwrap();
    for pid in 0..2 {
        for tid in 0..6 {
            let mut of_thread: Vec<(f64, f64)> = spans
                .iter()
                .filter(|e| e["pid"] == pid && e["tid"] == tid)
                .map(|e| (number(e, "ts"), number(e, "ts") + number(e, "dur")))
                .collect();
            of_thread.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
            assert!(of_thread.len() >= 3, "process {pid}, thread {tid}");
            for (i, a) in of_thread.iter().enumerate() {
                assert!(a.0 >= 0.0 && a.1 <= 71.5 + 1e-9, "{a:?}");
                for b in &of_thread[i + 1..] {
                    assert!(
                        b.0 >= a.1 - 1e-9 || b.1 <= a.1 + 1e-9,
                        "process {pid}, thread {tid}: {a:?} and {b:?} overlap"
                    );
                }
            }
        }
    }
    let names: Vec<&str> = all.iter().filter_map(|e| e["args"]["name"].as_str()).collect();
    assert!(names.contains(&"rank 1") && names.contains(&"CTA 001 storer (SM 101)"), "{names:?}");
    let reduce = spans.iter().find(|e| e["name"] == "add partials").unwrap();
    assert_eq!(
        (reduce["args"]["kind"].as_str(), reduce["args"]["row"].as_u64()),
        (Some("reduce"), Some(256))
    );
}

#[test]
fn a_layer_without_the_op_is_refused() {
    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }
    let layer = |words: &str, on_gpus: bool| {
        let words = ["trace", "--ms", "512", "--summary"].into_iter().chain(words.split(' '));
        let args = <Command as clap::Parser>::parse_from(words).args;
        super::layer(&args, 4, on_gpus)
            .map(|layer| layer.problem.to_string())
            .map_err(|error| error.to_string())
    };
    let problem = |words: &str| layer(words, true);
    assert_eq!(problem("--ops ag_gemm"), Ok("ag_gemm m=512 n=49152 k=12288 bf16 tp=4".to_owned()));
    let on_host = layer("--ops ag_gemm", false);
    assert_eq!(on_host, Ok("ag_gemm m=512 n=3072 k=768 bf16 tp=4".to_owned()));
    assert_eq!(
        problem("--shapes llama3-8b.o --ops ag_gemm"),
        Err("llama3-8b.o has no ag_gemm".to_owned())
    );
}
