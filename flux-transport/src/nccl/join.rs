//! From ranks that have met to a communicator that is known to carry messages.
//!
//! Invariant: it is collective over the whole world, also where each rail makes a communicator of its own: if it fails on one rank it fails on all.

use super::link::Link;
use super::members::Members;
use super::messages::Messages;
use super::proof::prove;
use super::remains;
use crate::ConnectError;
use crate::control::{Collective, together};
use crate::cuda::{CudaDevice, SideStream};
use std::time::{Duration, Instant};

/// Joins the ranks of a rail, each of which then sends every other a message on `stream`, which is given back; calls have `deadline`.
pub(crate) fn join(
    device: &CudaDevice,
    stream: SideStream,
    members: &Members,
    steps: Collective<'_>,
    (deadline, until): (Duration, Instant),
) -> Result<(Link, SideStream), ConnectError> {
    let joined = Messages::join(device, members, until);
    let joined = joined.map_err(|error| ConnectError::Transport(error.into()));
    let link = together(steps, until, joined.map(|messages| Link::new(messages, deadline)))?;
    let proven = prove(device, &stream, &link, members, until);
    match together(steps, until, proven) {
        Ok(()) => Ok((link, stream)),
        Err(error) => {
            drop(link);
            remains::leave(device, stream);
            Err(error)
        }
    }
}
