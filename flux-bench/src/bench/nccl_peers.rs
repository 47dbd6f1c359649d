//! Peer access of NCCL, which the serial path has only where the op has it.

use crate::{end, machine};
use flux_transport::{Environment, Select};
use std::ffi::OsStr;

const NO_PEERS: &str = "NCCL_P2P_DISABLE";

/// Takes peer access from NCCL, whose collectives the op is compared with, where the op goes
/// without it. Nothing else of the program has begun.
pub(super) fn take(transport: Select) -> anyhow::Result<()> {
    if !leaves_peers_to_nccl(machine::asked(transport)?, std::env::var_os(NO_PEERS).as_deref()) {
        return Ok(());
    }
    // SAFETY: the only thread is the one that runs `main`: ranks, transports and the driver begin
    // later.
    unsafe { std::env::set_var(NO_PEERS, "1") };
    if Environment::read().is_ok_and(|launched| launched.rank.get() > 0) {
        return Ok(());
    }
    end::say(&format!(
        "{NO_PEERS}=1 is set: over pcie the serial path's NCCL has no peer access either, unless \
         {NO_PEERS}=0 is given"
    ));
    Ok(())
}

/// Whether NCCL would use peer access beside an op of this transport, with the variable's value.
fn leaves_peers_to_nccl(transport: Select, variable: Option<&OsStr>) -> bool {
    transport == Select::Pcie && variable.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_keeps_peer_access_but_over_pcie_unless_the_user_gives_it() {
        let taken = |transport, variable: Option<&str>| {
            leaves_peers_to_nccl(transport, variable.map(OsStr::new))
        };
        assert!(taken(Select::Pcie, None) && taken(Select::Pcie, Some("")));
        for variable in ["0", "1"] {
            assert!(!taken(Select::Pcie, Some(variable)));
        }
        for transport in [Select::Auto, Select::NvLink, Select::Mixed, Select::Nccl, Select::Host] {
            assert!(!taken(transport, None), "{transport}");
        }
    }
}
