//! Memory that host ranks read from each other, for the collectives of the serial path.
//!
//! Invariant: one unnamed file a rank, whose descriptors the control plane passes, for threads and
//! processes alike. Nothing is mapped, so no reader sees freed memory.

use anyhow::Context;
use flux_core::Rank;
use flux_kernels::Element;
use flux_transport::{Communicator, World};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Instant;

/// By rank: the shard of `x` (AllGather-GEMM), or all rows of partial sums (GEMM-ReduceScatter and
/// GEMM-AllReduce).
#[derive(Debug)]
pub(super) struct SharedFiles {
    files: Vec<File>,
    own: usize,
}

impl SharedFiles {
    pub(super) fn new(comm: &Communicator, bytes: usize) -> anyhow::Result<Self> {
        let file = File::from(
            rustix::fs::memfd_create("flux-bench", MemfdFlags::CLOEXEC)
                .context("there is no memory to show")?,
        );
        file.set_len(bytes as u64)?;
        let world: World = comm.world();
        let passed =
            world.control().exchange_fds(&[file.as_fd()], Instant::now() + comm.deadline())?;
        let own = comm.rank().index();
        let mut own_file = Some(file);
        let file_of = |(rank, fds): (usize, Vec<_>)| {
            let theirs = fds.into_iter().next().map(File::from);
            if rank == own { own_file.take() } else { theirs }
                .with_context(|| format!("rank {rank} shows nothing"))
        };
        let files = passed.into_iter().enumerate().map(file_of).collect::<anyhow::Result<_>>()?;
        Ok(Self { files, own })
    }

    /// Writes these elements for all ranks.
    pub(super) fn show<T: Element>(&self, elements: &[T]) -> anyhow::Result<()> {
        Ok(self.files[self.own].write_all_at(bytemuck::cast_slice(elements), 0)?)
    }

    /// Copies what `rank` shows, from its element `first` on.
    pub(super) fn read<T: Element>(
        &self,
        rank: Rank,
        first: usize,
        to: &mut [T],
    ) -> anyhow::Result<()> {
        Ok(self.files[rank.index()]
            .read_exact_at(bytemuck::cast_slice_mut(to), (first * size_of::<T>()) as u64)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::ranks;
    use flux_transport::{Options, Select};
    use half::bf16;

    #[test]
    fn every_rank_reads_what_every_other_shows() {
        let body = |world: &World| {
            let comm = Communicator::connect_blocking(world, Options::from(Select::Host))?;
            let shown = SharedFiles::new(&comm, 8 * size_of::<bf16>())?;
            let own: Vec<bf16> =
                (0..8).map(|i| bf16::from_f32((world.rank().get() * 8 + i) as f32)).collect();
            shown.show(&own)?;
            comm.barrier()?;
            for rank in world.size().ranks() {
                let mut got = [bf16::ZERO; 3];
                shown.read(rank, 5, &mut got)?;
                assert_eq!(got, [5, 6, 7].map(|i| bf16::from_f32((rank.get() * 8 + i) as f32)));
            }
            Ok(())
        };
        ranks::on_threads(World::local(3).unwrap(), body).unwrap();
    }
}
