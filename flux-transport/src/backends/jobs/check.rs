//! Checks of a mover's work.
//!
//! Invariant: checked work touches only the workspace and the caller's rows.

use super::{Job, LibraryCollective, MessageRounds, RowTransfers, Source, StagedTransfer};
use crate::backends::error::TransportError;
use flux_core::layout::WorkspaceSize;

impl Job<'_> {
    /// Checks that all of it lies in the workspace of `world` ranks.
    pub(crate) fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        match self {
            Self::Nothing | Self::Scattered { .. } => Ok(()),
            Self::Rows(rows) => rows.check(world, size),
            Self::Staged(staged) => staged.check(world, size),
            Self::Messages(messages) => messages.check(world, size),
            Self::Collective(collective) => collective.check(world, size),
        }
    }

    /// That a transport does not carry such jobs.
    pub(crate) const fn unusable(&self) -> TransportError {
        let why = match self {
            Self::Nothing | Self::Rows(_) => "this transport pushes no rows",
            Self::Staged(_) => "this transport copies nothing through memory of the host",
            Self::Scattered { .. } => "this transport has no memory of the host to scatter rows to",
            Self::Messages(_) => "this transport carries no messages",
            Self::Collective(_) => "this transport has no collectives of a library",
        };
        TransportError::MoverUnusable { why }
    }
}

impl StagedTransfer<'_> {
    fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        let bad =
            |what, value, limit| Err(TransportError::BadTransfer { index: 0, what, value, limit });
        let needed = self.route.workspace();
        if self.route.world() != world {
            bad("world size of the route", u64::from(self.route.world()), u64::from(world))
        } else if needed.signals > size.signals {
            bad("signals of the route", u64::from(needed.signals), u64::from(size.signals))
        } else if needed.half_bytes > size.half_bytes {
            bad("bytes of the route", needed.half_bytes, size.half_bytes)
        } else {
            Ok(())
        }
    }
}

impl MessageRounds<'_> {
    /// Checks that every message lies in the workspace of `world` ranks.
    fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        let all = u64::from(world.saturating_sub(1)).saturating_mul(self.place_bytes);
        if all > size.half_bytes {
            let what = "end of all places";
            return Err(TransportError::BadTransfer {
                index: 0,
                what,
                value: all,
                limit: size.half_bytes,
            });
        }
        if let Source::Rows(push) = &self.source {
            push.check(world, size)?;
        }
        for (index, round) in self.rounds.iter().enumerate() {
            let bad =
                |what, value, limit| Err(TransportError::BadTransfer { index, what, value, limit });
            let bytes = round.bytes.max(round.sent.bytes).max(round.received.bytes);
            let end = round.offset.saturating_add(bytes);
            if end > self.place_bytes {
                return bad("end of the chunk", end, self.place_bytes);
            }
            for end in [round.sent, round.received] {
                let filled = (u64::from(end.place) + 1).saturating_mul(self.place_bytes);
                if end.peer.get() >= world {
                    return bad("peer", u64::from(end.peer.get()), u64::from(world));
                } else if end.signal >= size.signals {
                    return bad("signal", u64::from(end.signal), u64::from(size.signals));
                } else if filled > size.half_bytes {
                    return bad("end of the place", filled, size.half_bytes);
                }
            }
        }
        Ok(())
    }
}

impl LibraryCollective {
    /// Checks that the rows of all `world` ranks lie in a half of the workspace.
    fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        let end = self
            .shard_bytes()
            .saturating_mul(self.shards(world).into())
            .saturating_add(self.offset);
        if end > size.half_bytes {
            return Err(TransportError::BadTransfer {
                index: 0,
                what: "end of all shards",
                value: end,
                limit: size.half_bytes,
            });
        }
        Ok(())
    }
}

impl RowTransfers<'_> {
    /// Checks that every transfer lies in the workspace of `world` ranks.
    pub(crate) fn check(&self, world: u32, size: WorkspaceSize) -> Result<(), TransportError> {
        for (index, forward) in self.forwards.iter().enumerate() {
            let bad =
                |what, value, limit| Err(TransportError::BadTransfer { index, what, value, limit });
            let filled = (u64::from(forward.from) + 1).saturating_mul(self.place_bytes);
            if forward.awaits.signal >= size.signals {
                return bad(
                    "signal that is awaited",
                    u64::from(forward.awaits.signal),
                    u64::from(size.signals),
                );
            } else if filled > size.half_bytes {
                return bad("end of the place that is passed on", filled, size.half_bytes);
            }
        }
        let passed_on = self.forwards.iter().map(|forward| &forward.to);
        for (index, t) in self.transfers.iter().chain(passed_on).enumerate() {
            let bad =
                |what, value, limit| Err(TransportError::BadTransfer { index, what, value, limit });
            let row_end = (u64::from(t.col) + u64::from(t.cols)).saturating_mul(self.element_bytes);
            let end = (u64::from(t.row) + u64::from(t.rows)).checked_mul(self.row_bytes);
            let inside = end.filter(|&end| end <= self.place_bytes);
            let filled = (u64::from(t.place) + 1).checked_mul(self.place_bytes);
            if t.dest >= world {
                return bad("dest", u64::from(t.dest), u64::from(world));
            } else if t.raise >= size.signals {
                return bad("raise", u64::from(t.raise), u64::from(size.signals));
            } else if row_end > self.row_bytes {
                return bad("end of the columns", row_end, self.row_bytes);
            } else if inside.is_none() {
                return bad("end of the rows", end.unwrap_or(u64::MAX), self.place_bytes);
            } else if filled.is_none_or(|filled| filled > size.half_bytes) {
                return bad("end of the place", filled.unwrap_or(u64::MAX), size.half_bytes);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::program::route::Route;
    use flux_core::program::{Schedule, TileProgram};
    use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    #[test]
    fn a_workspace_that_is_too_small_for_a_route_is_refused() {
        let world = WorldSize::new(2).unwrap();
        let problem =
            Problem::new(OpKind::GemmReduceScatter, 64, 96, 64, DType::Bf16, world).unwrap();
        let schedule = Schedule::of(TileShape::new(16, 24, 16));
        let programs: Vec<_> = world
            .ranks()
            .map(|rank| TileProgram::build(&problem, rank, &schedule).unwrap())
            .collect();
        let (route, size) = (Route::new(Rank::new(0), &programs), programs[0].workspace());
        let carry = StagedTransfer { x: 0, row_stride: 0, route: &route, op: 0 };
        assert!(carry.check(2, size).is_ok() && carry.check(3, size).is_err());
        assert!(carry.check(2, WorkspaceSize { signals: size.signals - 1, ..size }).is_err());
        assert!(carry.check(2, WorkspaceSize { half_bytes: size.half_bytes - 1, ..size }).is_err());
    }
}
