//! Numbers that ranks tell each other.

use anyhow::Context;
use bytemuck::Pod;
use flux_transport::Communicator;

/// What each rank says, in rank order. Collective.
pub(crate) fn told<T: Pod>(comm: &Communicator, mine: T) -> anyhow::Result<Vec<T>> {
    let all = comm.exchange(bytemuck::bytes_of(&mine))?;
    let numbers = all.iter().map(|said| bytemuck::try_pod_read_unaligned(said).ok());
    numbers.collect::<Option<_>>().context("a rank is of another version of this program")
}
