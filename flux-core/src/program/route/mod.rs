//! What a call sends and receives where ranks cannot write to each other's memory: tile programs,
//! read as copies from rank to rank.
//!
//! Invariant: what a rank receives from a source is derived from that source's own list of parcels,
//! so the two sides cannot differ; and every signal that an item of the reader's program awaits
//! from a peer is that of one parcel. Rows that a rank has itself are none of it.
//!
//! A source's bytes pass through a *half*, whose layout this module gives: for AllGather-GEMM its
//! shard, dense; for GEMM-ReduceScatter a place for each destination, as large and as laid out as
//! the source's place at that destination. The kernel of a GEMM-ReduceScatter writes such a half,
//! the outbox, in its own memory: [`Route::data`] gives it the addresses.

mod order;
mod parcels;
mod records;
#[cfg(test)]
mod tests;

pub use records::{Block, Incoming, Origin, Parcel, Reader};

use super::TileProgram;
use crate::Rank;
use crate::layout::WorkspaceSize;
use crate::rank::MAX_WORLD;

/// All that a rank sends and receives in a call of one op.
#[derive(Clone, Debug)]
pub struct Route {
    rank: u32,
    world: u32,
    size: WorkspaceSize,
    outgoing: Vec<Parcel>,
    incoming: Vec<Incoming>,
    /// By rank: what is added to the outbox's address, modulo 2^64, so that the program's own slots
    /// and places fix-up item to the rank's place in it.
    shifts: [u64; MAX_WORLD],
}

impl Route {
    /// The route of `rank` in calls of these programs, which are those of all ranks, in rank order.
    ///
    /// # Panics
    /// If there is no program of `rank`, and if tiles are scattered that have a signal each: those
    /// are not carried.
    pub fn new(rank: Rank, programs: &[TileProgram]) -> Self {
        let own = &programs[rank.index()];
        let outgoing = parcels::outgoing(own);
        let mut incoming = Vec::new();
        for (source, program) in (0..).zip(programs) {
            let parcels = if source == rank.get() { outgoing.clone() } else { parcels::outgoing(program) };
            for (index, parcel) in (0..).zip(parcels) {
                let here = parcel.readers.iter().filter(|reader| reader.rank == rank.get());
                incoming.extend(here.map(|&reader| Incoming { source, index, block: parcel.block, reader }));
            }
        }
        order::sort(own.problem.op(), &mut incoming);
        let mut shifts = [0; MAX_WORLD];
        for (peer, shift) in own.problem.world().ranks().zip(&mut shifts) {
            *shift = parcels::shift(own, peer);
        }
        let world = own.problem.world().get();
        Self { rank: rank.get(), world, size: own.workspace(), outgoing, incoming, shifts }
    }

    /// What is sent, in the order in which it becomes ready.
    pub fn outgoing(&self) -> &[Parcel] {
        &self.outgoing
    }

    /// What is received, in the order in which it is best fetched.
    pub fn incoming(&self) -> &[Incoming] {
        &self.incoming
    }

    /// The data regions that the kernel is given, by rank: its own, and for each peer that place of
    /// the outbox. `regions` are the workspace's.
    pub fn data(&self, regions: &[u64]) -> [u64; MAX_WORLD] {
        let mut data = self.shifts;
        for (rank, (address, base)) in data.iter_mut().zip(regions).enumerate() {
            *address = if rank == self.rank as usize { *base } else { base.wrapping_add(*address) };
        }
        data
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// The smallest workspace that holds it.
    pub fn workspace(&self) -> WorkspaceSize {
        self.size
    }
}
