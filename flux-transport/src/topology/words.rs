//! A topology in words, with advice where peers are not reached.
//!
//! Invariant: a pure function.

use super::{Fabric, Gpu, Near, Topology};
use crate::topology::hints;

impl Topology {
    /// A line for each GPU and each pair.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.gpus.iter().map(gpu).collect();
        for (a, one) in self.gpus.iter().enumerate() {
            for (b, other) in self.gpus.iter().enumerate().skip(a + 1) {
                let mut ways = Vec::new();
                if self.nvlink.contains(&(a, b)) {
                    ways.push("NVLink");
                }
                if let (Some(one), Some(other)) = (&one.place, &other.place) {
                    ways.push(match one.near(other) {
                        Near::Bridge => "PCIe below one bridge",
                        Near::Root => "PCIe below one root",
                        Near::Node => "PCIe by the roots of one NUMA node",
                        Near::Apart => "PCIe across NUMA nodes",
                    });
                }
                if !ways.is_empty() {
                    notes.push(format!("GPUs {} and {}: {}", one.pci, other.pci, ways.join("; ")));
                }
            }
        }
        notes
    }

    /// What a person can do where GPUs do not reach each other's memory.
    pub(crate) fn advice(&self) -> Vec<String> {
        let mut advice = Vec::new();
        let those = |which: &dyn Fn(&Gpu) -> bool| {
            let those: Vec<&str> =
                self.gpus.iter().filter(|gpu| which(gpu)).map(|gpu| gpu.pci.as_str()).collect();
            those.join(", ")
        };
        let mig = those(&|gpu| gpu.mig);
        if !mig.is_empty() {
            advice.push(hints::instances(&format!("GPU {mig}")));
        }
        let fabric =
            those(&|gpu| matches!(gpu.fabric, Some(Fabric::NotStarted | Fabric::InProgress)));
        if !fabric.is_empty() {
            advice.push(format!(
                "the NVSwitch fabric is not set up (GPU {fabric}): start the fabric manager \
                 (systemctl start nvidia-fabricmanager) of the driver's version"
            ));
        }
        if !self.redirecting.is_empty() {
            let bridges = self.redirecting.join(", ");
            advice.push(format!(
                "PCI access control (ACS) of {bridges} sends peers' traffic up to the root: switch \
                 ACS off in the firmware or for these bridges (setpci)"
            ));
        }
        let translated = those(&|gpu| gpu.place.as_ref().is_some_and(|place| place.translated));
        if !translated.is_empty() {
            advice.push(format!(
                "an IOMMU translates for GPU {translated}: boot with iommu=pt, or switch it off in \
                 the firmware"
            ));
        }
        if self.virtual_machine {
            advice.push(
                "this is a virtual machine, whose host decides whether peers' writes pass"
                    .to_owned(),
            );
        }
        advice
    }
}

fn gpu(gpu: &Gpu) -> String {
    let mut words = Vec::new();
    if let Some(place) = &gpu.place {
        words.push(format!("below {}", place.root));
        words.extend(place.node.map(|node| format!("NUMA node {node}")));
        if place.translated {
            words.push("behind a translating IOMMU".to_owned());
        }
    }
    words.extend(gpu.links.map(|links| format!("{links} NVLinks up")));
    words.extend(gpu.fabric.map(|fabric| format!("fabric {fabric:?}")));
    if gpu.mig {
        words.push("MIG".to_owned());
    }
    let words =
        if words.is_empty() { "its place is not known".to_owned() } else { words.join(", ") };
    format!("GPU {}: {words}", gpu.pci)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::sysfs::BusPlace;

    fn machine() -> Topology {
        let gpu = |ordinal: u32| {
            let (address, root) = (format!("0000:{ordinal:02}:00.0"), "pci0000:00".to_owned());
            let place = BusPlace {
                address: address.clone(),
                root,
                bridges: vec!["0000:00:01.0".into()],
                node: Some(ordinal),
                translated: false,
            };
            Gpu {
                pci: address,
                place: Some(place),
                mig: false,
                links: Some(18),
                fabric: Some(Fabric::Completed),
            }
        };
        Topology {
            gpus: vec![gpu(0), gpu(1)],
            nvlink: vec![(0, 1)],
            redirecting: Vec::new(),
            virtual_machine: false,
        }
    }

    #[test]
    fn a_pair_has_its_ways() {
        let notes = machine().notes();
        assert_eq!(
            notes[0],
            "GPU 0000:00:00.0: below pci0000:00, NUMA node 0, 18 NVLinks up, fabric Completed"
        );
        assert_eq!(
            notes[2..],
            ["GPUs 0000:00:00.0 and 0000:01:00.0: NVLink; PCIe below one bridge"]
        );
    }

    type Change = fn(&mut Topology);

    #[test]
    fn each_cause_has_its_advice_and_nothing_else_does() {
        assert!(machine().advice().is_empty());
        let causes: [(Change, &str); 5] = [
            (|machine| machine.gpus[1].mig = true, "nvidia-smi -mig 0"),
            (|machine| machine.gpus[0].fabric = Some(Fabric::NotStarted), "nvidia-fabricmanager"),
            (|machine| machine.redirecting.push("0000:00:01.0".into()), "ACS) of 0000:00:01.0"),
            (|machine| machine.gpus[0].place.as_mut().unwrap().translated = true, "iommu=pt"),
            (|machine| machine.virtual_machine = true, "virtual machine"),
        ];
        for (change, words) in causes {
            let mut machine = machine();
            change(&mut machine);
            let advice = machine.advice();
            assert!(advice.len() == 1 && advice[0].contains(words), "{advice:?}");
        }
    }
}
