//! Tracks from the time stamps of a traced call.
//!
//! Invariant: roles of a CTA overlap, and a track has one phase at a time: adding and multiplying
//! come first, then sending. The rest is waiting.

use super::Worker;
use anyhow::{Context, ensure};
use flux_core::program::Sink;
use flux_core::timeline::{Phase, Track};
use flux_ops::{TimedItem, Timeline, WorkerStamps};
use std::time::Duration;

/// A rank's workers, CTAs of a GPU or threads.
///
/// # Errors
/// Stamps that no call leaves, with rank, worker and item.
pub(crate) fn workers(timeline: &Timeline, on_gpu: bool) -> anyhow::Result<Vec<Worker>> {
    let rank = timeline.rank;
    ensure!(!timeline.workers.is_empty(), "rank {rank} has no workers: its time line is malformed");
    let worker = |(number, life): (usize, &WorkerStamps)| {
        let name = if on_gpu {
            format!("CTA {number} on SM {}", life.multiprocessor)
        } else {
            format!("worker {number}")
        };
        let track = track(timeline, number, life)
            .with_context(|| format!("the time line of rank {rank}, {name}, is malformed"))?;
        Ok(Worker { name, track })
    };
    timeline.workers.iter().enumerate().map(worker).collect()
}

fn track(timeline: &Timeline, number: usize, life: &WorkerStamps) -> anyhow::Result<Track> {
    let WorkerStamps { entered, left, .. } = *life;
    in_order(&[("its begin", entered), ("its end", left)])?;
    let mut track = Track::new(at(entered));
    let (mut written, mut sent) = (entered, entered);
    let items = timeline.items.iter().enumerate().skip(number).step_by(timeline.workers.len());
    for (index, TimedItem { item, times: t }) in items {
        let item_is = || format!("item {index}");
        in_order(&[
            ("its worker's begin", entered),
            ("opened", t.opened),
            ("rows_there", t.rows_there),
            ("loaded", t.loaded),
            ("its worker's end", left),
        ])
        .with_context(item_is)?;
        ensure!(
            t.written != 0,
            "item {index} has no stamp of its result: consumers of the portable kernel keep none \
             of tiles of 256x128 and 128x256 with partial sums in fp32; take another with --plan"
        );
        if item.sink == Sink::ReduceRows {
            // Nothing is multiplied, and a GPU's producer passes by.
            in_order(&[
                ("written of the item before", written),
                ("partials_there", t.partials_there),
                ("written", t.written),
                ("its worker's end", left),
            ])
            .with_context(item_is)?;
            track.until(Phase::Send, at(sent.min(t.partials_there)));
            track.until(Phase::Wait, at(t.partials_there));
            track.until(Phase::Add, at(t.written));
            (written, sent) = (t.written, t.written);
            continue;
        }
        in_order(&[
            ("written of the item before", written),
            ("multiplied", t.multiplied),
            ("summed", t.summed),
            ("written", t.written),
            ("sent", t.sent),
        ])
        .and_then(|()| in_order(&[("written", t.written), ("its worker's end", left)]))
        .and_then(|()| in_order(&[("rows_there", t.rows_there), ("multiplied", t.multiplied)]))
        .and_then(|()| in_order(&[("partials_there", t.partials_there), ("summed", t.summed)]))
        .with_context(item_is)?;
        track.until(Phase::Send, at(sent.min(t.rows_there)));
        track.until(Phase::Wait, at(t.rows_there));
        track.until(Phase::Multiply, at(t.multiplied));
        track.until(Phase::Wait, at(t.partials_there));
        track.until(Phase::Add, at(t.summed));
        track.until(Phase::Send, at(t.written));
        (written, sent) = (t.written, t.sent);
    }
    // The portable kernel's signaller may end behind its consumers, whose end is the worker's.
    track.until(Phase::Send, at(sent.min(left)));
    track.until(Phase::Wait, at(left));
    Ok(track)
}

fn in_order(stamps: &[(&str, u64)]) -> anyhow::Result<()> {
    for pair in stamps.windows(2) {
        let [(first, earlier), (second, later)] = [pair[0], pair[1]];
        ensure!(earlier <= later, "{second} at {later} ns is before {first} at {earlier} ns");
    }
    Ok(())
}

const fn at(ns: u64) -> Duration {
    Duration::from_nanos(ns)
}
