//! What a run of the benchmark changes of the ops' own choices, to try schedules out.
//!
//! Invariant: what is left out stays what a user gets who says nothing.

use flux_core::program::{Chunk, Schedule};
use flux_core::tile::Raster;
use flux_core::{Problem, TileShape};
use flux_ops::{Builder, Push};

/// The options; what is `None` is left to the op.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Plan {
    /// Rows and columns of a tile, as in 128x192, in place of the heuristic's choice
    #[arg(long, value_name = "MxN", value_parser = tile, help_heading = "Plan")]
    pub tile: Option<TileShape>,
    /// Tiles that a signal announces (row blocks for ag_gemm); 0 for a whole shard
    #[arg(long, value_name = "TILES", help_heading = "Plan")]
    pub chunk: Option<u32>,
    /// Row blocks that the raster takes together
    #[arg(long, value_name = "ROWS", help_heading = "Plan")]
    pub group: Option<u32>,
    /// Shards that are worked on side by side
    #[arg(long, value_name = "SHARDS", help_heading = "Plan")]
    pub band: Option<u32>,
    /// Who carries the shard of ag_gemm on GPUs: auto, kernel or copy-engine
    #[arg(long, value_parser = push, help_heading = "Plan")]
    pub push: Option<Push>,
    /// Percent of the time that there is over which the kernel spreads its traffic
    #[arg(long, value_name = "PERCENT", help_heading = "Plan")]
    pub spread: Option<u32>,
    /// Workers of a rank: CTAs, or threads on the host
    #[arg(long, help_heading = "Plan")]
    pub workers: Option<u32>,
}

fn tile(word: &str) -> Result<TileShape, String> {
    let parsed = word.split_once('x').and_then(|(m, n)| Some(TileShape::new(m.parse().ok()?, n.parse().ok()?, 64)));
    parsed.ok_or_else(|| format!("{word:?} is not of the form 128x256"))
}

fn push(word: &str) -> Result<Push, String> {
    match word {
        "auto" => Ok(Push::Auto),
        "kernel" => Ok(Push::Kernel),
        "copy-engine" => Ok(Push::CopyEngine),
        _ => Err(format!("{word:?} is none of auto, kernel, copy-engine")),
    }
}

impl Plan {
    /// A plan with so many workers and nothing else of its own.
    pub fn with_workers(workers: u32) -> Self {
        Self { workers: Some(workers), ..Self::default() }
    }

    /// Tells a builder what is not left out.
    pub fn apply<Op>(&self, mut builder: Builder<Op>, problem: &Problem) -> Builder<Op> {
        let Self { tile, chunk, group, band, push, spread, workers } = *self;
        if tile.is_some() || chunk.is_some() || group.is_some() || band.is_some() {
            let own = Schedule::heuristic(problem);
            let chunk = chunk.map(|tiles| if tiles == 0 { Chunk::Shard } else { Chunk::Tiles(tiles) });
            builder = builder.schedule(Schedule {
                tile: tile.unwrap_or(own.tile),
                chunk: chunk.unwrap_or(own.chunk),
                raster: group.map_or(own.raster, Raster::RowGroups),
                band: band.unwrap_or(own.band),
                ..own
            });
        }
        builder = builder.push(push.unwrap_or_default());
        if let Some(percent) = spread {
            builder = builder.spread(percent);
        }
        if let Some(workers) = workers {
            builder = builder.workers(workers);
        }
        builder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_or_refused() {
        assert_eq!(tile("128x192"), Ok(TileShape::new(128, 192, 64)));
        assert!(tile("128").is_err() && tile("x").is_err() && push("gpu").is_err());
        assert_eq!(push("copy-engine"), Ok(Push::CopyEngine));
    }
}
