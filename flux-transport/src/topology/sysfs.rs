//! Reads `/sys` and `/proc`, below any root.
//!
//! Invariant: missing or strange files count as absent.

use std::fs;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BusPlace {
    pub address: String,
    /// The root bus, such as `pci0000:00`.
    pub root: String,
    /// Bridges from the root to the device.
    pub bridges: Vec<String>,
    pub node: Option<u32>,
    /// Whether an IOMMU translates what the device reads and writes.
    pub translated: bool,
}

/// How near two devices are, nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Near {
    Bridge,
    Root,
    Node,
    /// On different ones, or nobody knows.
    Apart,
}

impl BusPlace {
    pub(crate) fn near(&self, other: &Self) -> Near {
        match () {
            () if self.root == other.root
                && self
                    .bridges
                    .first()
                    .is_some_and(|first| other.bridges.first() == Some(first)) =>
            {
                Near::Bridge
            }
            () if self.root == other.root => Near::Root,
            () if self.node.is_some() && self.node == other.node => Near::Node,
            () => Near::Apart,
        }
    }
}

fn word(path: impl AsRef<Path>) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn is_address(name: &str) -> bool {
    let digits = |text: &str, lengths: std::ops::RangeInclusive<usize>| {
        lengths.contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let parts: Vec<&str> = name.split([':', '.']).collect();
    matches!(parts[..], [domain, bus, device, function]
        if digits(domain, 4..=8)
            && digits(bus, 2..=2)
            && digits(device, 2..=2)
            && digits(function, 1..=1))
}

/// The device at an address, as drivers write it.
pub(super) fn place(root: &Path, address: &str) -> Option<BusPlace> {
    let address = address.to_lowercase();
    let address = if is_address(&address) { address } else { return None };
    let device = root.join("sys/bus/pci/devices").join(&address);
    let real = fs::canonicalize(&device).ok()?;
    let names =
        real.iter().filter_map(|name| name.to_str()).skip_while(|name| !name.starts_with("pci"));
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.pop().filter(|last| *last == address)?;
    let bus = names.first()?.clone();
    let bridges = names.into_iter().skip(1).filter(|name| is_address(name)).collect();
    // -1 where there is one node, or none is known.
    let node = word(device.join("numa_node")).and_then(|node| node.parse().ok());
    let translated =
        word(device.join("iommu_group/type")).is_some_and(|kind| kind.starts_with("DMA"));
    Some(BusPlace { address, root: bus, bridges, node, translated })
}

/// NVIDIA's GPUs on the bus, whether or not there is a driver.
pub fn nvidia_gpus(root: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(root.join("sys/bus/pci/devices")) else { return Vec::new() };
    let is_gpu = |path: &Path| {
        // Class 03: display controllers, among them those without a display.
        word(path.join("vendor")).as_deref() == Some("0x10de")
            && word(path.join("class")).is_some_and(|class| class.starts_with("0x03"))
    };
    let found = entries.flatten().filter(|entry| is_gpu(&entry.path()));
    let mut found: Vec<String> =
        found.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    found.sort();
    found
}

/// The extended capability of access control, and its bits that redirect peers' traffic to the
/// root.
const ACS: u16 = 0x000d;
const REDIRECT: u16 = 0x04 | 0x08;

/// Whether a bridge's access control redirects peers' traffic. Only root can read that.
pub(super) fn redirects(root: &Path, bridge: &str) -> bool {
    let config =
        fs::read(root.join("sys/bus/pci/devices").join(bridge).join("config")).unwrap_or_default();
    acs(&config).is_some_and(|control| control & REDIRECT != 0)
}

/// The control register of access control in a device's configuration.
fn acs(config: &[u8]) -> Option<u16> {
    let half = |at: usize| Some(u16::from_le_bytes(*config.get(at..)?.first_chunk()?));
    let mut at = 0x100;
    // There is room for this many capabilities, so a list that goes round ends.
    for _ in 0..(4096 - 0x100) / 8 {
        let (id, next) = (half(at)?, half(at + 2)? >> 4);
        if id == ACS {
            return half(at + 6);
        }
        at = usize::from(next);
        if at < 0x100 {
            return None;
        }
    }
    None
}

/// Whether the processor says that it is a virtual one.
pub(super) fn virtual_machine(root: &Path) -> bool {
    let text = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags")?.split_once(':'));
    flags.is_some_and(|(_, flags)| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    /// A machine with this device at the end of this path of buses.
    fn add(root: &Path, path: &str, files: &[(&str, &str)]) {
        let real = root.join("sys/devices").join(path);
        fs::create_dir_all(&real).unwrap();
        for (name, text) in files {
            let file = real.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let bus = root.join("sys/bus/pci/devices");
        fs::create_dir_all(&bus).unwrap();
        symlink(&real, bus.join(real.file_name().unwrap())).unwrap();
    }

    const GPU: [(&str, &str); 2] = [("vendor", "0x10de\n"), ("class", "0x030200\n")];

    #[test]
    fn devices_have_their_buses_node_and_translation() {
        let machine = tempfile::tempdir().unwrap();
        let root = machine.path();
        add(
            root,
            "pci0000:16/0000:16:01.0/0000:17:00.0",
            &[GPU[0], GPU[1], ("numa_node", "0\n"), ("iommu_group/type", "identity\n")],
        );
        add(
            root,
            "pci0000:16/0000:16:01.0/0000:18:00.0",
            &[("numa_node", "0\n"), ("iommu_group/type", "DMA-FQ\n")],
        );
        add(root, "pci0000:16/0000:16:03.0/0000:19:00.0", &[("numa_node", "0\n")]);
        add(root, "pci0000:40/0000:40:01.0/0000:41:00.0", &[("numa_node", "0\n")]);
        add(root, "pci0000:80/0000:81:00.0", &[GPU[0], GPU[1], ("numa_node", "-1\n")]);
        add(root, "pci0000:80/0000:82:00.0", &[("vendor", "0x8086\n"), ("class", "0x030000\n")]);
        let at = |address| place(root, address).unwrap();
        let first = at("0000:17:00.0");
        let bridges = vec!["0000:16:01.0".to_owned()];
        assert_eq!(
            first,
            BusPlace {
                address: "0000:17:00.0".into(),
                root: "pci0000:16".into(),
                bridges,
                node: Some(0),
                translated: false
            }
        );
        assert!(at("0000:18:00.0").translated);
        let near = ["0000:18:00.0", "0000:19:00.0", "0000:41:00.0", "0000:81:00.0"]
            .map(|other| first.near(&at(other)));
        assert_eq!(near, [Near::Bridge, Near::Root, Near::Node, Near::Apart]);
        assert_eq!(
            at("0000:81:00.0").near(&at("0000:81:00.0")),
            Near::Root,
            "no bridge, and no node"
        );
        assert_eq!(nvidia_gpus(root), ["0000:17:00.0", "0000:81:00.0"]);
        for nobody in ["0000:99:00.0", "../../etc", ""] {
            assert_eq!(place(root, nobody), None);
        }
        assert!(nvidia_gpus(&root.join("nowhere")).is_empty());
    }

    #[test]
    fn access_control_is_found_in_the_list_of_capabilities() {
        let mut config = vec![0; 4096];
        let mut put = |at: usize, id: u16, next: u16, control: u16| {
            config[at..at + 2].copy_from_slice(&id.to_le_bytes());
            config[at + 2..at + 4].copy_from_slice(&(next << 4 | 1).to_le_bytes());
            config[at + 6..at + 8].copy_from_slice(&control.to_le_bytes());
        };
        put(0x100, 1, 0x148, 0);
        put(0x148, ACS, 0, 0x1d);
        assert_eq!(acs(&config), Some(0x1d));
        // What who is not root reads; a list that goes round.
        assert_eq!(acs(&config[..64]), None);
        config[0x148] = 2;
        config[0x14a..0x14c].copy_from_slice(&(0x100_u16 << 4).to_le_bytes());
        assert_eq!(acs(&config), None);
        let machine = tempfile::tempdir().unwrap();
        add(machine.path(), "pci0000:00/0000:00:01.0", &[]);
        assert!(!redirects(machine.path(), "0000:00:01.0"));
        config[0x148] = 0x0d;
        fs::write(machine.path().join("sys/bus/pci/devices/0000:00:01.0/config"), &config).unwrap();
        assert!(redirects(machine.path(), "0000:00:01.0"));
    }

    #[test]
    fn a_virtual_machine_has_a_flag() {
        let machine = tempfile::tempdir().unwrap();
        assert!(!virtual_machine(machine.path()));
        fs::create_dir(machine.path().join("proc")).unwrap();
        for (flags, expected) in [("fpu hypervisor lahf_lm", true), ("fpu lahf_lm", false)] {
            fs::write(
                machine.path().join("proc/cpuinfo"),
                format!("model name\t: x\nflags\t\t: {flags}\n"),
            )
            .unwrap();
            assert_eq!(virtual_machine(machine.path()), expected);
        }
    }

    proptest! {
        #[test]
        fn any_configuration_is_read_to_an_end(
            config in prop::collection::vec(any::<u8>(), 0..4096),
        ) {
            // It ends, and reads nothing that is not there.
            let found = acs(&config);
            prop_assert!(found.is_none() || config.len() > 0x100);
        }
    }
}
