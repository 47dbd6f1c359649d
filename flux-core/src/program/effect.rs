//! What a schedule comes to for one problem.
//!
//! Invariant: the programs of a schedule and of what is in effect of it are the same.

use super::along_k::AlongK;
use super::schedule::{Chunk, Schedule};
use super::{Lent, gemm_rs, gemm_rs_flattened};
use crate::tile::{Raster, TileGrid};
use crate::{Nodes, OpKind, Problem};
use std::ops::Range;

impl Schedule {
    /// The same schedule without what means nothing for `problem` on `nodes`, and with no more of
    /// anything than there is, so that its words say what is done; but of what is
    /// [lent](Self::lent) what was asked for, as how messages go decides. One that no program can
    /// be built of stays as it is.
    ///
    /// ```
    /// use flux_core::program::Schedule;
    /// use flux_core::{DType, Nodes, OpKind, Problem, TileShape, WorldSize};
    /// let world = WorldSize::new(4).unwrap();
    /// let p = Problem::new(OpKind::AllGatherGemm, 512, 1024, 1024, DType::Bf16, world)?;
    /// let plain = Schedule::of(TileShape::new(128, 128, 64));
    /// let asked = Schedule { splits: u32::MAX, early: 2, ..plain };
    /// // So many steps has k, and only a GEMM-ReduceScatter has partial tiles.
    /// assert_eq!(asked.in_effect(&p, Nodes::apart(world)), Schedule { splits: 16, ..plain });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn in_effect(&self, problem: &Problem, nodes: Nodes) -> Self {
        if self.check().is_err() || nodes.world() != problem.world() {
            return *self;
        }
        let (world, peers, along_k) = (problem.world(), problem.world().peers(), AlongK::new(problem, self));
        let (gathers, stack) = (problem.op() == OpKind::AllGatherGemm, self.stack && peers > 0);
        let of_shard = TileGrid::of_shard(problem, self.tile);
        let rows = if stack { TileGrid::new(problem.m(), problem.n_local(), self.tile) } else { of_shard };
        // As many as fit a `u32`, or no program can be built.
        let tiles = u32::try_from(rows.tiles()).unwrap_or(u32::MAX);
        let chunk = match self.chunk {
            _ if peers == 0 => Chunk::Shard,
            chunk if gathers && self.chunk_of(of_shard.row_blocks()) < of_shard.row_blocks() => chunk,
            chunk if !gathers && !stack && self.chunk_of(tiles) < tiles => chunk,
            // One by one is all that they can be announced as.
            _ if !gathers && stack && !gemm_rs_flattened::is_whole(self, tiles) => Chunk::Tiles(1),
            _ => Chunk::Shard,
        };
        let raster = match self.raster {
            Raster::RowGroups(group) => Raster::RowGroups(group.min(rows.row_blocks())),
            raster => raster,
        };
        let alone = if gathers { self.alone.min(world.get()) } else { 0 };
        let band = self.band.min(match problem.op() {
            _ if stack => 1,
            // One shard is a band of its own, however wide that may be.
            OpKind::AllGatherGemm => (world.get() - alone).max(1),
            OpKind::GemmReduceScatter => gemm_rs::widest_band(nodes),
        });
        let slices = along_k.slices(self.k_slices).len() as u32;
        let comes = |band: &Range<u32>| self.comes_by_chunk(band, slices);
        let by_chunk = if gathers && !stack { self.bands(world).filter(comes).map(|band| band.start).last().unwrap_or(0) } else { 0 };
        let shared = !nodes.are_mixed() && self.shared_tiles(problem).is_some();
        Self {
            tile: self.tile,
            chunk,
            raster,
            band,
            alone: if band > 1 { alone } else { 0 },
            by_chunk,
            k_slices: if gathers && peers > 0 { slices } else { 1 },
            splits: self.splits.min(along_k.steps()),
            shares: if shared { self.shares } else { 1 },
            stack,
            early: if gathers || stack { 0 } else { gemm_rs::early(self, along_k, nodes, peers) },
            lent: match self.lent {
                _ if peers == 0 || nodes.are_mixed() => Lent::NONE,
                Lent { last, .. } if gathers => Lent { first: 0, last },
                lent => lent,
            },
        }
    }
}
