//! Which ranks make a node.
//!
//! Invariant: ranks of one node share a host, and all ranks group them alike.

use crate::backends::connect_error::ConnectError;
use crate::backends::options::Select;
use crate::bootstrap::control::Hosts;
use flux_core::{Nodes, WorldSize};

/// The number of nodes that this rank asks for: by option, else by `FLUX_NODES`.
pub(crate) fn asked(
    select: Select,
    option: Option<u32>,
    variable: Option<&str>,
) -> Result<Option<u32>, ConnectError> {
    let unusable = |why| Err(ConnectError::Unusable { select, why });
    let count = match (option, variable.filter(|value| !value.is_empty())) {
        (Some(count), _) => Some(count),
        (None, None) => None,
        (None, Some(value)) => match value.parse() {
            Ok(count) => Some(count),
            Err(_) => {
                return unusable(format!("FLUX_NODES = {value:?}: it must be a number of nodes"));
            }
        },
    };
    match count {
        Some(count) if !matches!(select, Select::Auto | Select::Host | Select::Mixed) => {
            unusable(format!(
                "it does not group ranks in {count} nodes: leave Options::nodes and FLUX_NODES out"
            ))
        }
        count => Ok(count),
    }
}

/// The ranks in as many nodes as all of them ask for, or in a node for each host.
pub(crate) fn grouped(
    world: WorldSize,
    asked: Option<u32>,
    hosts: &Hosts,
) -> Result<Nodes, String> {
    match asked {
        Some(count) => {
            dealt(world, count, hosts).map_err(|why| format!("{why} (Options::nodes, FLUX_NODES)"))
        }
        None => by_host(world, hosts),
    }
}

fn by_host(world: WorldSize, hosts: &Hosts) -> Result<Nodes, String> {
    let ranks = |host| hosts.ranks(host).count();
    if let Some(host) = (1..hosts.count()).find(|&host| ranks(host) != ranks(0)) {
        return Err(format!(
            "host 0 has {} ranks, host {host} has {}: start as many on each, or say how many nodes \
             there are (Options::nodes, FLUX_NODES)",
            ranks(0),
            ranks(host)
        ));
    }
    dealt(world, hosts.count(), hosts)
        .map_err(|why| format!("{why}: number the ranks host by host"))
}

fn dealt(world: WorldSize, count: u32, hosts: &Hosts) -> Result<Nodes, String> {
    let nodes = Nodes::new(world, count)
        .ok_or_else(|| format!("{world} ranks cannot be dealt evenly to {count} nodes"))?;
    let apart = world.ranks().find_map(|rank| {
        Some((rank, nodes.node_peers(rank).find(|&node_peer| !hosts.together(rank, node_peer))?))
    });
    match apart {
        Some((rank, node_peer)) => Err(format!(
            "ranks {rank} and {node_peer} are of one of {count} nodes, but on different hosts"
        )),
        None => Ok(nodes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_nodes_is_asked_for_by_option_or_variable() {
        let asked = |select, option, variable| {
            asked(select, option, variable).map_err(|error| error.to_string())
        };
        assert_eq!(asked(Select::Host, None, Some("2")), Ok(Some(2)));
        assert_eq!(asked(Select::Host, Some(4), Some("2")), Ok(Some(4)));
        assert_eq!(asked(Select::Auto, None, Some("2")), Ok(Some(2)));
        assert_eq!(asked(Select::NvLink, None, Some("")), Ok(None));
        assert!(
            asked(Select::Host, None, Some("two")).unwrap_err().contains("FLUX_NODES = \"two\"")
        );
        assert!(
            asked(Select::NvLink, None, Some("2"))
                .unwrap_err()
                .contains("leave Options::nodes and FLUX_NODES out")
        );
    }

    #[test]
    fn ranks_of_a_node_are_many_and_on_one_host() {
        let world = WorldSize::new(4).unwrap();
        let one = Hosts::one(world);
        assert_eq!(dealt(world, 2, &one).unwrap(), Nodes::new(world, 2).unwrap());
        assert_eq!(dealt(world, 3, &one).unwrap_err(), "4 ranks cannot be dealt evenly to 3 nodes");
        let hosts = Hosts::group(&[0, 0, 0, 1]);
        assert_eq!(
            dealt(world, 2, &hosts).unwrap_err(),
            "ranks 2 and 3 are of one of 2 nodes, but on different hosts"
        );
        assert!(dealt(world, 4, &hosts).is_ok());
    }

    #[test]
    fn hosts_are_nodes_where_they_have_as_many_ranks_in_order() {
        let world = WorldSize::new(4).unwrap();
        let by_host = |names: [u8; 4]| grouped(world, None, &Hosts::group(&names));
        assert_eq!(by_host([7, 7, 3, 3]), Ok(Nodes::new(world, 2).unwrap()));
        assert_eq!(by_host([0; 4]), Ok(Nodes::of_all(world)));
        assert!(
            by_host([0, 0, 0, 1]).unwrap_err().starts_with("host 0 has 3 ranks, host 1 has 1: ")
        );
        assert!(by_host([0, 1, 0, 1]).unwrap_err().ends_with("number the ranks host by host"));
        // Where they do not, a number of nodes may.
        let hosts = Hosts::group(&[0, 0, 0, 0, 1, 1]);
        let world = WorldSize::new(6).unwrap();
        assert_eq!(grouped(world, Some(3), &hosts), Ok(Nodes::new(world, 3).unwrap()));
        assert!(grouped(world, None, &hosts).is_err());
        assert!(
            grouped(world, Some(2), &hosts).unwrap_err().ends_with("(Options::nodes, FLUX_NODES)")
        );
    }
}
