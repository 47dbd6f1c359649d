//! Latencies between two devices: the round trip of a signal, and exchanges of few bytes.
//!
//! Invariant: each device runs one kernel, which ends by its deadline; the first device's clock
//! times all rounds but the first, which waits for the other kernel to start.

use super::measures::Meter;
use super::rig::{BOX, Rig};
use flux_kernels::harness::{Exchange, Links, PingPong};

const ROUNDS: u32 = 1000;
const DEADLINE_NS: u64 = 5_000_000_000;
/// CTAs of an exchange.
const CTAS: [u32; 5] = [1, 4, 16, 64, Links::MAX_EXCHANGE_BYTES / Links::CTA_BYTES];
/// Buffers that rounds of an exchange take in turn. A fence follows each half of them, so that its
/// share of a round is small: in an op, kernels' boundaries take its place.
const BUFFERS: u32 = 32;

/// Bytes of all buffers of the largest exchange. Its flags follow them in the inbox.
const BUFFERED: u64 = BUFFERS as u64 * Links::MAX_EXCHANGE_BYTES as u64;
const FLAGS: u64 = Links::MAX_EXCHANGE_BYTES as u64 / Links::CTA_BYTES as u64 * 128;
const _: () = assert!(BUFFERED + FLAGS <= BOX as u64);

pub(super) fn all(one: &Rig, other: &Rig, meter: &mut Meter<'_>) -> anyhow::Result<()> {
    meter.rate("signal round trip, release to acquire, one pair", 0, &|| {
        round_us([one, other], &ping_pong)
    })?;
    for (name, flagged) in [("a flag behind data", true), ("data are their own flags", false)] {
        for bytes in CTAS.map(|ctas| ctas * Links::CTA_BYTES) {
            let name = format!("exchange of one pair, both at once, {name}");
            meter.rate(&name, bytes as usize, &|| {
                round_us([one, other], &|rig, peer, side| exchange(rig, peer, side, bytes, flagged))
            })?;
        }
    }
    Ok(())
}

/// Runs a kernel on each of two devices; microseconds of a round.
///
/// `launch` takes a device, its peer and its side, 0 or 1. The kernel leaves nanoseconds and a
/// failure in the first words of the device's outbox.
fn round_us(
    rigs: [&Rig; 2],
    launch: &dyn Fn(&Rig, &Rig, u32) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    for rig in rigs {
        rig.gpu.poison(rig.inbox.address(), BUFFERED as usize)?;
        rig.gpu.set_words(&rig.inbox, BUFFERED, FLAGS / 4, 0)?;
        rig.gpu.set_words(&rig.outbox, 0, 4, 0)?;
    }
    // Both sides are prepared before either kernel runs.
    for rig in rigs {
        rig.gpu.synchronize()?;
    }
    for (side, rig) in (0..).zip(rigs) {
        rig.gpu.device().bind()?;
        launch(rig, rigs[1 - side as usize], side)?;
    }
    let mut ns = [0; 2];
    for (rig, ns) in rigs.into_iter().zip(&mut ns) {
        rig.streams[0].cuda.synchronize()?;
        let mut words = [0_u64; 2];
        rig.gpu.download(&rig.outbox, 0, bytemuck::bytes_of_mut(&mut words))?;
        anyhow::ensure!(
            words[0] > 0 && words[1] == 0,
            "GPU {} received wrong data, or no answer within {} s",
            rig.gpu.device().ordinal(),
            DEADLINE_NS / 1_000_000_000
        );
        *ns = words[0];
    }
    Ok(ns[0] as f64 / f64::from(ROUNDS - 1) * 1e-3)
}

fn ping_pong(rig: &Rig, peer: &Rig, side: u32) -> anyhow::Result<()> {
    let side = PingPong {
        mine: rig.inbox.address() + BUFFERED,
        theirs: peer.inbox.address() + BUFFERED,
        rounds: ROUNDS,
        first: u32::from(side == 0),
        deadline_ns: DEADLINE_NS,
        elapsed: rig.outbox.address(),
    };
    // SAFETY: zeroed words of the two inboxes, which these two kernels alone use.
    Ok(unsafe { rig.links.ping_pong(&side, rig.streams[0].raw()) }?)
}

fn exchange(rig: &Rig, peer: &Rig, side: u32, bytes: u32, flagged: bool) -> anyhow::Result<()> {
    let flags = |of: &Rig| if flagged { of.inbox.address() + BUFFERED } else { 0 };
    let side = Exchange {
        mine: rig.inbox.address(),
        theirs: peer.inbox.address(),
        my_flags: flags(rig),
        their_flags: flags(peer),
        bytes,
        buffers: BUFFERS,
        rounds: ROUNDS,
        side,
        deadline_ns: DEADLINE_NS,
        elapsed: rig.outbox.address(),
        failed: rig.outbox.address() + 8,
    };
    // SAFETY: buffers and zeroed flags of the two inboxes, which these two kernels alone use;
    // `bytes` are those of as many CTAs as one of `CTAS`.
    Ok(unsafe { rig.links.exchange(&side, rig.streams[0].raw()) }?)
}
