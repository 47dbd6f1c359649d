//! The rounds of one call on the side stream.
//!
//! Invariant: a signal of the own pad gets the word that came with its chunk, after the chunk. The sender's word is the epoch only where the chunk is
//! whole: for the caller's rows from the start, for what its kernel stores when that has raised the flag. A stream that is let go because a call has
//! failed sends other words, and one whose messages were aborted keeps old ones; so what is not whole is never announced.

use super::link::Link;
use super::workspace::Workspace;
use crate::cuda::{CudaDevice, copy_async, copy_rows_async, host_size, wait_value_async, write_value_async};
use crate::{Exchange, Source, TransportError};
use flux_core::layout::{consumed_offset, signal_offset};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};

/// Enqueues all messages of the call with number `epoch` on `stream`.
///
/// # Safety
/// The exchange was checked against the workspace; `stream` is ordered after the call before and after the caller's rows, which stay until it is past
/// what is enqueued here.
pub(super) unsafe fn carry(
    device: &CudaDevice,
    stream: usize,
    link: &Link,
    at: &Workspace,
    (rank, world): (Rank, WorldSize),
    exchange: &Exchange<'_>,
    epoch: Epoch,
) -> Result<(), TransportError> {
    let &Exchange { source, place_bytes, rounds } = exchange;
    let _current = device.enter()?;
    // Credits: nothing is received before this rank's side stream asks for it, which is after the call that read the half before.
    for peer in world.ranks().filter(|&peer| peer != rank) {
        // SAFETY: the word is in the own pad.
        unsafe { write_value_async(device, at.pad() + consumed_offset(peer.get()), epoch.get(), stream) }?;
    }
    let rows = match source {
        Source::Stored => None,
        Source::Rows { x, row_stride, row_bytes } => {
            // SAFETY: a word of the workspace.
            unsafe { write_value_async(device, at.own_word(), epoch.get(), stream) }?;
            Some(if row_stride == row_bytes || row_bytes == 0 {
                x
            } else {
                // A message is one range of memory. Half a region holds a place for each peer, so one for the shard.
                let (to, count) = (at.stored(rank, 0), host_size(place_bytes / row_bytes));
                let pitches = (host_size(row_bytes), host_size(row_stride));
                // SAFETY: the caller promised the rows.
                unsafe { copy_rows_async(device, (to, pitches.0), (x, pitches.1), (count, pitches.0), stream) }?;
                to
            })
        }
    };
    let half = at.data() + epoch.half() as u64 * at.size().half_stride();
    for round in rounds {
        let (to, from) = (round.sent, round.received);
        let (chunk, word) = if let Some(rows) = rows {
            (rows + round.offset, at.own_word())
        } else {
            let flag = at.flag(to.peer, to.signal);
            // SAFETY: a flag of the workspace.
            unsafe { wait_value_async(device, flag, epoch.get(), stream) }?;
            (at.stored(to.peer, place_bytes) + round.offset, flag)
        };
        let bytes = host_size(round.bytes);
        let landing = at.word(from.signal);
        link.group(stream, |group| {
            // SAFETY: chunks and words are in the workspace, or the caller's rows.
            unsafe {
                group.send(chunk, bytes, to.peer.get())?;
                group.send(word, 4, to.peer.get())?;
                group.receive(half + u64::from(from.place) * place_bytes + round.offset, bytes, from.peer.get())?;
                group.receive(landing, 4, from.peer.get())
            }
        })?;
        // SAFETY: both words are in the workspace.
        unsafe { copy_async(device, at.pad() + signal_offset(from.signal), landing, 4, stream) }?;
    }
    Ok(())
}
