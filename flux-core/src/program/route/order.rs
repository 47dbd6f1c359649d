//! In which order a rank fetches what its peers have sent.
//!
//! Invariant: the order is a permutation of what is received, the same in every call, and no parcel
//! of a source comes before an earlier one of the same source and step.

use super::records::Incoming;
use crate::OpKind;

/// Sorts by when each parcel is wanted and can be there.
///
/// AllGather-GEMM: all sources copy out at the same time, and on a host that many GPUs share a GPU
/// copies in faster than one of them copies out. So the shards of the first two steps are fetched
/// in turns, which no source holds up; when they are there the others have been copied out, and
/// follow in the order of the steps, in which the program wants them.
///
/// GEMM-ReduceScatter: at one step every source sends to another rank, so the steps bring one
/// source's parcels after another's.
pub(super) fn sort(op: OpKind, incoming: &mut [Incoming]) {
    incoming.sort_by_key(|parcel| {
        let step = parcel.reader.step;
        let turn = match op {
            OpKind::AllGatherGemm if step <= 2 => 0,
            OpKind::AllGatherGemm | OpKind::GemmReduceScatter => step,
        };
        (turn, parcel.index, step)
    });
}
