//! The order in which a rank fetches parcels.
//!
//! Invariant: the order is a permutation of the received parcels, the same in every call. Parcels
//! of one source and step stay in order. Where sums of what came first are sent on, parcels come in
//! the order in which all ranks send, so that none is fetched ahead of one that it awaits.

use super::records::Incoming;
use crate::{OpKind, SumsTo};

/// Sorts parcels by when they are needed and available.
///
/// AllGather-GEMM: all sources copy out at once, slower than a GPU copies in. So the shards of the
/// first two steps alternate. The other shards have been copied out by then, and follow in the
/// order of steps.
///
/// GEMM-ReduceScatter: at one step every source sends to another rank, so sources follow one
/// another.
///
/// GEMM-AllReduce: parcels of all sources by number. All ranks have the same tiles in the same
/// order, so parcels of one number have tiles of one place in the programs.
pub(super) fn sort(op: OpKind, incoming: &mut [Incoming]) {
    incoming.sort_by_key(|parcel| {
        let step = parcel.reader.step;
        let turn = match op.sums_to() {
            SumsTo::Nothing if step <= 2 => 0,
            SumsTo::Nothing | SumsTo::Rows => step,
            SumsTo::All => 0,
        };
        (turn, parcel.index, step)
    });
}
