//! The fault suite: ranks are killed, stopped or withheld at random moments, and rebuilt.
//!
//! Invariant: a run passes only if every fault became the right error in time on every other rank,
//! every group computed right results to the bit, and nothing is left behind.
//!
//! This process starts the ranks, injects and checks. Survivors alternately rebuild among
//! themselves first, or with a replacement at once. A rank that was stopped for too long, or stayed
//! away, must fail without harm to the others.

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

use crate::{launch, limits, machine, out};
use anyhow::ensure;
use flux_core::OpKind;
use flux_transport::Select;
use std::time::Duration;

/// Arguments of `flux-bench lab faults`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rank processes
    #[arg(
        long,
        visible_alias = "tp",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(2..=16),
    )]
    pub ranks: u32,
    /// Ranks that are killed
    #[arg(long, default_value_t = 50, value_parser = limits::faults())]
    pub kills: u32,
    /// Ranks that are stopped, every second one for longer than the deadline
    #[arg(long, default_value_t = 20, value_parser = limits::faults())]
    pub stops: u32,
    /// Ranks that stay away from a call
    #[arg(long, default_value_t = 10, value_parser = limits::faults())]
    pub missing: u32,
    /// Ranks on each GPU, to have many on few: they take turns on it
    #[arg(long, default_value_t = 1, value_name = "RANKS", value_parser = limits::ranks_per_gpu())]
    pub ranks_per_gpu: u32,
    /// auto, host, nvlink, mixed, nccl or pcie
    #[arg(long, default_value = "auto")]
    pub transport: Select,
    /// Nodes that the ranks are dealt to, for transports auto, host and mixed; survivors then wait
    /// for a replacement
    #[arg(long, value_name = "NODES")]
    pub nodes: Option<u32>,
    /// The ranks' deadline; 1000 on the host, 2000 on GPUs, 5000 over nccl and mixed where left out
    #[arg(long, value_name = "MILLISECONDS", value_parser = limits::deadline_ms())]
    pub deadline_ms: Option<u64>,
    /// Seed of the moments, of who is hit and of the data
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// How long a rank may take to answer beyond its deadlines; then its threads are shown
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = limits::seconds(0))]
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
        // Connecting has this deadline too: four ranks of NCCL took 0.7 s to join and 1.3 s for a
        // message.
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
    ensure!(
        args.kills + args.stops + args.missing > 0,
        "there is nothing to inject: ask for --kills, --stops or --missing"
    );
    let has_nodes = args.nodes.is_some()
        || std::env::var_os("FLUX_NODES").is_some_and(|nodes| !nodes.is_empty());
    ensure!(
        args.transport != Select::Mixed || has_nodes,
        "all ranks are of this machine: --transport mixed takes --nodes too, over which they are \
         dealt"
    );
    let on_gpus = machine::uses_gpus(args.transport)?;
    ensure!(
        on_gpus || args.ranks_per_gpu == 1,
        "--ranks-per-gpu is for GPUs, and changes nothing on the host: leave it out"
    );
    if !on_gpus && machine::asked(args.transport)? == Select::Auto {
        out::line(&"no GPU is here, so all ranks compute on the host's processors");
    }
    suite::run(args)
}

/// Global extents that `ranks` ranks and one less can split; on GPUs most of the time is in
/// kernels.
fn shape(op: OpKind, ranks: u32, on_gpus: bool) -> (usize, usize, usize) {
    let both = (ranks * (ranks - 1)) as usize;
    let (m, split, whole) =
        if on_gpus { (16 * both, 64 * both, 4096) } else { (both, 8 * both, 64) };
    if op.gathers() { (m, split, whole) } else { (m, whole, split) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{DType, Problem, WorldSize};

    #[test]
    fn a_world_and_the_one_without_a_rank_can_split_the_shapes() {
        for ranks in 2..=16 {
            for op in OpKind::ALL {
                for (world, on_gpus) in
                    [(ranks, true), (ranks - 1, true), (ranks, false), (ranks - 1, false)]
                {
                    let (m, n, k) = shape(op, ranks, on_gpus);
                    Problem::new(op, m, n, k, DType::Bf16, WorldSize::new(world).unwrap()).unwrap();
                }
            }
        }
    }
}
