//! The movements, in the order of the table.

use super::rig::{BOX, Rig, TimedStream, copy, once};
use super::{Link, latencies};
use crate::harness::Times;
use anyhow::Context;
use flux_kernels::harness::{BulkCopy, Links};

/// Bytes of all that one device sends in an all-gather, over its peers.
const ALL_GATHER: usize = BOX;
/// CTAs and bytes of a piece: few CTAs with large pieces, and all with the fused kernel's pieces.
const BULK: [(u32, u32); 6] =
    [(4, 16 << 10), (8, 16 << 10), (16, 16 << 10), (32, 16 << 10), (128, 16 << 10), (128, 4 << 10)];
const RING: u32 = 4;

/// Takes a movement's time several times, and reports the median.
pub(super) struct Meter<'a> {
    pub(super) samples: usize,
    pub(super) report: &'a mut dyn FnMut(Link),
}

impl Meter<'_> {
    /// Median over runs after one that warms up, reported as a rate of `bytes` where there are any.
    pub(super) fn rate(
        &mut self,
        movement: &str,
        bytes: usize,
        run: &dyn Fn() -> anyhow::Result<f64>,
    ) -> anyhow::Result<()> {
        run()?;
        let times = (0..self.samples).map(|_| run()).collect::<anyhow::Result<Vec<_>>>()?;
        let us = Times::of(&times).context("no samples")?.median;
        let gb_per_s = (bytes > 0).then(|| bytes as f64 / us * 1e-3);
        (self.report)(Link { movement: movement.to_owned(), bytes: bytes as u64, us, gb_per_s });
        Ok(())
    }
}

/// What goes between devices, of which there are two at least, that reach each other.
pub(super) fn between(rigs: &[&Rig], meter: &mut Meter<'_>) -> anyhow::Result<()> {
    one_pair(rigs, meter)?;
    all_gather(rigs, meter)?;
    bulk(rigs, meter)?;
    latencies::all(rigs[0], rigs[1], meter)
}

/// Copies to pinned memory of the host and from it.
pub(super) fn host_staging(rigs: &[&Rig], meter: &mut Meter<'_>) -> anyhow::Result<()> {
    for group in [&rigs[..1], rigs] {
        let who = if group.len() == 1 {
            "one GPU".to_owned()
        } else {
            format!("{} GPUs at once, each", group.len())
        };
        for (name, to_host) in
            [("device to pinned host memory", true), ("pinned host memory to device", false)]
        {
            let movement = |_: usize, rig: &Rig, _: usize, stream: &TimedStream| {
                let (host, device) = (rig.staging.address(), rig.outbox.address());
                let (to, from) = if to_host { (host, device) } else { (device, host) };
                // SAFETY: the rig's own memory, which only this stream uses.
                unsafe { copy(stream, to, from, BOX) }
            };
            meter.rate(&format!("{name}, {who}"), BOX, &|| once(group, 1, &movement))?;
        }
        let both = |_: usize, rig: &Rig, number: usize, stream: &TimedStream| {
            let (host, device) = (rig.staging.address(), rig.outbox.address());
            let half = (BOX / 2) as u64;
            let (to, from) =
                if number == 0 { (host, device) } else { (device + half, host + half) };
            // SAFETY: the rig's own memory, a half of it for each stream.
            unsafe { copy(stream, to, from, BOX / 2) }
        };
        let name = format!("to pinned host memory and from it, each way, {who}");
        meter.rate(&name, BOX / 2, &|| once(group, 2, &both))?;
        if rigs.len() == 1 {
            break;
        }
    }
    Ok(())
}

fn one_pair(rigs: &[&Rig], meter: &mut Meter<'_>) -> anyhow::Result<()> {
    let (here, there) = (rigs[0], rigs[1]);
    for (name, push) in [("push", true), ("pull", false)] {
        for bytes in [64 << 10, 1 << 20, 4 << 20, 32 << 20, 256 << 20] {
            let movement = |_: usize, rig: &Rig, _: usize, stream: &TimedStream| {
                let (to, from) =
                    if push { (&there.inbox, &rig.outbox) } else { (&rig.inbox, &there.outbox) };
                // SAFETY: memory of two rigs, which only this stream uses.
                unsafe { copy(stream, to.address(), from.address(), bytes) }
            };
            let name = format!("copy engine {name}, one pair");
            meter.rate(&name, bytes, &|| once(&[here], 1, &movement))?;
        }
    }
    Ok(())
}

fn all_gather(rigs: &[&Rig], meter: &mut Meter<'_>) -> anyhow::Result<()> {
    let peers = rigs.len() - 1;
    let piece = (ALL_GATHER / peers) & !0xFFFF;
    for (name, streams, push) in [
        ("push, one stream", 1, true),
        ("push, a stream a peer", peers, true),
        ("pull, one stream", 1, false),
    ] {
        let movement = |me: usize, rig: &Rig, number: usize, stream: &TimedStream| {
            let mine = if streams == 1 { 0..peers } else { number..number + 1 };
            for step in mine {
                let peer = (me + rigs.len() - 1 - step) % rigs.len();
                // My place among the peer's sources; the peer's among mine.
                let place = |of: usize, at: usize| (of - usize::from(of > at)) * piece;
                let (to, from) = if push {
                    (rigs[peer].inbox.address() + place(me, peer) as u64, rig.outbox.address())
                } else {
                    (rig.inbox.address() + place(peer, me) as u64, rigs[peer].outbox.address())
                };
                // SAFETY: every source has a slot of its own in each inbox, and outboxes are only
                // read.
                unsafe { copy(stream, to, from, piece)? };
            }
            Ok(())
        };
        let name = format!("all-gather on {} GPUs by copy engine {name}", rigs.len());
        meter.rate(&name, piece * peers, &|| once(rigs, streams, &movement))?;
    }
    Ok(())
}

fn bulk(rigs: &[&Rig], meter: &mut Meter<'_>) -> anyhow::Result<()> {
    for (name, push) in [("push", true), ("pull", false)] {
        for (ctas, piece) in BULK {
            let movement = |me: usize, rig: &Rig, _: usize, stream: &TimedStream| {
                let next = rigs[(me + 1) % rigs.len()];
                let (to, from) =
                    if push { (&next.inbox, &rig.outbox) } else { (&rig.inbox, &next.outbox) };
                let copy = BulkCopy {
                    dst: to.address(),
                    src: from.address(),
                    bytes: BOX as u64,
                    piece,
                    ring: RING,
                };
                // SAFETY: each inbox has one writer; sizes are multiples of 16 and the ring fits.
                unsafe { rig.links.bulk_copy(&copy, ctas, stream.raw())? };
                Ok(())
            };
            let name = format!(
                "bulk {name} to the next of {} GPUs, all at once, {ctas} CTAs of {} x {RING}",
                rigs.len(),
                super::size(piece.into())
            );
            meter.rate(&name, BOX, &|| once(rigs, 1, &movement))?;
        }
    }
    const { assert!((16 << 10) * RING <= Links::MAX_RING_BYTES) };
    Ok(())
}
