//! Explains failures to share memory by MIG.
//!
//! Invariant: nothing is decided by it, and NVML is asked only after a failure that MIG may
//! explain, so all ranks say the same.

use super::error::PeerMemoryError;
use super::offer::DeviceIdentity;
use crate::topology;
use crate::topology::hints;
use flux_core::{Nodes, Rank};
use flux_cuda::{CudaError, DeviceInfo};

/// The ranks of a node, as far as MIG may keep them apart.
#[derive(Clone, Debug)]
pub(crate) struct Mig {
    instances: Vec<u32>,
    /// This rank's device; `None` where it has no node peers to reach.
    own: Option<DeviceInfo>,
}

impl Mig {
    pub(super) fn among(
        ranks: &[DeviceIdentity],
        nodes: Nodes,
        rank: u32,
        own: &DeviceInfo,
    ) -> Self {
        let here =
            |&(peer, _): &(u32, &DeviceIdentity)| nodes.together(Rank::new(rank), Rank::new(peer));
        let instances = (0..)
            .zip(ranks)
            .filter(here)
            .filter(|(_, identity)| identity.instance)
            .map(|(peer, _)| peer)
            .collect();
        Self { instances, own: (nodes.per_node() > 1).then(|| own.clone()) }
    }

    /// The error, with what to do where ranks are on instances.
    pub(crate) fn advised(&self, error: PeerMemoryError) -> PeerMemoryError {
        self.advised_by(error, |own| topology::instances(std::slice::from_ref(own)))
    }

    fn advised_by(
        &self,
        error: PeerMemoryError,
        ask: impl FnOnce(&DeviceInfo) -> Option<String>,
    ) -> PeerMemoryError {
        let Some(own) = self.own.as_ref().filter(|_| concerns(&error)) else { return error };
        let named = |ranks: &[u32]| {
            ranks.iter().map(|rank| format!("rank {rank}")).collect::<Vec<_>>().join(", ")
        };
        let advice = if self.instances.is_empty() {
            ask(own)
        } else {
            Some(hints::instances(&named(&self.instances)))
        };
        with(error, advice)
    }
}

/// Why a rank has no device, with advice where GPUs are in MIG mode.
pub(super) fn without_device(error: CudaError) -> PeerMemoryError {
    let advice = error.is_too_few().then(topology::unseen).flatten();
    with(error.into(), advice)
}

fn with(error: PeerMemoryError, advice: Option<String>) -> PeerMemoryError {
    match advice {
        Some(advice) => PeerMemoryError::Advised { error: Box::new(error), advice },
        None => error,
    }
}

/// Whether devices that do not reach each other may be why.
const fn concerns(error: &PeerMemoryError) -> bool {
    matches!(
        error,
        PeerMemoryError::Cuda(CudaError::Call { .. } | CudaError::Unsupported { .. })
            | PeerMemoryError::Peer { .. }
            | PeerMemoryError::SameDevice { .. }
            | PeerMemoryError::NoPeerAccess { .. }
            | PeerMemoryError::NotProven { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backends::connect_error::ConnectError;
    use crate::backends::options::Select;
    use crate::bootstrap::control::ControlError;
    use flux_core::WorldSize;
    use flux_cuda::DeviceUuid;

    /// The second of two nodes, as one of its ranks knows it; all of the other are on instances.
    fn node(instances: &[bool]) -> Mig {
        let identity = |&instance: &bool| DeviceIdentity {
            process: [0; 16],
            uuid: DeviceUuid([0; 16]),
            ordinal: 0,
            posix_handles: true,
            shared_device: false,
            instance,
        };
        let first = vec![true; instances.len()];
        let ranks: Vec<_> = first.iter().chain(instances).map(identity).collect();
        let world = WorldSize::new(ranks.len() as u32).unwrap();
        Mig::among(
            &ranks,
            Nodes::new(world, 2).unwrap(),
            instances.len() as u32,
            &crate::device::some_gpu(),
        )
    }

    fn refused() -> PeerMemoryError {
        CudaError::Call {
            call: "cuMemImportFromShareableHandle",
            code: 1,
            name: "CUDA_ERROR_INVALID_VALUE".to_owned(),
        }
        .into()
    }

    #[test]
    fn ranks_on_instances_are_named_after_what_failed() {
        let error = node(&[true, false, true]).advised_by(refused(), |_| panic!("asked"));
        let words = error.to_string();
        assert_eq!(words, format!("{}; {}", refused(), hints::instances("rank 3, rank 5")));
        let ConnectError::Unusable { select: Select::Pcie, why } =
            error.into_connect_error(Select::Pcie)
        else {
            panic!("{words}")
        };
        assert_eq!(why, words);
    }

    #[test]
    fn nvml_has_the_word_where_no_name_tells() {
        let mig = node(&[false, false]);
        let said = |own: &DeviceInfo| Some(hints::instances(&own.pci));
        let peer = || PeerMemoryError::Peer { peer: Rank::new(5), reason: "cuMemMap".to_owned() };
        assert_eq!(
            mig.advised_by(peer(), said).to_string(),
            format!("{}; {}", peer(), hints::instances("0000:17:00.0"))
        );
        assert_eq!(mig.advised_by(peer(), |_| None).to_string(), peer().to_string());
    }

    #[test]
    fn what_mig_cannot_be_why_of_stays_as_it_is() {
        let never = |_: &DeviceInfo| panic!("asked");
        let lost = PeerMemoryError::Control(ControlError::PeerLost { rank: Rank::new(5) });
        assert!(matches!(node(&[true, true]).advised_by(lost, never), PeerMemoryError::Control(_)));
        let withdrawn = PeerMemoryError::Withdrawn { peer: 5 };
        assert!(matches!(
            node(&[true, true]).advised_by(withdrawn, never),
            PeerMemoryError::Withdrawn { .. }
        ));
        // A rank without node peers reaches all that it has to.
        assert!(matches!(node(&[true]).advised_by(refused(), never), PeerMemoryError::Cuda(_)));
    }

    #[test]
    fn too_few_devices_are_all_that_nvml_is_asked_about_before_ranks_meet() {
        assert!(matches!(
            without_device(CudaError::GivenUp { ordinal: 0 }),
            PeerMemoryError::Cuda(_)
        ));
        let absent = CudaError::NoSuchDevice { ordinal: 1, count: 1 };
        assert!(without_device(absent.clone()).to_string().starts_with(&absent.to_string()));
    }
}
