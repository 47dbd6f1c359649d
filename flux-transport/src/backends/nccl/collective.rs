//! The collective of a sequential call: NCCL's AllGather before one GEMM, or its ReduceScatter or
//! AllReduce after it.
//!
//! Invariant: what comes next on the caller's stream comes after the collective, unless that was
//! aborted, for which the host sets the abort word first. Nothing goes beside it: ranks compare
//! their calls over the control plane.
//!
//! No kernel of the call waits for a peer, so the watchdog ends a collective that takes longer than
//! the deadline, by its [mark](super::marks).

use super::messages::Use;
use super::rounds::Memory;
use super::watch::CallWatch;
use crate::backends::device::calls::Calls;
use crate::backends::error::TransportError;
use crate::backends::jobs::{CollectiveKind, LibraryCollective};
use flux_cuda::{CudaDevice, RowCopy, Rows, copy_rows_async};

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
    fn new(job: &LibraryCollective, rank: u32, half: u64) -> Self {
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

/// Enqueues the collective of the call in progress on the caller's stream. That of sums is marked by
/// the event that ends the call.
///
/// # Safety
/// The job was checked against the workspace `at`. The stream is ordered after the call before.
/// Nothing else uses the shard until it is past what is enqueued here.
pub(crate) unsafe fn enqueue_collective(
    device: &CudaDevice,
    caller: usize,
    watch: &CallWatch,
    at: Memory<'_>,
    job: &LibraryCollective,
    calls: &mut Calls,
) -> Result<(), TransportError> {
    let epoch = calls.epoch();
    let Places { all, own, packed } = Places::new(job, at.rank.get(), at.half(epoch));
    let packing = RowCopy {
        to: Rows { address: own, pitch: job.row_bytes },
        from: Rows { address: job.shard, pitch: job.row_stride },
        rows: job.rows,
        width: job.row_bytes,
    };
    let unpacking = RowCopy { to: packing.from, from: packing.to, ..packing };
    let _current = device.enter()?;
    // SAFETY: the caller's rows, and their place in the workspace.
    let pack = || unsafe { copy_rows_async(device, &packing, caller) };
    // SAFETY: the same ranges in the other direction.
    let unpack = || unsafe { copy_rows_async(device, &unpacking, caller) };
    let shard = if packed { own } else { job.shard };
    let ends = if job.is_ahead() { (shard, all) } else { (all, shard) };
    let collective = || {
        watch.group(Use::Sequential, caller, |group| {
            // SAFETY: the shard is the caller's, or its place in the workspace, which holds the
            // rows of all ranks as the job was checked. Both stay until the stream is past the
            // group.
            unsafe { group.collective(job.kind, ends, job.shard_elements(), job.dtype.into()) }
        })
    };
    if job.is_ahead() {
        if packed {
            pack()?;
        }
        watch.gather_begins(epoch, caller)?;
        return Ok(collective()?);
    }
    let end = watch.sum_begins(epoch)?;
    collective()?;
    if packed {
        unpack()?;
    }
    calls.end_by(end);
    Ok(())
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
        let places = |job| Places::new(&job, 2, 1 << 30);
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
