//! The collective of a sequential call: NCCL's AllGather before one GEMM, or its ReduceScatter or
//! AllReduce after it.
//!
//! Invariant: what comes next on the caller's stream comes after the collective, unless that was
//! aborted, for which the host sets the abort word first. In the same group of NCCL each rank sends
//! its poison and the op-sequence hash of the call. So a rank that has the others' rows can tell,
//! on the host, whether they are of the same call and of ranks whose calls have not failed. Each
//! peer's word is a message of its own: one that is missing leaves no other out.
//!
//! No kernel of the call waits for a peer. The side stream notes how far the call is, and the guard
//! ends a collective that takes longer than the deadline.

use super::hashes::CALL_BYTES;
use super::messages::Use;
use super::progress::{Position, Step};
use super::rounds::Memory;
use super::watched::Watched;
use crate::TransportError;
use crate::backends::nvlink::Lane;
use crate::backends::{CollectiveKind, LibraryCollective};
use crate::cuda::{CudaDevice, CudaError, WordOp, copy_rows_async, host_size, words_async};
use flux_core::layout::control;
use flux_core::signal::Epoch;

/// The streams and the memory of such a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) caller: usize,
    pub(super) lane: &'a Lane,
    pub(super) watched: &'a Watched,
    pub(super) at: Memory<'a>,
}

/// Where the rows of a collective lie on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Places {
    /// All ranks' rows, dense, in rank order.
    all: u64,
    /// Those of this rank's shard among them; all for an AllReduce, which is done in place there.
    own: u64,
    /// Whether the caller's rows have gaps, so that they are copied from or to the own place.
    packed: bool,
}

impl Places {
    fn of(job: &LibraryCollective, rank: u32, half: u64) -> Self {
        let all = half + job.offset;
        let packed = job.rows > 1 && job.row_stride != job.row_bytes;
        let before = if job.kind == CollectiveKind::AllReduce {
            0
        } else {
            u64::from(rank) * job.shard_bytes()
        };
        Self { all, own: all + before, packed }
    }
}

impl Streams<'_> {
    fn lane_writes(&self, op: WordOp) -> Result<(), CudaError> {
        // SAFETY: words of the control block and of pinned memory that outlive the stream's work.
        unsafe { words_async(self.device, [op], self.lane.raw()) }
    }

    fn note(&self, epoch: Epoch, step: Step) -> Result<(), CudaError> {
        let value = Position::new(epoch, step).word();
        self.lane_writes(WordOp::Write { address: self.watched.progress.address(), value })
    }

    /// Enqueues the collective of call `epoch`, whose hash the host has noted.
    ///
    /// # Safety
    /// The job was checked against the workspace. The caller's stream is ordered after the call
    /// before. Nothing else uses the shard until the stream is past what is enqueued here.
    pub(super) unsafe fn enqueue(
        &self,
        job: &LibraryCollective,
        epoch: Epoch,
    ) -> Result<(), TransportError> {
        let &Self { device, caller, lane, watched, at } = self;
        let hashes = at.outbox.hashes();
        let Places { all, own, packed } = Places::of(job, at.rank.get(), at.half(epoch));
        let pitches = (host_size(job.row_stride), host_size(job.row_bytes));
        let _current = device.enter()?;
        // The lane is behind the collective of the call before, which has read the word.
        self.lane_writes(WordOp::WriteLong {
            address: at.control + control::CALL,
            value: hashes.last().word(),
        })?;
        lane.join(caller)?;
        lane.fork(caller)?;
        self.note(epoch, Step::Collective)?;
        let gathers = job.kind == CollectiveKind::AllGather;
        if gathers && packed {
            // SAFETY: the caller's rows, and their place in the workspace.
            unsafe {
                copy_rows_async(
                    device,
                    (own, pitches.1),
                    (job.shard, pitches.0),
                    (host_size(job.rows), pitches.1),
                    caller,
                )
            }?;
        }
        let shard = if packed { own } else { job.shard };
        watched.link.group(Use::Sequential, caller, |group| {
            // SAFETY: the shard and all places are as above; the control block and the pinned words
            // outlive the stream's work.
            unsafe {
                match job.kind {
                    CollectiveKind::AllGather => {
                        group.all_gather(shard, all, host_size(job.shard_bytes()))
                    }
                    CollectiveKind::ReduceScatter => {
                        group.reduce_scatter(all, shard, job.shard_elements(), job.dtype)
                    }
                    CollectiveKind::AllReduce => {
                        group.all_reduce(all, shard, job.shard_elements(), job.dtype)
                    }
                }?;
                hashes.nodes_of_others().try_for_each(|node| {
                    group.send(at.control + control::POISON, CALL_BYTES, node)?;
                    group.receive(hashes.gathered(node), CALL_BYTES, node)
                })
            }
        })?;
        if !gathers && packed {
            // SAFETY: as above.
            unsafe {
                copy_rows_async(
                    device,
                    (job.shard, pitches.0),
                    (own, pitches.1),
                    (host_size(job.rows), pitches.1),
                    caller,
                )
            }?;
        }
        lane.fork(caller)?;
        Ok(self.note(epoch, Step::Ended)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::DType;

    #[test]
    fn a_shard_with_gaps_goes_through_its_place_and_a_dense_one_does_not() {
        let job = LibraryCollective {
            kind: CollectiveKind::AllGather,
            shard: 1 << 40,
            row_stride: 512,
            row_bytes: 512,
            rows: 3,
            offset: 4096,
            dtype: DType::Bf16,
            op: 1,
        };
        let places = |job| Places::of(&job, 2, 1 << 30);
        let own = (1 << 30) + 4096 + 2 * 3 * 512;
        assert_eq!(places(job), Places { all: (1 << 30) + 4096, own, packed: false });
        let gaps = LibraryCollective { row_stride: 528, ..job };
        assert_eq!(places(gaps), Places { all: (1 << 30) + 4096, own, packed: true });
        assert!(!places(LibraryCollective { rows: 1, ..gaps }).packed, "one row has no gaps");
        assert_eq!(gaps.shard_elements(), 3 * 256);
        let in_place = LibraryCollective { kind: CollectiveKind::AllReduce, ..gaps };
        assert_eq!(
            places(in_place),
            Places { all: (1 << 30) + 4096, own: (1 << 30) + 4096, packed: true }
        );
    }
}
