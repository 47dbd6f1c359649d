//! Tracks of made-up calls, and the pages that are drawn of them.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

use super::*;
use crate::harness::PlannedLayer;
use crate::plan::PlanArgs;
use crate::shapes::{Layer, world};
use crate::{page, simulate, trace};
use Phase::{Add, Multiply, Send, Wait};
use flux_core::machine::Machine;
use flux_core::program::Sink;
use flux_core::{DType, OpKind, Problem};
use flux_ops::{ItemStamps, Timeline};

fn stamped() -> Timeline {
    trace::tests::call().1.remove(1).timeline
}

/// Ends of a track's phases in microseconds since its begin.
fn ends(track: &Track) -> Vec<(Phase, f64)> {
    let us = |time: Duration| time.saturating_sub(track.begin()).as_secs_f64() * 1e6;
    track.spans().iter().map(|span| (span.phase, us(span.end))).collect()
}

#[test]
fn spans_of_a_worker_follow_one_another_from_its_begin_to_its_end() {
    let timeline = stamped();
    let all = workers(&timeline, true).unwrap();
    for (worker, life) in all.iter().zip(&timeline.workers) {
        let mut at = Duration::from_nanos(life.entered);
        assert_eq!(worker.track.begin(), at);
        for span in worker.track.spans() {
            assert!(span.begin == at && span.end > at, "{span:?} after {at:?}");
            at = span.end;
        }
        assert_eq!(at, Duration::from_nanos(life.left));
    }
    // Sends end under the next product, so of the first two only what precedes it is exposed.
    let expected = [
        (Wait, 1.0),
        (Multiply, 17.0),
        (Send, 21.0),
        (Multiply, 37.0),
        (Send, 41.0),
        (Multiply, 57.0),
        (Wait, 62.0),
        (Add, 63.0),
        (Send, 66.0),
        (Wait, 70.5),
    ];
    assert_eq!(ends(&all[0].track), expected);
    assert_eq!(
        (&*all[1].name, &*workers(&timeline, false).unwrap()[1].name),
        ("CTA 1 on SM 101", "worker 1")
    );
}

#[test]
fn scattered_rows_are_awaited_and_added_behind_the_last_tile() {
    let mut timeline = stamped();
    for item in &mut timeline.items[4..] {
        item.item.sink = Sink::ReduceRows;
        let ItemStamps { opened, rows_there, loaded, partials_there, written, .. } = item.times;
        let passed = ItemStamps { opened, rows_there, loaded, ..ItemStamps::default() };
        item.times = ItemStamps { partials_there, written, ..passed };
    }
    let track = &workers(&timeline, true).unwrap()[0].track;
    assert_eq!(ends(track)[4..], [(Send, 60.0), (Wait, 62.0), (Add, 64.0), (Wait, 70.5)]);
    timeline.items[5].item.sink = Sink::ReduceRows;
    timeline.items[5].times.partials_there = 1;
    let error = format!("{:#}", workers(&timeline, true).unwrap_err());
    assert!(error.contains("item 5: partials_there at 1 ns is before"), "{error}");
}

#[test]
fn stamps_that_no_call_leaves_are_named() {
    let refused = |spoil: fn(&mut Timeline)| {
        let mut timeline = stamped();
        spoil(&mut timeline);
        format!("{:#}", workers(&timeline, true).unwrap_err())
    };
    let of = |worker: &str| format!("the time line of rank 1, {worker}, is malformed: ");
    let backwards = refused(|line| line.items[2].times.summed = 5);
    let multiplied = stamped().items[2].times.multiplied;
    assert_eq!(
        backwards,
        of("CTA 0 on SM 100")
            + &format!("item 2: summed at 5 ns is before multiplied at {multiplied} ns")
    );
    let overlaps = refused(|line| line.items[3].times.multiplied = line.items[1].times.rows_there);
    assert!(
        overlaps.contains("CTA 1") && overlaps.contains("item 3: multiplied at "),
        "{overlaps}"
    );
    let never_begun = refused(|line| line.items[5].times.opened = 0);
    assert!(
        never_begun.contains("item 5: opened at 0 ns is before its worker's begin"),
        "{never_begun}"
    );
    let beyond = refused(|line| line.workers[1].left = line.items[5].times.loaded);
    assert!(beyond.contains("its worker's end at "), "{beyond}");
    let without = refused(|line| line.items[0].times.written = 0);
    assert!(without.contains("item 0 has no stamp of its result: "), "{without}");
    let nobody = refused(|line| line.workers.clear());
    assert_eq!(nobody, "rank 1 has no workers: its time line is malformed");
}

fn made_up() -> Call {
    let ranks = trace::tests::call().1;
    let ranks = ranks.iter().map(|rank| workers(&rank.timeline, true).unwrap()).collect();
    Call { title: "made up".to_owned(), about: Vec::new(), ranks }
}

/// Nanoseconds that a page draws of a class.
fn drawn(page: &str, class: char) -> u64 {
    let begin = format!("<path class=\"{class}\" d=\"M");
    let paths = page.split(&begin).skip(1);
    let lengths = paths.flat_map(|path| path.split('"').next().unwrap().split('h').skip(1));
    // Samples of the legend are one unit long.
    let length = |words: &str| words.split('m').next().unwrap().parse::<u64>().unwrap();
    lengths.map(length).sum::<u64>() - 1
}

fn rows(page: &str) -> usize {
    page.matches("<g transform=\"translate(0 ").count()
}

#[test]
fn the_exposed_wait_of_the_title_is_the_sum_of_what_is_drawn() {
    let call = made_up();
    let page = page::of_timelines(std::slice::from_ref(&call)).unwrap();
    // 1, 5 and 4.5 us of the first CTA; the second begins 32 ns later, and ends 1 us later.
    assert_eq!(drawn(&page, 'w'), 2 * (10_500 + 11_500 - 32));
    let title = "<title>made up: exposed wait 43.9 us of 4 workers, 11.0 us each, 15.5 %</title>";
    assert!(page.contains(title), "{}", &page[..400]);
    assert_eq!(rows(&page), 4);
    for outside in ["src=", "url(", "@import", "<link rel=\"stylesheet\"", "http://www.w3.org/1999"]
    {
        assert!(!page.contains(outside), "{outside}");
    }
}

/// A call of short spans, 4 ranks of 132 workers.
fn long(spans: u32) -> Call {
    let worker = |number: u32| {
        let mut track = Track::new(Duration::ZERO);
        for span in 0..spans {
            let time = Duration::from_nanos(u64::from(100 + (span * 37 + number * 11) % 300));
            track.until(Phase::ALL[span as usize % 4], track.end() + time);
        }
        Worker { name: format!("SM {number}"), track }
    };
    let ranks = (0..4).map(|_| (0..132).map(worker).collect()).collect();
    Call { title: "long".to_owned(), about: Vec::new(), ranks }
}

#[test]
fn a_long_call_is_drawn_in_columns_with_the_same_sums() {
    let call = long(400);
    let page = page::of_timelines(std::slice::from_ref(&call)).unwrap();
    assert!((1 << 20..=2 << 20).contains(&page.len()), "{} bytes", page.len());
    assert_eq!(rows(&page), 4 * 132);
    let all: Vec<&Worker> = call.ranks.iter().flatten().collect();
    for (class, phase) in ['w', 'm', 'a', 's'].into_iter().zip(Phase::ALL) {
        assert_eq!(u128::from(drawn(&page, class)), total(&all, phase).as_nanos(), "{phase:?}");
    }
    assert!(page.contains("time is cut in columns of "), "the page says so");
    let calls = vec![long(1); 40];
    let refused = page::of_timelines(&calls).unwrap_err().to_string();
    assert_eq!(refused, "21120 workers of 40 calls do not fit a page of 2 MiB: show fewer calls");
}

#[test]
fn a_simulated_call_has_a_row_for_each_worker_and_says_what_it_is() {
    let problem =
        Problem::new(OpKind::GemmReduceScatter, 1024, 4096, 4096, DType::Bf16, world(2).unwrap());
    let layer = Layer { name: "a layer".to_owned(), problem: problem.unwrap() };
    let case = PlannedLayer::new(layer, PlanArgs::default(), Machine::H200).unwrap();
    let call = simulate::timeline(&case, &Machine::H200).unwrap();
    let page = page::of_timelines(std::slice::from_ref(&call)).unwrap();
    assert_eq!((rows(&page), call.ranks.len()), (call.workers(), 2));
    assert!(
        page.contains("<title>SIMULATED gemm_rs m=1024")
            && page.contains("not measured: a model of ")
    );
    let all: Vec<&Worker> = call.ranks.iter().flatten().collect();
    assert_eq!(u128::from(drawn(&page, 'w')), total(&all, Wait).as_nanos());
}
