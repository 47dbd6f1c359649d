//! Memory near a device.
//!
//! Invariant: best effort: without the device's NUMA node, memory comes from anywhere. The calling
//! thread's affinity is unchanged.

use rustix::thread::{CpuSet, sched_setaffinity};
use std::fs;
use std::sync::{Mutex, PoisonError};

/// Runs `make` on the NUMA node of the device at this PCI address, so that memory it first touches
/// lies there.
///
/// Containers commonly forbid memory policies, so a thread's affinity does it.
#[allow(
    clippy::missing_panics_doc,
    reason = "it is taken once: by the thread, or where there is none by the caller"
)]
pub fn near<R: Send>(pci: &str, make: impl FnOnce() -> R + Send) -> R {
    let Some(cpus) = cpus_of(pci) else { return make() };
    // Left to the calling thread where there is no other.
    let make = Mutex::new(Some(make));
    let run = || make.lock().unwrap_or_else(PoisonError::into_inner).take().map(|make| make());
    let made = std::thread::scope(|scope| {
        let there = || {
            if let Err(error) = sched_setaffinity(None, &cpus) {
                tracing::debug!(%error, "memory is not taken near its device");
            }
            run()
        };
        match std::thread::Builder::new().spawn_scoped(scope, there) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => {
                tracing::debug!(%error, "memory is not taken near its device");
                run()
            }
        }
    });
    made.expect("it is run once")
}

/// The processors of a device's node.
fn cpus_of(pci: &str) -> Option<CpuSet> {
    let node = fs::read_to_string(format!("/sys/bus/pci/devices/{}/numa_node", pci.to_lowercase()))
        .ok()?;
    // -1 where there is one node, or none is known
    let node: u32 = node.trim().parse().ok()?;
    let list = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
    let mut cpus = CpuSet::new();
    parse(&list)?.for_each(|cpu| cpus.set(cpu));
    Some(cpus)
}

/// The numbers of a list such as `0-3,8,10-11`, as far as a set can hold them.
fn parse(list: &str) -> Option<impl Iterator<Item = usize>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(first..last.min(CpuSet::MAX_CPU - 1) + 1)
    };
    let ranges: Option<Vec<_>> =
        list.trim().split(',').filter(|part| !part.is_empty()).map(range).collect();
    Some(ranges?.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        let list = |text| parse(text).map(Iterator::collect::<Vec<_>>);
        assert_eq!(list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(list(""), Some(vec![]));
        assert_eq!(list("a-b"), None);
        assert_eq!(list("5-4"), Some(vec![]));
        assert_eq!(
            list("1020-99999").map(|cpus| cpus.last().copied()),
            Some(Some(CpuSet::MAX_CPU - 1))
        );
    }

    #[test]
    fn a_device_that_nobody_knows_has_no_nearness() {
        assert_eq!(near("ffff:ff:ff.f", || 7), 7);
    }
}
