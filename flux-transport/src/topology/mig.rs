//! GPUs in MIG mode.
//!
//! Invariant: nothing is decided by it. An instance is known by its name; where none is shown, NVML
//! lists the GPUs in the mode, if it answers within [`LIMIT`].

use super::nvml::Nvml;
use super::sysfs::nvidia_gpus;
use crate::topology::hints;
use flux_cuda::DeviceInfo;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

/// What NVML may take to answer. A broken driver keeps the thread that asks.
const LIMIT: Duration = Duration::from_secs(1);

/// Whether a device's name ends in a MIG profile, as `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
pub(crate) fn is_instance(name: &str) -> bool {
    name.rsplit_once(" MIG ").is_some_and(|(_, profile)| profile.contains('g'))
}

/// What to do where one of these devices, which this process sees, is a MIG instance.
pub fn instances(infos: &[DeviceInfo]) -> Option<String> {
    let on = these(infos, in_mode);
    (!on.is_empty()).then(|| hints::instances(&format!("GPU {}", on.join(", "))))
}

/// Advice where this process sees too few devices and GPUs of the machine are in MIG mode.
pub fn unseen() -> Option<String> {
    let on_bus = nvidia_gpus(Path::new("/"));
    // Without a GPU there is nothing to ask.
    let on = if on_bus.is_empty() { on_bus } else { in_mode(on_bus) };
    (!on.is_empty()).then(|| hints::unseen(&on.join(", ")))
}

/// The addresses of those devices that are instances: by name, or else by `in_mode`.
fn these(infos: &[DeviceInfo], in_mode: impl FnOnce(Vec<String>) -> Vec<String>) -> Vec<String> {
    let pci = |info: &DeviceInfo| info.pci.to_lowercase();
    let named: Vec<String> = infos.iter().filter(|info| is_instance(&info.name)).map(pci).collect();
    if named.is_empty() && !infos.is_empty() {
        in_mode(infos.iter().map(pci).collect())
    } else {
        named
    }
}

/// Those of the GPUs at these addresses that NVML says are in MIG mode.
fn in_mode(gpus: Vec<String>) -> Vec<String> {
    let ask = move || {
        Nvml::load().map(|nvml| gpus.into_iter().filter(|pci| nvml.in_mig_mode(pci)).collect())
    };
    within(LIMIT, ask).unwrap_or_default()
}

/// The answer, where there is one in time.
fn within<T: Send + 'static>(
    limit: Duration,
    ask: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    let (say, hear) = mpsc::channel();
    // Nobody listens any more where the limit has passed.
    let ask = move || say.send(ask()).unwrap_or_default();
    std::thread::Builder::new().name("flux-nvml".to_owned()).spawn(ask).ok()?;
    hear.recv_timeout(limit).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::assert_soon;
    use std::time::Instant;

    fn device(ordinal: u32, name: &str) -> DeviceInfo {
        DeviceInfo {
            ordinal,
            pci: format!("0000:{ordinal}B:00.0"),
            name: name.to_owned(),
            ..crate::device::some_gpu()
        }
    }

    #[test]
    fn an_instance_is_known_by_its_name() {
        for name in [
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb",
            "NVIDIA H200 MIG 7g.141gb",
        ] {
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
        assert_soon(began.elapsed(), Duration::from_secs(10));
        assert_eq!((within(LIMIT, || Some(7)), within(LIMIT, || None::<()>)), (Some(7), None));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_in_no_mode() {
        assert!(in_mode(vec!["ffff:ff:1f.7".to_owned(), "a\0b".to_owned()]).is_empty());
    }
}
