//! Rule: at each step the ranks send to different destinations, so that no link carries the traffic
//! of two.
//!
//! Items that scatter are exempt: they have several destinations, and latency bounds their small
//! problems.

use super::Violation;
use super::signals::moves;
use crate::Rank;
use crate::program::{Sink, TileProgram};
use std::collections::BTreeMap;

pub(super) fn check(programs: &[TileProgram]) -> Result<(), Violation> {
    let mut senders: BTreeMap<(usize, u32), Rank> = BTreeMap::new();
    for p in programs {
        // Items have no steps: equal workers are at about the same position.
        let sends = p
            .items
            .iter()
            .enumerate()
            .filter(|(_, item)| item.sink == Sink::Send)
            .map(|(position, item)| (position, item.dest));
        let transfers = moves(p).map(|(transfer, _)| (transfer.step as usize, transfer.dest));
        for (step, dest) in sends.chain(transfers) {
            match senders.insert((step, dest), p.rank) {
                Some(first) if first != p.rank => {
                    return Err(Violation::SameDestination {
                        step,
                        dest: Rank::new(dest),
                        first,
                        second: p.rank,
                    });
                }
                _ => {}
            }
        }
    }
    Ok(())
}
