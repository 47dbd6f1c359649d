//! Opens each backend. Collective.

use crate::backends::device::peer_memory::{PeerDevices, Reachability};
use crate::backends::host::Host;
use crate::backends::mixed::{self, Mixed};
use crate::backends::nccl::{self, NcclTransport};
use crate::backends::nvlink::NvLink;
use crate::backends::pcie::Pcie;
use crate::backends::{ConnectError, Options, Select, Transport};
use crate::bootstrap::control::agree;
use crate::bootstrap::world::World;
use crate::topology::probe;
use flux_core::Nodes;
use std::time::Instant;

pub(super) fn host(world: &World, options: &Options) -> Result<Box<dyn Transport>, ConnectError> {
    Ok(Box::new(Host::connect(world, options)?))
}

/// If any rank's environment forbids peer access, no rank maps a peer's memory.
pub(super) fn nvlink(world: &World, options: &Options) -> Result<Box<dyn Transport>, ConnectError> {
    peer_access(world, options, Select::NvLink)?;
    let connected = PeerDevices::meet(world, options, Reachability::Peers)
        .and_then(|members| NvLink::connect(world, options, members));
    Ok(Box::new(connected.map_err(|error| error.into_connect_error(Select::NvLink))?))
}

pub(super) fn mixed(world: &World, options: &Options) -> Result<Box<dyn Transport>, ConnectError> {
    peer_access(world, options, Select::Mixed)?;
    Ok(Box::new(Mixed::connect(world, options, mixed::Members::meet(world, options)?)?))
}

/// Refuses where a rank's environment forbids peer access. Collective.
fn peer_access(world: &World, options: &Options, select: Select) -> Result<(), ConnectError> {
    let why =
        "NCCL_P2P_DISABLE=1 forbids peer access: unset it, or take another transport".to_owned();
    let allowed =
        if probe::forbidden() { Err(ConnectError::Unusable { select, why }) } else { Ok([]) };
    let answers = agree(world.steps(), &allowed, Instant::now() + options.deadline);
    allowed?;
    answers?;
    Ok(())
}

pub(super) fn nccl(world: &World, options: &Options) -> Result<Box<dyn Transport>, ConnectError> {
    Ok(Box::new(NcclTransport::connect(
        world,
        options,
        nccl::Members::meet(world, options, Nodes::apart(world.size()), Select::Nccl)?,
    )?))
}

pub(super) fn pcie(world: &World, options: &Options) -> Result<Box<dyn Transport>, ConnectError> {
    let members = PeerDevices::meet(world, options, Reachability::Host)
        .map_err(|error| error.into_connect_error(Select::Pcie))?;
    Ok(Box::new(Pcie::connect(world, options, members)?))
}
