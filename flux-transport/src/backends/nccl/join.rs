//! From ranks that have met to a communicator that is known to carry messages.
//!
//! Invariant: it is collective over the whole world, also where each rail makes a communicator of
//! its own: if it fails on one rank it fails on all.

use super::link::Link;
use super::members::Members;
use super::proof::prove;
use super::{deferred, messages};
use crate::backends::connect_error::ConnectError;
use crate::bootstrap::control::{Collective, together};
use flux_cuda::{CudaDevice, SideStream};
use std::sync::Arc;
use std::time::Instant;

/// Joins the ranks of a rail, each of which then sends every other a message on `stream`, which is
/// given back.
pub(crate) fn join(
    device: &CudaDevice,
    stream: SideStream,
    members: &Members,
    steps: Collective<'_>,
    until: Instant,
) -> Result<(Arc<Link>, SideStream), ConnectError> {
    let joined = messages::join(device, members, until);
    let joined = joined.map_err(|error| ConnectError::Transport(error.into()));
    let link = together(steps, until, joined.map(|both| Arc::new(Link::new(both))))?;
    let proven = prove(device, &stream, &link, members, until);
    match together(steps, until, proven) {
        Ok(()) => Ok((link, stream)),
        Err(error) => {
            drop(link);
            deferred::defer(device, stream);
            Err(error)
        }
    }
}
