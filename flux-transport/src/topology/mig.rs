//! GPUs in MIG mode, as far as a process finds out.
//!
//! Invariant: nothing is decided by it. A process is shown one instance at most, so there is never
//! a pair to ask about: an instance is known by its name, and where none is shown NVML says which
//! GPUs are in the mode. NVML that is not there, or takes longer than [`LIMIT`], says nothing.

use super::nvml::Nvml;
use super::sysfs::nvidia_gpus;
use crate::cuda::DeviceInfo;
use crate::topology::hints;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// What NVML may take to start and to answer. It is asked on a thread that is left behind where a
/// broken driver keeps it.
const LIMIT: Duration = Duration::from_secs(1);

/// Whether CUDA's name of a device is an instance's: it ends in the instance's profile, as in
/// `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
pub(crate) fn is_instance(name: &str) -> bool {
    name.rsplit_once(" MIG ").is_some_and(|(_, profile)| profile.contains('g'))
}

/// What to do where one of these devices, which this process sees, is a MIG instance.
pub fn instances(infos: &[DeviceInfo]) -> Option<String> {
    let on = these(infos, in_mode);
    (!on.is_empty()).then(|| hints::instances(&format!("GPU {}", on.join(", "))))
}

/// What to do where this process sees fewer devices than it needs, and GPUs of the machine are in
/// MIG mode.
pub fn unseen() -> Option<String> {
    let on_bus = nvidia_gpus(Path::new("/"));
    // Without a GPU there is nothing to ask.
    let on = if on_bus.is_empty() { on_bus } else { in_mode(on_bus) };
    (!on.is_empty()).then(|| hints::unseen(&on.join(", ")))
}

/// The GPUs of those devices that are instances: by their names, or where these do not tell by what
/// `in_mode` leaves of their addresses.
fn these(infos: &[DeviceInfo], in_mode: impl FnOnce(Vec<String>) -> Vec<String>) -> Vec<String> {
    let pci = |info: &DeviceInfo| info.pci.to_lowercase();
    let named: Vec<String> = infos.iter().filter(|info| is_instance(&info.name)).map(pci).collect();
    if named.is_empty() && !infos.is_empty() { in_mode(infos.iter().map(pci).collect()) } else { named }
}

/// Those of the GPUs at these addresses that NVML says are in MIG mode.
fn in_mode(gpus: Vec<String>) -> Vec<String> {
    let ask = move || Nvml::load().map(|nvml| gpus.into_iter().filter(|pci| nvml.in_mig_mode(pci)).collect());
    within(LIMIT, ask).unwrap_or_default()
}

/// The answer, where there is one in time.
fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> Option<T> + Send + 'static) -> Option<T> {
    let (say, hear) = mpsc::channel();
    // Nobody listens any more where the limit has passed.
    let ask = move || say.send(ask()).unwrap_or_default();
    std::thread::Builder::new().name("flux-nvml".to_owned()).spawn(ask).ok()?;
    hear.recv_timeout(limit).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn device(ordinal: u32, name: &str) -> DeviceInfo {
        DeviceInfo { ordinal, pci: format!("0000:{ordinal}B:00.0"), name: name.to_owned(), ..DeviceInfo::some() }
    }

    #[test]
    fn an_instance_is_known_by_its_name() {
        for name in ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "NVIDIA H200 MIG 7g.141gb"] {
            assert!(is_instance(name), "{name}");
        }
        for name in ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "MIG", ""] {
            assert!(!is_instance(name), "{name}");
        }
    }

    #[test]
    fn nvml_is_asked_only_where_names_do_not_tell() {
        let never = |_| panic!("asked");
        assert!(these(&[], never).is_empty());
        assert_eq!(these(&[device(3, "NVIDIA H200 MIG 1g.18gb")], never), ["0000:3b:00.0"]);
        let whole = [device(0, "NVIDIA H200"), device(1, "NVIDIA H200")];
        let asked = |gpus: Vec<String>| {
            assert_eq!(gpus, ["0000:0b:00.0", "0000:1b:00.0"]);
            gpus[1..].to_vec()
        };
        assert_eq!(these(&whole, asked), ["0000:1b:00.0"]);
    }

    #[test]
    fn whoever_does_not_answer_in_time_says_nothing() {
        let hangs = || {
            std::thread::sleep(Duration::from_secs(20));
            Some(())
        };
        let began = Instant::now();
        assert_eq!(within(Duration::from_millis(50), hangs), None);
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!((within(LIMIT, || Some(7)), within(LIMIT, || None::<()>)), (Some(7), None));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_in_no_mode() {
        assert!(in_mode(vec!["ffff:ff:1f.7".to_owned(), "a\0b".to_owned()]).is_empty());
    }
}
