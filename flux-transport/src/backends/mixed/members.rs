//! Who the ranks are: to node peers, and on their rail.
//!
//! Invariant: all ranks group themselves alike, and where meeting fails it fails on all of them.

use crate::backends::connect_error::ConnectError;
use crate::backends::device::peer_memory::{PeerDevices, Reachability};
use crate::backends::nccl;
use crate::backends::nodes::grouped;
use crate::backends::options::{Options, Select};
use crate::bootstrap::world::World;
use flux_core::Nodes;

/// Ranks that have met.
#[derive(Debug)]
pub(crate) struct Members {
    pub(super) nodes: Nodes,
    pub(super) node_peers: PeerDevices,
    pub(super) rail: nccl::Members,
}

impl Members {
    /// Introduces the ranks to each other. Collective.
    ///
    /// # Errors
    /// [`ConnectError::Unusable`] where the ranks are not dealt evenly to several nodes, node
    /// peers do not reach each other's memory, or a rail's ranks cannot be a communicator.
    pub(crate) fn meet(world: &World, options: &Options) -> Result<Self, ConnectError> {
        let unusable = |why| ConnectError::Unusable { select: Select::Mixed, why };
        // By what all ranks know: refused on all or on none.
        let nodes = grouped(world.size(), options.nodes, world.hosts()).map_err(unusable)?;
        if nodes.others() == 0 {
            let why = "all ranks are of one node: take nvlink, or say how many nodes they are to \
                       be taken for (Options::nodes, FLUX_NODES)";
            return Err(unusable(why.to_owned()));
        }
        let node_peers = PeerDevices::meet_in(world, options, Reachability::Peers, nodes)
            .map_err(|error| error.into_connect_error(Select::Mixed))?;
        let rail = nccl::Members::meet(world, options, nodes, Select::Mixed)?;
        Ok(Self { nodes, node_peers, rail })
    }
}
