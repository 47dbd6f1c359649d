//! A word from every rank to every other, sent as chunks are, and read by its receiver.
//!
//! Invariant: it ends by the deadline, whatever else the device does: all of it is on a stream of
//! its own, which is looked at and not waited for, and NCCL connects on a thread of its own. It
//! also makes NCCL open its connections, all that it has for a pair of ranks, and load its kernel,
//! and the driver whatever it copies a word with, none of which can be done while a kernel waits
//! for what they are to carry.

use super::link::Link;
use super::members::Members;
use super::messages::Way;
use super::remains;
use crate::backends::nccl::NcclError;
use crate::cuda::{
    CudaDevice, CudaError, DeviceBlock, PinnedBlock, Rows, SideStream, copy_async, copy_out_async, copy_rows_async, done_by,
    write_value_async,
};
use crate::{ConnectError, TransportError};
use flux_core::rank::MAX_WORLD;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of one message: more than NCCL sends in the way that it has for the smallest.
const BYTES: usize = 1 << 20;
/// Bytes of a word.
const WORD: u64 = 4;
/// For what was given up.
const GONE: Duration = Duration::from_secs(2);

/// What `from` sends to `to` this way: not the same for any two pairs, nor for the ways of one.
fn word(way: Way, from: u32, to: u32) -> u32 {
    let way = u32::from(way == Way::Alone);
    (way << 31 | from << 16 | to).wrapping_mul(0x9e37_79b1) ^ 0x5bf0_3635
}

/// Sends and receives, and compares. `Err` where a word did not come, or is another; the
/// communicator is given up then.
pub(super) fn prove(
    device: &CudaDevice,
    stream: &SideStream,
    link: &Arc<Link>,
    members: &Members,
    until: Instant,
) -> Result<(), ConnectError> {
    let buffers = Buffers::new(device)?;
    let mut ways = members.alone().map(|_| Way::Alone).into_iter().chain([Way::Beside]);
    let proven = ways.try_for_each(|way| exchange(device, (link, way, stream), members, &buffers, until));
    if proven.is_err() {
        link.abort();
        // What is left is freed when nothing uses it, which this ends.
        if !matches!(done_by(Instant::now() + GONE, || stream.is_idle()), Ok(true)) {
            device.give_up("a message that was given up does not end");
        }
        remains::leave(device, buffers);
    }
    proven
}

fn exchange(
    device: &CudaDevice,
    (link, way, stream): (&Arc<Link>, Way, &SideStream),
    members: &Members,
    Buffers { sent, received, seen }: &Buffers,
    until: Instant,
) -> Result<(), ConnectError> {
    let began = Instant::now();
    let nccl = |error: NcclError| ConnectError::Transport(TransportError::Nccl(error));
    let (own, count) = members.place();
    let peers = || (0..count).filter(|&peer| peer != own);
    let _current = device.enter()?;
    for peer in peers() {
        // SAFETY: a message's first word, in the buffer, which is freed when nothing uses it.
        unsafe { write_value_async(device, sent.at(peer), word(way, own, peer), stream.raw()) }?;
    }
    let places: Vec<_> = peers().map(|peer| (sent.at(peer), received.at(peer), peer)).collect();
    if !connected(link, (way, stream.raw()), places, until)? {
        return Err(nccl(members.silent(began.elapsed())));
    }
    // SAFETY: the places of this rank's own messages, of which there are none.
    unsafe {
        let (word, pitch) = (size_of::<u32>(), 4 * size_of::<u32>());
        copy_async(device, received.at(own), sent.at(own), word, stream.raw())?;
        copy_rows_async(device, (received.at(own), pitch), (sent.at(own), word), (2, word), stream.raw())
    }?;
    for peer in peers() {
        let rows = |address| Rows { address, pitch: WORD };
        // SAFETY: a message's first word, and a place for it, in the buffers.
        unsafe {
            copy_out_async(device, (rows(place(seen, peer).expose_provenance() as u64), rows(received.at(peer))), (1, WORD), stream.raw())
        }?;
    }
    while !stream.is_idle()? {
        if Instant::now() >= until {
            return Err(nccl(members.silent(began.elapsed())));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    for peer in peers() {
        // SAFETY: the stream has written it, and is past that.
        let (seen, expected) = (unsafe { place(seen, peer).read_volatile() }, word(way, peer, own));
        if seen != expected {
            return Err(members.not_proven(peer, expected, seen));
        }
    }
    Ok(())
}

/// Puts the messages on `stream`, each from where it is sent to where one is received and a peer,
/// for which NCCL connects: it waits for the peers, and so is left to a thread of its own. False
/// where they have not come by then: whoever gives the link up ends that.
fn connected(link: &Arc<Link>, (way, stream): (Way, usize), messages: Vec<(u64, u64, u32)>, until: Instant) -> Result<bool, ConnectError> {
    let link = Arc::clone(link);
    let connect = move || {
        link.group(way, stream, |group| {
            messages.iter().try_for_each(|&(from, to, peer)| {
                // SAFETY: messages' places in the buffers, which are freed when nothing uses them.
                unsafe {
                    group.send(from, BYTES, peer)?;
                    group.receive(to, BYTES, peer)
                }
            })
        })
    };
    let started = std::thread::Builder::new().name("flux-nccl-connect".to_owned()).spawn(connect);
    let thread = started.map_err(|source| ConnectError::Io { what: "starting a thread to connect NCCL on", source })?;
    let Ok(done) = done_by(until, || Ok::<_, Infallible>(thread.is_finished()));
    if !done {
        return Ok(false);
    }
    let connected = thread.join().unwrap_or_else(|_| Err(NcclError::Thread { reason: "the thread has panicked".to_owned() }));
    connected.map(|()| true).map_err(|error| ConnectError::Transport(error.into()))
}

/// What is sent, what is received, and the first word of each message that has come, for the host.
#[derive(Debug)]
struct Buffers {
    sent: Buffer,
    received: Buffer,
    seen: PinnedBlock,
}

impl Buffers {
    fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self {
            sent: Buffer::new(device)?,
            received: Buffer::new(device)?,
            seen: PinnedBlock::new(device, size_of::<u32>() * MAX_WORLD)?,
        })
    }
}

/// Where the word of `peer` is for the host.
fn place(seen: &PinnedBlock, peer: u32) -> *mut u32 {
    seen.host().cast::<u32>().wrapping_add(peer as usize)
}

/// A message for each rank.
#[derive(Debug)]
struct Buffer(DeviceBlock);

impl Buffer {
    fn new(device: &CudaDevice) -> Result<Self, CudaError> {
        Ok(Self(DeviceBlock::new(device, BYTES * MAX_WORLD)?))
    }

    fn at(&self, peer: u32) -> u64 {
        self.0.address() + BYTES as u64 * u64::from(peer)
    }
}

#[cfg(test)]
mod tests {
    use super::{Way, word};
    use std::collections::BTreeSet;

    #[test]
    fn no_two_pairs_share_a_word_nor_do_the_ways_of_one() {
        let pairs = || (0..16).flat_map(|from| (0..16).map(move |to| (from, to)));
        let words: BTreeSet<u32> =
            [Way::Beside, Way::Alone].into_iter().flat_map(|way| pairs().map(move |(from, to)| word(way, from, to))).collect();
        assert_eq!(words.len(), 512);
    }
}
