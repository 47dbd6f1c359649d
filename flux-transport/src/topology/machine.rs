//! The GPUs that a process sees, and the machine around them.

use super::mig::is_instance;
use super::nvml::{Fabric, Nvml};
use super::sysfs::{self, BusPlace};
use flux_cuda::DeviceInfo;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// Its PCI address, which every process knows it by.
    pub pci: String,
    /// Its place on the PCI bus; `None` where `/sys` does not show it.
    pub place: Option<BusPlace>,
    /// Whether it is cut into MIG instances.
    pub mig: bool,
    /// NVLinks that are up; `None` where NVML does not say.
    pub links: Option<u32>,
    pub fabric: Option<Fabric>,
}

/// The GPUs that a process sees, and the machine around them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Topology {
    pub gpus: Vec<Gpu>,
    /// Pairs `(a, b)`, places in `gpus`, `a < b`, that NVML counts as joined by NVLink.
    pub nvlink: Vec<(usize, usize)>,
    /// Bridges above the GPUs whose access control sends peers' traffic up to the root.
    pub redirecting: Vec<String>,
    /// Whether the machine is a virtual one.
    pub virtual_machine: bool,
}

/// Looks at `/sys`, `/proc` and, where it is there, NVML.
pub(crate) fn look(infos: &[DeviceInfo]) -> Topology {
    let root = Path::new("/");
    let nvml = Nvml::load();
    let gpus: Vec<Gpu> = infos
        .iter()
        .map(|info| {
            let said = nvml.as_ref().map(|nvml| nvml.gpu(info)).unwrap_or_default();
            let mig = said.mig || is_instance(&info.name);
            Gpu {
                pci: info.pci.to_lowercase(),
                place: sysfs::place(root, &info.pci),
                mig,
                links: said.links,
                fabric: said.fabric,
            }
        })
        .collect();
    let joined = |&(a, b): &(usize, usize)| {
        nvml.as_ref().is_some_and(|nvml| nvml.joined(&infos[a], &infos[b]))
    };
    let nvlink = (0..infos.len())
        .flat_map(|a| (a + 1..infos.len()).map(move |b| (a, b)))
        .filter(joined)
        .collect();
    let mut bridges: Vec<&String> =
        gpus.iter().filter_map(|gpu| gpu.place.as_ref()).flat_map(|place| &place.bridges).collect();
    bridges.sort();
    bridges.dedup();
    let redirecting =
        bridges.into_iter().filter(|bridge| sysfs::redirects(root, bridge)).cloned().collect();
    Topology { gpus, nvlink, redirecting, virtual_machine: sysfs::virtual_machine(root) }
}
