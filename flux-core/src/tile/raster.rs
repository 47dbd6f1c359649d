//! The order in which a shard's tiles are computed.
//!
//! Invariant: a raster changes the order of tiles, never the tiles.

use std::fmt;

/// Order of the tiles of one shard. Tiles that are computed at the same time share operands in L2:
/// rows of `x` along a row of tiles, rows of `w` along a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Raster {
    /// Down a column of tiles, then the next: `w` is read once for the shard, and all rows of `x`
    /// are needed early.
    RowsFastest,
    /// Along a row of tiles, then the next: rows of `x` are needed late, and `w` is read once for
    /// every row block.
    ColumnsFastest,
    /// Groups of this many row blocks, at least 1, rows fastest inside a group.
    RowGroups(u32),
}

impl Raster {
    /// Every raster, with groups of `group` row blocks. The property tests draw from these.
    pub const fn each(group: u32) -> [Self; 3] {
        [Self::RowsFastest, Self::ColumnsFastest, Self::RowGroups(group)]
    }

    /// Row blocks in a group, of a shard that has `row_blocks`.
    pub(crate) fn group(self, row_blocks: u32) -> u32 {
        match self {
            Self::RowsFastest => row_blocks.max(1),
            Self::ColumnsFastest => 1,
            Self::RowGroups(group) => group,
        }
    }
}

impl fmt::Display for Raster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RowsFastest => f.write_str("rows fastest"),
            Self::ColumnsFastest => f.write_str("columns fastest"),
            Self::RowGroups(group) => write!(f, "groups of {group} row blocks"),
        }
    }
}
