//! What a rank holds of memory, and whether calls make it more.
//!
//! Invariant: what the communicator says it holds for itself, which is bounded, is no growth.

use crate::harness::{RankContext, told};
use crate::report::{Held, HeldMemory};
use anyhow::Context;
use std::fs;

/// At one moment, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moment {
    /// In use on the rank's device, by whatever program; 0 on the host.
    device: u64,
    /// Resident memory of the process.
    host: u64,
    /// Of both, what the communicator accounts for.
    accounted: [u64; 2],
}

impl Moment {
    /// With nothing of this rank under way on its stream.
    pub(super) fn now(ctx: &RankContext) -> anyhow::Result<Self> {
        let device = match ctx.gpu() {
            None => 0,
            Some(gpu) => {
                gpu.synchronize()?;
                let (free, total) = gpu.device().memory()?;
                total - free
            }
        };
        let memory = ctx.comm().memory();
        let held = memory.workspace.plus(memory.besides_workspace());
        Ok(Self { device, host: resident()?, accounted: [held.device, held.pinned + held.host] })
    }

    fn words(self) -> [u64; 4] {
        [self.device, self.host, self.accounted[0], self.accounted[1]]
    }
}

/// Resident memory of this process.
fn resident() -> anyhow::Result<u64> {
    let status = fs::read_to_string("/proc/self/status").context("what this process holds")?;
    let kib = status.lines().find_map(|line| {
        line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    Ok(kib.context("no VmRSS in /proc/self/status")? << 10)
}

/// Of the rank where it has grown most, from the moments before, amid and after the calls.
/// Collective.
pub(super) fn worst(ctx: &RankContext, moments: [Moment; 3]) -> anyhow::Result<HeldMemory> {
    let ranks = told(ctx.comm(), moments.map(Moment::words))?;
    let of = |[before, amid, after]: &[[u64; 4]; 3], at: usize| {
        let accounted = after[at + 2].saturating_sub(amid[at + 2]);
        Held::new([before[at], amid[at], after[at]], accounted)
    };
    let most = |at: usize| {
        ranks.iter().map(|rank| of(rank, at)).max_by_key(|held| held.grown).context("no ranks")
    };
    Ok(HeldMemory { device: most(0)?, host: most(1)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::ranks;
    use flux_transport::{Communicator, Options, Select, World};

    #[test]
    fn the_rank_that_has_grown_most_is_told_and_accounted_memory_is_no_growth() {
        let body = |world: &World| {
            let ctx = RankContext::new(Communicator::connect_blocking(
                world,
                Options::from(Select::Host),
            )?)?;
            let rank = u64::from(world.rank().get());
            let at = |device, host, accounted| Moment { device, host, accounted };
            worst(
                &ctx,
                [
                    at(5, 10, [0, 0]),
                    at(7, 20, [1, 1]),
                    at(7 + 100 * rank, 20 + 50 * (1 - rank), [1, 31]),
                ],
            )
        };
        for held in ranks::on_threads(World::local(2).unwrap(), body).unwrap() {
            assert_eq!(
                (held.device.before, held.device.amid, held.device.after, held.device.grown),
                (5, 7, 107, 100)
            );
            assert_eq!(
                (held.host.before, held.host.amid, held.host.after, held.host.grown),
                (10, 20, 70, 20)
            );
        }
    }

    #[test]
    fn memory_that_is_written_is_resident() {
        let before = resident().unwrap();
        let held = vec![1_u8; 64 << 20];
        assert!(resident().unwrap() >= before + (48 << 20) && held[held.len() - 1] == 1);
    }
}
