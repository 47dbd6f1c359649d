//! Routes: tile programs read as copies from rank to rank, where ranks cannot write to each other's
//! memory.
//!
//! Invariant: a rank derives what it receives from the source's own list of parcels, so both sides
//! agree. Every signal that an item awaits from a peer is that of one parcel.
//!
//! A source's bytes pass through a *half*. For AllGather-GEMM it is the shard, dense. For
//! GEMM-ReduceScatter it has a place for each destination, laid out as the source's place there.
//! For GEMM-AllReduce it is laid out as a reader's: partial tiles go to their owners, and all peers
//! read the results, or in one exchange all rows.
//! The kernel writes such a half, the outbox, in its own memory at the addresses of
//! [`Route::data`].

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

/// All copies from and to a rank in a call.
#[derive(Clone, Debug)]
pub struct Route {
    rank: u32,
    world: u32,
    size: WorkspaceSize,
    outgoing: Vec<Parcel>,
    incoming: Vec<Incoming>,
    /// By rank: the shift, modulo 2^64, from slots and places of the program to those in the
    /// outbox.
    shifts: [u64; MAX_WORLD],
}

impl Route {
    /// The route of `rank` in a call of these programs, one for each rank in order.
    ///
    /// # Panics
    /// If `rank` has no program, or scattered tiles have signals of their own.
    pub fn new(rank: Rank, programs: &[TileProgram]) -> Self {
        let own = &programs[rank.index()];
        let outgoing = parcels::outgoing(own);
        let mut incoming = Vec::new();
        for (source, program) in (0..).zip(programs) {
            let parcels =
                if source == rank.get() { outgoing.clone() } else { parcels::outgoing(program) };
            for (index, parcel) in (0..).zip(parcels) {
                let here = parcel.readers.iter().filter(|reader| reader.rank == rank.get());
                incoming.extend(here.map(|&reader| Incoming {
                    source,
                    index,
                    blocks: parcel.blocks.clone(),
                    reader,
                }));
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

    /// Sent parcels, in the order in which they become ready.
    pub fn outgoing(&self) -> &[Parcel] {
        &self.outgoing
    }

    /// Received parcels, in the order in which to fetch them.
    pub fn incoming(&self) -> &[Incoming] {
        &self.incoming
    }

    /// The data regions for the kernel, by rank: its own, and each peer's place in the outbox.
    /// `regions` are the workspace's.
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

    /// The smallest workspace that holds the route.
    pub fn workspace(&self) -> WorkspaceSize {
        self.size
    }
}
