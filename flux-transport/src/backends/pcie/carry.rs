//! Enqueues one call's way through host memory.
//!
//! Invariant: a signal or flag is this call's epoch and follows its data. The sending stream waits
//! for this rank's kernel only; the receiving stream waits for peers' sending streams. The buffer
//! that a call writes was last read in the call before the last, which every peer has ended, unless
//! it failed: then the kernel's poison comes first.

use super::layout::POISONED;
use super::workspace::Workspace;
use crate::backends::device::lane::Lane;
use crate::backends::jobs::StagedTransfer;
use flux_core::layout::{control, signal_offset};
use flux_core::program::route::{Block, Incoming, Origin, Parcel};
use flux_core::signal::Epoch;
use flux_cuda::{
    CudaDevice, CudaError, RowCopy, Rows, WordOp, copy_in_async, copy_out_async, words_async,
};

#[derive(Clone, Copy, Debug)]
pub(super) struct Streams<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) at: &'a Workspace,
    pub(super) rank: u32,
    pub(super) epoch: Epoch,
    pub(super) out: &'a Lane,
    pub(super) back: &'a Lane,
}

impl Streams<'_> {
    /// Enqueues the whole call, sends first, so that no stream that peers depend on is behind one
    /// that depends on them. Results depend on what comes before them, so that is enqueued first:
    /// a full queue of one stream holds up nothing that it waits for.
    ///
    /// # Safety
    /// The route was checked; both lanes are forked from the caller's stream, and the shard's rows
    /// stay until they are joined; the watch knows of the call; the device's context is current.
    pub(super) unsafe fn carry(&self, carry: &StagedTransfer<'_>) -> Result<(), CudaError> {
        // What a kernel stores comes only when that has raised a flag.
        if carry.route.outgoing().iter().any(|parcel| matches!(parcel.origin, Origin::Shard { .. }))
        {
            // SAFETY: this function's promise.
            unsafe { self.tell_of_poison() }?;
        }
        let mut incoming = carry.route.incoming().iter().peekable();
        for (index, parcel) in (0..).zip(carry.route.outgoing()) {
            let is_added =
                |before: &&Incoming| parcel.origin == Origin::Results && before.index < index;
            while let Some(before) = incoming.next_if(is_added) {
                // SAFETY: this function's promise: the route was checked and the lanes are forked.
                unsafe { self.receive(before) }?;
            }
            // SAFETY: this function's promise.
            unsafe { self.send(carry, parcel) }?;
        }
        for incoming in incoming {
            // SAFETY: this function's promise: the route was checked and the lanes are forked.
            unsafe { self.receive(incoming) }?;
        }
        self.out.join(self.back.raw())?;
        // SAFETY: the word is in the generation's pinned block.
        unsafe { words_async(self.device, [self.at.finished(self.epoch)], self.back.raw()) }
    }

    fn half(&self) -> u64 {
        self.epoch.half() as u64
    }

    /// Bytes from the start of a data region to the half of this call.
    fn region_half(&self) -> u64 {
        self.half() * self.at.size().half_stride()
    }

    fn on_host(&self, source: u32, block: &Block) -> Rows {
        let region = self.at.host_region(source);
        Rows {
            address: region.host() + region.layout.half(self.half()) + block.offset,
            pitch: block.pitch,
        }
    }

    /// Leaves in the own region whether a kernel before has given up.
    unsafe fn tell_of_poison(&self) -> Result<(), CudaError> {
        let row = |address| Rows { address, pitch: 4 };
        let (to, from) =
            (self.at.host_region(self.rank).host() + POISONED, self.at.control() + control::POISON);
        // SAFETY: the caller's promise; the context is current.
        unsafe {
            let word = RowCopy { to: row(to), from: row(from), rows: 1, width: 4 };
            copy_out_async(self.device, &word, self.out.raw())
        }
    }

    unsafe fn send(&self, carry: &StagedTransfer<'_>, parcel: &Parcel) -> Result<(), CudaError> {
        let (stream, value) = (self.out.raw(), self.epoch.get());
        if !matches!(parcel.origin, Origin::Shard { .. }) {
            let raised = parcel.readers.iter().map(|r| WordOp::Await {
                address: self.at.words().local_pad(r.rank)
                    + signal_offset(r.signal, self.epoch.half()),
                value,
            });
            // SAFETY: the words are in the generation's pinned block.
            unsafe { words_async(self.device, raised, stream) }?;
        }
        for block in parcel.blocks.iter().filter(|block| !block.is_empty()) {
            let from = match parcel.origin {
                Origin::Shard { row, before } => Rows {
                    address: carry.x + row * carry.row_stride + before,
                    pitch: carry.row_stride,
                },
                Origin::Outbox | Origin::Results => Rows {
                    address: self.at.outbox() + self.region_half() + block.offset,
                    pitch: block.pitch,
                },
            };
            // SAFETY: the route was checked against the workspace; the caller promised the shard.
            unsafe {
                let to = self.on_host(self.rank, block);
                let rows = RowCopy { to, from, rows: block.rows, width: block.width };
                copy_out_async(self.device, &rows, stream)
            }?;
        }
        let layout = self.at.host_region(self.rank).layout;
        let region = self.at.region(self.rank);
        let flags = parcel
            .readers
            .iter()
            .map(|r| WordOp::Write { address: region + layout.flag(r.rank, r.signal), value });
        // SAFETY: the words are in the own region.
        unsafe { words_async(self.device, flags, stream) }
    }

    unsafe fn receive(&self, incoming: &Incoming) -> Result<(), CudaError> {
        let Incoming { source, ref blocks, reader, .. } = *incoming;
        let (stream, value) = (self.back.raw(), self.epoch.get());
        let flag = self.at.region(source)
            + self.at.host_region(source).layout.flag(self.rank, reader.signal);
        // SAFETY: the word is in the source's region.
        unsafe { words_async(self.device, [WordOp::Await { address: flag, value }], stream) }?;
        for block in blocks.iter().filter(|block| !block.is_empty()) {
            let offset = block.offset.wrapping_add(reader.shift);
            let to =
                Rows { address: self.at.data() + self.region_half() + offset, pitch: block.pitch };
            // SAFETY: the route was checked against the workspace.
            unsafe {
                let from = self.on_host(source, block);
                let rows = RowCopy { to, from, rows: block.rows, width: block.width };
                copy_in_async(self.device, &rows, stream)
            }?;
        }
        let signal = self.at.pad() + signal_offset(reader.signal, self.epoch.half());
        // SAFETY: the word is on the own pad.
        unsafe { words_async(self.device, [WordOp::Write { address: signal, value }], stream) }
    }
}
