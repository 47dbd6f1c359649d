//! A word from every rank to every other, sent as chunks are, and read by its receiver.
//!
//! Invariant: it ends by the deadline, whatever else the device does. All of it is on a stream of
//! its own, which is polled, and NCCL connects on a thread of its own. It also makes NCCL open its
//! connections and load its kernels, and the driver those that copy words: a kernel that waits for
//! data would keep them from that. Each communicator is proven as it is used: by messages, or by a
//! collective.

use super::abi::ElementType;
use super::deferred;
use super::handle::Group;
use super::library::NcclError;
use super::link::Link;
use super::members::Members;
use super::messages::Use;
use crate::backends::connect_error::ConnectError;
use crate::backends::error::TransportError;
use crate::backends::jobs::CollectiveKind;
use flux_cuda::{
    CudaDevice, CudaError, DeviceBlock, PinnedBlock, RowCopy, Rows, SideStream, copy_async,
    copy_out_async, copy_rows_async, done_by, is_by, write_value_async,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of one message: more than NCCL sends in the way that it has for the smallest.
const BYTES: usize = 1 << 20;
/// Bytes of a word.
const WORD: u64 = 4;
/// For what was given up.
const GONE: Duration = Duration::from_secs(2);

/// What `from` sends to `to` by this communicator: of each pair and use another. What is gathered
/// is what it would send itself.
fn word(by: Use, from: u32, to: u32) -> u32 {
    let by = u32::from(by == Use::Sequential);
    (by << 31 | from << 16 | to).wrapping_mul(0x9e37_79b1) ^ 0x5bf0_3635
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
    let buffers = Buffers::new(device, members.place(members.widest()).1)?;
    let mut uses = members.uses();
    let proven =
        uses.try_for_each(|by| exchange(device, (link, by, stream), members, &buffers, until));
    if proven.is_err() {
        link.abort();
        // What is left is freed when nothing uses it, which this ends.
        if !matches!(done_by(Instant::now() + GONE, || stream.is_idle()), Ok(true)) {
            device.give_up("a message that was given up does not end");
        }
        deferred::defer(device, buffers);
    }
    proven
}

fn exchange(
    device: &CudaDevice,
    (link, by, stream): (&Arc<Link>, Use, &SideStream),
    members: &Members,
    buffers: &Buffers,
    until: Instant,
) -> Result<(), ConnectError> {
    let began = Instant::now();
    let nccl = |error: NcclError| ConnectError::Transport(TransportError::Nccl(error));
    let (own, count) = members.place(by);
    let peers = || (0..count).filter(|&peer| peer != own);
    let _current = device.enter()?;
    for peer in 0..count {
        // SAFETY: a message's first word, in the buffer, which is freed when nothing uses it.
        unsafe {
            write_value_async(device, buffers.sent(peer), word(by, own, peer), stream.raw())
        }?;
    }
    let (from, to) = (buffers.sent(own), buffers.received(0));
    let messages: Vec<_> =
        peers().map(|peer| (buffers.sent(peer), buffers.received(peer), peer)).collect();
    let fill = move |group: &Group<'_>| match by {
        // SAFETY: places in the buffers, which are freed when nothing uses them.
        Use::Sequential => unsafe {
            group.collective(CollectiveKind::AllGather, (from, to), BYTES, ElementType::U8)
        },
        Use::Overlapped => messages.iter().try_for_each(|&(from, to, peer)| {
            // SAFETY: messages' places in the buffers, which are freed when nothing uses them.
            unsafe {
                group.send(from, BYTES, peer)?;
                group.receive(to, BYTES, peer)
            }
        }),
    };
    if !connected(link, (by, stream.raw()), fill, until)? {
        return Err(nccl(members.silent(by, began.elapsed())));
    }
    // SAFETY: the places of this rank's own messages, of which there are none.
    unsafe {
        copy_async(
            device,
            buffers.received(own),
            buffers.sent(own),
            size_of::<u32>(),
            stream.raw(),
        )?;
        let words = RowCopy {
            to: Rows { address: buffers.received(own), pitch: 4 * WORD },
            from: Rows { address: buffers.sent(own), pitch: WORD },
            rows: 2,
            width: WORD,
        };
        copy_rows_async(device, &words, stream.raw())
    }?;
    // What each peer has sent to this rank, or what was gathered of it.
    let to_see = || {
        let to = |peer| if by == Use::Overlapped { own } else { peer };
        peers().map(move |peer| (peer, to(peer), buffers.received(peer)))
    };
    for (at, (_, _, from)) in to_see().enumerate() {
        let rows = |address| Rows { address, pitch: WORD };
        // SAFETY: a message's first word, and a place for it, in the buffers.
        unsafe {
            let to = rows(buffers.seen(at).expose_provenance() as u64);
            let word = RowCopy { to, from: rows(from), rows: 1, width: WORD };
            copy_out_async(device, &word, stream.raw())
        }?;
    }
    if !done_by(until, || stream.is_idle())? {
        return Err(nccl(members.silent(by, began.elapsed())));
    }
    for (at, (peer, to, _)) in to_see().enumerate() {
        // SAFETY: the stream has written it, and is past that.
        let (seen, expected) = (unsafe { buffers.seen(at).read_volatile() }, word(by, peer, to));
        if seen != expected {
            return Err(members.not_proven(by, peer, expected, seen));
        }
    }
    Ok(())
}

/// Puts one group on `stream`. NCCL connects for it: it waits for the peers, and so is left to a
/// thread of its own. False where they have not come by then: whoever gives the link up ends that.
fn connected(
    link: &Arc<Link>,
    (by, stream): (Use, usize),
    fill: impl FnOnce(&Group<'_>) -> Result<(), NcclError> + Send + 'static,
    until: Instant,
) -> Result<bool, ConnectError> {
    let link = Arc::clone(link);
    let connect = move || link.group(by, stream, fill);
    let started = std::thread::Builder::new().name("flux-nccl-connect".to_owned()).spawn(connect);
    let thread = started.map_err(|source| ConnectError::Io {
        what: "starting a thread to connect NCCL on",
        source,
    })?;
    if !is_by(until, || thread.is_finished()) {
        return Ok(false);
    }
    let connected = thread.join().unwrap_or_else(|_| {
        Err(NcclError::Thread { reason: "the thread has panicked".to_owned() })
    });
    connected.map(|()| true).map_err(|error| ConnectError::Transport(error.into()))
}

/// A message to each rank and one from each, and the first word of those that have come, for the
/// host.
#[derive(Debug)]
struct Buffers {
    count: u32,
    messages: DeviceBlock,
    seen: PinnedBlock,
}

impl Buffers {
    /// For so many ranks.
    fn new(device: &CudaDevice, count: u32) -> Result<Self, CudaError> {
        Ok(Self {
            count,
            messages: DeviceBlock::new(device, 2 * BYTES * count as usize)?,
            seen: PinnedBlock::new(device, size_of::<u32>() * count as usize)?,
        })
    }

    fn sent(&self, peer: u32) -> u64 {
        self.messages.address() + BYTES as u64 * u64::from(peer)
    }

    fn received(&self, peer: u32) -> u64 {
        self.sent(self.count + peer)
    }

    /// Where word number `at` is for the host.
    fn seen(&self, at: usize) -> *mut u32 {
        self.seen.host().cast::<u32>().wrapping_add(at)
    }
}

#[cfg(test)]
mod tests {
    use super::{Use, word};
    use std::collections::BTreeSet;

    #[test]
    fn no_two_pairs_share_a_word_nor_do_the_communicators_of_one() {
        let pairs = || (0..16).flat_map(|from| (0..16).map(move |to| (from, to)));
        let words: BTreeSet<u32> = [Use::Overlapped, Use::Sequential]
            .into_iter()
            .flat_map(|by| pairs().map(move |(from, to)| word(by, from, to)))
            .collect();
        assert_eq!(words.len(), 512);
    }
}
