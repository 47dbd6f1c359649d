//! NVIDIA's management library, where it is there.
//!
//! Invariant: an [`Nvml`] has started. A question without an answer is no error.

use flux_cuda::{DeviceInfo, library};
use std::ffi::{CString, c_char, c_int, c_uint};

type Device = usize;

#[repr(C)]
#[derive(Default)]
struct FabricInfo {
    cluster: [u8; 16],
    status: c_int,
    clique: c_uint,
    state: u8,
}

const NVLINK: c_int = 2;
const OK: c_int = 0;
const MIG: c_uint = 1;
const MAX_LINKS: c_uint = 18;

flux_cuda::table! {
    pub(super) struct Nvml {
        init = "nvmlInit_v2" () -> c_int;
        by_pci = "nvmlDeviceGetHandleByPciBusId_v2" (*const c_char, *mut Device) -> c_int;
        by_uuid = "nvmlDeviceGetHandleByUUID" (*const c_char, *mut Device) -> c_int;
        mig_mode = "nvmlDeviceGetMigMode" (Device, *mut c_uint, *mut c_uint) -> c_int;
        link_state = "nvmlDeviceGetNvLinkState" (Device, c_uint, *mut c_uint) -> c_int;
        fabric_info = "nvmlDeviceGetGpuFabricInfo" (Device, *mut FabricInfo) -> c_int;
        p2p_status = "nvmlDeviceGetP2PStatus" (Device, Device, c_int, *mut c_int) -> c_int;
        shutdown = "nvmlShutdown" () -> c_int;
    }
}

/// State of the fabric that an NVSwitch machine's GPUs are joined to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    /// The fabric manager has not begun, or is not there.
    NotStarted,
    InProgress,
    Completed,
}

#[derive(Default)]
pub(super) struct GpuFacts {
    pub(super) mig: bool,
    pub(super) links: Option<u32>,
    pub(super) fabric: Option<Fabric>,
}

impl Nvml {
    pub(super) fn load() -> Option<Self> {
        let (_, library) = library::first(vec!["libnvidia-ml.so.1".into()]).ok()?;
        // SAFETY: the entries are declared as in nvml.h.
        let nvml = unsafe { Self::bind(library) }.ok()?;
        // From here on the destructor shuts it down, which is always allowed. SAFETY: it takes
        // nothing.
        (unsafe { (nvml.init)() } == OK).then_some(nvml)
    }

    /// The whole GPU at an address, also where CUDA shows no more than an instance of it.
    fn at(&self, pci: &str) -> Option<Device> {
        let name = CString::new(pci).ok()?;
        let mut device = 0;
        // SAFETY: a terminated string and a place for the result.
        (unsafe { (self.by_pci)(name.as_ptr(), &raw mut device) } == OK).then_some(device)
    }

    fn device(&self, info: &DeviceInfo) -> Option<Device> {
        // An instance has a UUID of its own, which NVML does not know as a GPU's.
        let by_uuid = || {
            let name = CString::new(info.uuid.to_string()).ok()?;
            let mut device = 0;
            // SAFETY: a terminated string and a place for the result.
            (unsafe { (self.by_uuid)(name.as_ptr(), &raw mut device) } == OK).then_some(device)
        };
        self.at(&info.pci.to_lowercase()).or_else(by_uuid)
    }

    pub(super) fn in_mig_mode(&self, pci: &str) -> bool {
        self.at(pci).is_some_and(|device| self.mig(device))
    }

    fn mig(&self, device: Device) -> bool {
        let (mut current, mut pending) = (0, 0);
        // SAFETY: a device of this library and places for the results.
        let code = unsafe { (self.mig_mode)(device, &raw mut current, &raw mut pending) };
        code == OK && current == MIG
    }

    pub(super) fn gpu(&self, info: &DeviceInfo) -> GpuFacts {
        let Some(device) = self.device(info) else { return GpuFacts::default() };
        let mig = self.mig(device);
        let state = |link| {
            let mut up = 0;
            // SAFETY: a device of this library and a place for the result.
            (unsafe { (self.link_state)(device, link, &raw mut up) } == OK).then_some(up)
        };
        let states: Vec<u32> = (0..MAX_LINKS).filter_map(state).collect();
        let links = (!states.is_empty()).then(|| states.iter().sum());
        let mut info = FabricInfo::default();
        // SAFETY: a device of this library; the structure is the first version's, which the entry
        // point without a version takes.
        let said = unsafe { (self.fabric_info)(device, &raw mut info) } == OK;
        let fabric = if said { fabric(info.state) } else { None };
        GpuFacts { mig, links, fabric }
    }

    pub(super) fn joined(&self, a: &DeviceInfo, b: &DeviceInfo) -> bool {
        let (Some(a), Some(b)) = (self.device(a), self.device(b)) else { return false };
        let mut status = -1;
        // SAFETY: two devices of this library and a place for the result.
        (unsafe { (self.p2p_status)(a, b, NVLINK, &raw mut status) }) == OK && status == OK
    }
}

/// `nvmlGpuFabricState_t`; 0 is for GPUs without one.
fn fabric(state: u8) -> Option<Fabric> {
    match state {
        1 => Some(Fabric::NotStarted),
        2 => Some(Fabric::InProgress),
        3 => Some(Fabric::Completed),
        _ => None,
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: it takes nothing; what it was given is not used any more.
        unsafe { (self.shutdown)() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_is_said_where_there_is_one() {
        assert_eq!(
            [0, 1, 2, 3, 9].map(fabric),
            [
                None,
                Some(Fabric::NotStarted),
                Some(Fabric::InProgress),
                Some(Fabric::Completed),
                None
            ]
        );
        assert_eq!((size_of::<FabricInfo>(), std::mem::offset_of!(FabricInfo, state)), (28, 24));
    }
}
