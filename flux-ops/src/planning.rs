//! Which plan an op has: what its caller names, a measured one, or the cost model's.
//!
//! Invariant: every rank makes a choice, and all take rank 0's. What a schedule is derived from
//! beside the plan, the SM count, is part of the choice.

use crate::error::BuildError;
use flux_core::Problem;
use flux_core::machine::Machine;
use flux_core::plan::{Links, PLAN_BYTES, Plan, PlanKey, PlanOrigin, PlanTable, Target, choose};
use flux_transport::{Capabilities, Communicator, Mover, PeerStores};
use std::sync::OnceLock;

/// Bytes of a [`Choice`] as ranks exchange it: the plan and the SM count.
pub(crate) const CHOICE_BYTES: usize = PLAN_BYTES + 4;

/// A plan with what its schedule is derived from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) plan: Plan,
    /// SMs that stream-K counts with, on all ranks.
    pub(crate) sms: u32,
}

impl Choice {
    pub(crate) fn to_bytes(self) -> [u8; CHOICE_BYTES] {
        let mut bytes = [0; CHOICE_BYTES];
        bytes[..PLAN_BYTES].copy_from_slice(&self.plan.to_bytes());
        bytes[PLAN_BYTES..].copy_from_slice(&self.sms.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (plan, sms) = bytes.split_first_chunk::<PLAN_BYTES>()?;
        let sms = u32::from_le_bytes(sms.try_into().ok()?);
        Some(Self { plan: Plan::from_bytes(plan).ok()?, sms })
    }
}

/// What plans are chosen for on `comm`. On the host transport it is an H100's: the same plans are
/// tried there as on GPUs.
pub(crate) fn target(comm: &Communicator) -> Target {
    let device = comm.device();
    let machine = device.info().map_or(Machine::H100, |info| Machine::of_gpu(&info.name, info.sms));
    let links = links(&comm.capabilities());
    let machine = if links == Links::HostStaged { machine.staged(comm.world_size().get()) } else { machine };
    Target { machine, nodes: comm.nodes(), links }
}

/// The legal plans of `problem` on `comm`, the fastest by the cost model first.
pub fn ranked_plans(comm: &Communicator, problem: &Problem) -> Vec<Plan> {
    Plan::ranked(problem, &target(comm))
}

fn links(capabilities: &Capabilities) -> Links {
    match (capabilities.mover, capabilities.peer_stores) {
        (Mover::Messages { channels }, _) => Links::Messages(channels),
        (_, PeerStores::All) => Links::PeerMemory,
        _ => Links::HostStaged,
    }
}

/// This rank's choice where the caller names no plan, and where it comes from.
///
/// # Errors
/// [`BuildError::NoPlan`] where no plan is legal for the problem.
pub(crate) fn own_choice(comm: &Communicator, problem: &Problem) -> Result<(Choice, PlanOrigin), BuildError> {
    let target = target(comm);
    let device = comm.device();
    let key = PlanKey::new(problem, device.name(), &driver(), comm.transport().name());
    let (plan, origin) = choose(problem, &target, &key, &[shipped()]).ok_or(BuildError::NoPlan { problem: *problem })?;
    Ok((Choice { plan, sms: target.machine.multiprocessors }, origin))
}

/// The CUDA driver's version as tables have it; `host` without one.
fn driver() -> String {
    static DRIVER: OnceLock<String> = OnceLock::new();
    let version = || flux_transport::internal::cuda::driver_version().map_or_else(|_| "host".to_owned(), |version| version.to_string());
    DRIVER.get_or_init(version).clone()
}

fn shipped() -> &'static PlanTable {
    static SHIPPED: OnceLock<PlanTable> = OnceLock::new();
    SHIPPED.get_or_init(PlanTable::shipped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_exchanged_whole_and_other_bytes_are_none() {
        let plan: Plan = "tile=128x256x64 rows=per-shard:2 k=stream-k chunk=1".parse().unwrap();
        let choice = Choice { plan, sms: 114 };
        assert_eq!(Choice::from_bytes(&choice.to_bytes()), Some(choice));
        for bytes in [&[][..], &[0; CHOICE_BYTES], &[1; CHOICE_BYTES - 1]] {
            assert_eq!(Choice::from_bytes(bytes), None);
        }
    }
}
