//! The fault suite: rank processes that are killed, stopped or stay away at random moments, and a
//! group that is rebuilt after each.
//!
//! Invariant: the run passes only if every injected fault became the error that it has to be, in
//! time, on every rank that was left; every group was rebuilt and computed right results, to the
//! bit; and nothing is left behind.
//!
//! This process computes nothing: it starts the ranks, which are this program again, gives orders,
//! injects and checks. After a fault the survivors alternately rebuild among themselves first and
//! with a replacement then, or with a replacement at once. A rank that was stopped for longer than
//! the deadline, or stayed away, runs on when the others have gone on, or while they find out about
//! it, and must fail and harm nobody.

mod device_memory;
mod episode;
mod interrupt;
mod leaks;
mod messages;
mod process;
mod progress;
mod rank;
mod residue;
mod suite;
mod tally;
mod threads;
mod usage;

use crate::launch;
use crate::limits;
use crate::machine;
use anyhow::ensure;
use flux_core::OpKind;
use flux_transport::Select;
use std::time::Duration;

/// Arguments of `flux-bench lab faults`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rank processes
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..=16))]
    pub ranks: u32,
    /// Ranks that are killed
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(..=limits::FAULTS))]
    pub kills: u32,
    /// Ranks that are stopped, every second one for longer than the deadline
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=limits::FAULTS))]
    pub stops: u32,
    /// Ranks that stay away from a call
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=limits::FAULTS))]
    pub missing: u32,
    /// Ranks on each GPU, to have many on few: they take turns on it
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = clap::value_parser!(u32).range(1..=limits::RANKS_PER_GPU))]
    pub ranks_per_gpu: u32,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Nodes that the ranks are dealt to, as if they were on several machines: for transports auto,
    /// mixed and host; mixed by name where ranks share GPUs. Survivors then wait for a replacement,
    /// as nodes have as many ranks each
    #[arg(long, value_name = "NODES")]
    pub nodes: Option<u32>,
    /// The ranks' deadline: 1000 on the host, 2000 on GPUs, 5000 over nccl and mixed by name where
    /// it is left out
    #[arg(long, value_name = "MILLISECONDS", value_parser = clap::value_parser!(u64).range(1..=limits::DEADLINE_MS))]
    pub deadline_ms: Option<u64>,
    /// Seed of the moments, of who is hit and of the data
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How long a rank may take to answer beyond its deadlines; to start, half a minute more. Then
    /// what its threads do is shown
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(..=limits::SECONDS))]
    pub patience: u64,
    #[command(flatten)]
    defects: Defects,
    /// This process is a rank of a run
    #[arg(long, hide = true)]
    pub as_rank: bool,
}

/// What is wrong with ranks, to see that it is found.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Defects {
    /// The last rank never answers its first order
    #[arg(long, hide = true)]
    stall: bool,
    /// Every rank keeps a descriptor at each rebuild
    #[arg(long, hide = true)]
    leak: bool,
    /// Every rank puts a file where programs put temporary files, and leaves it there
    #[arg(long, hide = true)]
    litter: bool,
}

impl Args {
    fn on_gpus(&self) -> bool {
        machine::uses_gpus(self.transport).unwrap_or(false)
    }

    fn deadline(&self) -> Duration {
        // Connecting and building have the same deadline: NCCL opens its connections, of which four
        // ranks had some 0.7 s to join and more than 1.3 s for the first message once, and kernels
        // are loaded.
        let own = || match self.transport {
            Select::Nccl | Select::Mixed => 5000,
            _ if self.on_gpus() => 2000,
            _ => 1000,
        };
        Duration::from_millis(self.deadline_ms.unwrap_or_else(own))
    }
}

/// Runs the suite, or a rank of it, and says whether it passed.
pub(super) fn run(args: &Args) -> anyhow::Result<bool> {
    if args.as_rank {
        rank::run(args)?;
        return Ok(true);
    }
    launch::refuse("faults")?;
    ensure!(args.kills + args.stops + args.missing > 0, "there is nothing to inject: ask for --kills, --stops or --missing");
    let has_nodes = args.nodes.is_some() || std::env::var_os("FLUX_NODES").is_some_and(|nodes| !nodes.is_empty());
    ensure!(
        args.transport != Select::Mixed || has_nodes,
        "all ranks are of this machine: --transport mixed takes --nodes too, over which they are dealt"
    );
    let on_gpus = machine::uses_gpus(args.transport)?;
    ensure!(on_gpus || args.ranks_per_gpu == 1, "--ranks-per-gpu is for GPUs, and changes nothing on the host: leave it out");
    suite::run(args)
}

/// Global extents that both `ranks` ranks and one less can split; on GPUs large enough that most
/// moments are inside a kernel.
fn shape(op: OpKind, ranks: u32, on_gpus: bool) -> (usize, usize, usize) {
    let both = (ranks * (ranks - 1)) as usize;
    let (m, split, whole) = if on_gpus { (16 * both, 64 * both, 4096) } else { (both, 8 * both, 64) };
    match op {
        OpKind::AllGatherGemm => (m, split, whole),
        OpKind::GemmReduceScatter => (m, whole, split),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, Problem, WorldSize};

    #[test]
    fn a_world_and_the_one_without_a_rank_can_split_the_shapes() {
        for ranks in 2..=16 {
            for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
                for (world, on_gpus) in [(ranks, true), (ranks - 1, true), (ranks, false), (ranks - 1, false)] {
                    let (m, n, k) = shape(op, ranks, on_gpus);
                    Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap();
                }
            }
        }
    }
}
