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
#[cfg(test)]
mod tests;

use crate::{TransportError, WorkspaceView};
use flux_core::Rank;
use flux_core::layout::WorkspaceSize;
use flux_core::program::TileProgram;
use flux_core::rank::MAX_WORLD;

/// Where a parcel lies in its source's half: `rows` rows of `width` bytes, `pitch` bytes apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Bytes from the start of the half.
    pub offset: u64,
    /// Rows.
    pub rows: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Bytes from a row to the next.
    pub pitch: u64,
}

/// Where a parcel comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller's shard, from the call's begin on.
    Shard {
        /// First row.
        row: u64,
        /// Bytes before the first column.
        before: u64,
    },
    /// The outbox, at the same place as in the half, from when the kernel has raised the reader's
    /// signal.
    Outbox,
}

/// Who reads a parcel, and where it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    /// The rank.
    pub rank: u32,
    /// The signal of its pad that says that the parcel is there.
    pub signal: u32,
    /// Bytes from the start of the half of its data region.
    pub offset: u64,
    /// Bytes from a row to the next there.
    pub pitch: u64,
    /// Step of the schedule at which it goes there.
    pub step: u32,
}

/// A piece that travels as one, with one signal for each reader.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parcel {
    /// Where it comes from.
    pub origin: Origin,
    /// Where it lies on its way.
    pub block: Block,
    /// Who reads it.
    pub readers: Vec<Reader>,
}

/// A parcel as this rank receives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Incoming {
    /// The rank that sends it.
    pub source: u32,
    /// Its number among all that the source sends.
    pub index: u32,
    /// Where it lies in the source's half.
    pub block: Block,
    /// Where it goes.
    pub reader: Reader,
}

/// All that a rank sends and receives in a call of one op.
#[derive(Clone, Debug)]
pub struct Route {
    rank: u32,
    world: u32,
    size: WorkspaceSize,
    outgoing: Vec<Parcel>,
    incoming: Vec<Incoming>,
    /// By rank: what is added to the outbox's address, modulo 2^64, so that the program's own slots
    /// and places lead to the rank's place in it.
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
    /// the outbox.
    pub fn data(&self, view: &WorkspaceView) -> [u64; MAX_WORLD] {
        let mut data = self.shifts;
        for (rank, (address, base)) in data.iter_mut().zip(&view.data).enumerate() {
            *address = if rank == self.rank as usize { *base } else { base.wrapping_add(*address) };
        }
        data
    }

    /// Whether a workspace of `world` ranks holds it.
    pub(crate) fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        let bad = |what, value, limit| Err(TransportError::BadTransfer { index: 0, what, value, limit });
        if self.world != world {
            bad("world size of the route", u64::from(self.world), u64::from(world))
        } else if self.size.signals > size.signals {
            bad("signals of the route", u64::from(self.size.signals), u64::from(size.signals))
        } else if self.size.half_bytes > size.half_bytes {
            bad("bytes of the route", self.size.half_bytes, size.half_bytes)
        } else {
            Ok(())
        }
    }
}
