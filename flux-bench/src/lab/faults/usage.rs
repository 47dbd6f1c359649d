//! Resources of a process: descriptors, threads and shared mappings.
//!
//! Invariant: a resource's kind stays the same when it is released and taken anew; its words
//! identify it.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::Ipv4Addr;

/// One thing that a process holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Held {
    /// What can be counted: without the numbers that the system gives each anew.
    pub(super) kind: String,
    pub(super) words: String,
}

/// All that a process holds.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Usage {
    held: Vec<Held>,
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Usage({} descriptors, threads and mappings)", self.held.len())
    }
}

impl FromIterator<Held> for Usage {
    fn from_iter<I: IntoIterator<Item = Held>>(held: I) -> Self {
        Self { held: held.into_iter().collect() }
    }
}

impl Usage {
    pub(super) fn now() -> io::Result<Self> {
        Ok(descriptors()?
            .into_iter()
            .chain(threads()?)
            .chain(mappings(&std::fs::read_to_string("/proc/self/maps")?))
            .collect())
    }

    pub(super) fn counts(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for held in &self.held {
            *counts.entry(held.kind.as_str()).or_default() += 1;
        }
        counts
    }

    /// Those of a kind that were not there before.
    pub(super) fn new_since(&self, before: &Self, kind: &str) -> Vec<&str> {
        self.held
            .iter()
            .filter(|held| held.kind == kind && !before.held.contains(held))
            .map(|held| held.words.as_str())
            .collect()
    }

    /// What there is more of than before, in words.
    pub(super) fn beyond(&self, before: &Self) -> Vec<String> {
        let had = before.counts();
        let grown = self
            .counts()
            .into_iter()
            .filter(|&(kind, count)| count > had.get(kind).copied().unwrap_or(0));
        grown
            .map(|(kind, _)| format!("{kind}: {}", self.new_since(before, kind).join(", ")))
            .collect()
    }
}

fn descriptors() -> io::Result<Vec<Held>> {
    let read = |name| std::fs::read_to_string(format!("/proc/self/net/{name}")).unwrap_or_default();
    let sockets = Sockets::new(&read("unix"), &read("tcp"), &read("tcp6"));
    let mut held = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        // That of this listing is gone when it is looked at by another.
        let Ok(link) = std::fs::read_link(&path) else { continue };
        let number = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        held.push(sockets.descriptor(&number, &link.to_string_lossy()));
    }
    Ok(held)
}

fn threads() -> io::Result<Vec<Held>> {
    let name = |entry: std::fs::DirEntry| {
        let name = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        let name = name.trim_end();
        Held {
            kind: format!("thread {}", plain(name)),
            words: format!("thread {} {name}", entry.file_name().display()),
        }
    };
    std::fs::read_dir("/proc/self/task")?.map(|entry| entry.map(name)).collect()
}

/// Mappings shared by name or descriptor, without those of the driver's devices.
fn mappings(maps: &str) -> Vec<Held> {
    let of = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (range, modes) = (fields.next()?, fields.next()?);
        let path = line.find('/').map(|at| &line[at..])?;
        let shared = modes.ends_with('s') && !path.starts_with("/dev/nvidia");
        shared.then(|| Held {
            kind: format!("mapping of {}", file(path)),
            words: format!("{range} {path}"),
        })
    };
    maps.lines().filter_map(of).collect()
}

/// A name without the numbers in it.
fn plain(name: &str) -> String {
    let mut plain = String::new();
    for c in name.chars() {
        match c {
            '0'..='9' if plain.ends_with('#') => {}
            '0'..='9' => plain.push('#'),
            c => plain.push(c),
        }
    }
    plain
}

/// A file's name without what is drawn for each anew.
fn file(path: &str) -> String {
    let path = path.trim_end_matches(" (deleted)");
    if path.starts_with("/dev/shm/") { "/dev/shm/*".to_owned() } else { plain(path) }
}

/// What the system's tables say of sockets, by inode: kind and words.
struct Sockets(BTreeMap<String, (&'static str, String)>);

impl Sockets {
    fn new(unix: &str, tcp: &str, tcp6: &str) -> Self {
        let mut known = BTreeMap::new();
        for line in unix.lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if let [_, _, _, flags, _, _, inode, rest @ ..] = &fields[..] {
                // __SO_ACCEPTCON
                let kind =
                    if *flags == "00010000" { "unix socket, listening" } else { "unix socket" };
                known.insert((*inode).to_owned(), (kind, rest.join(" ")));
            }
        }
        for line in tcp.lines().skip(1).chain(tcp6.lines().skip(1)) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if let [_, local, remote, state, _, _, _, _, _, inode, ..] = fields[..] {
                let kind = if state == "0A" { "tcp socket, listening" } else { "tcp socket" };
                known.insert(
                    inode.to_owned(),
                    (kind, format!("{} to {}", address(local), address(remote))),
                );
            }
        }
        Self(known)
    }

    fn descriptor(&self, number: &str, link: &str) -> Held {
        let Some(inode) = link.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'))
        else {
            return Held {
                kind: format!("descriptor of {}", file(link)),
                words: format!("{number} of {link}"),
            };
        };
        let other = ("socket", String::new());
        let (kind, more) = self.0.get(inode).unwrap_or(&other);
        let words = format!("{number} of {kind} {inode} {more}");
        Held { kind: format!("descriptor of {kind}"), words: words.trim_end().to_owned() }
    }
}

/// `0100007F:1F90` as `127.0.0.1:8080`; of IPv6 as it stands.
fn address(hex: &str) -> String {
    let parse = || {
        let (ip, port) = hex.split_once(':').filter(|(ip, _)| ip.len() == 8)?;
        // The table's bytes are in machine order, little-endian wherever GPUs are.
        let ip = Ipv4Addr::from(u32::from_str_radix(ip, 16).ok()?.swap_bytes());
        Some(format!("{ip}:{}", u16::from_str_radix(port, 16).ok()?))
    };
    parse().unwrap_or_else(|| hex.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;

    #[test]
    fn what_a_process_opens_is_named() {
        let before = Usage::now().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = UnixStream::pair().unwrap();
        let file =
            rustix::fs::memfd_create("flux-test-usage", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let after = Usage::now().unwrap();
        // Other tests of this process open and close things meanwhile.
        let new = |kind: &str| after.new_since(&before, kind).join("\n");
        let port = listener.local_addr().unwrap();
        assert!(
            new("descriptor of tcp socket, listening").contains(&port.to_string()),
            "{after:?}"
        );
        for end in [&pair.0, &pair.1] {
            let number = std::os::fd::AsRawFd::as_raw_fd(end);
            assert!(
                format!("\n{}", new("descriptor of unix socket"))
                    .contains(&format!("\n{number} of ")),
                "{after:?}"
            );
        }
        let memory = |usage: &Usage| {
            usage
                .beyond(&before)
                .iter()
                .filter(|more| more.contains("/memfd:flux-test-usage: "))
                .count()
        };
        assert_eq!(memory(&after), 1);
        drop((listener, pair, file));
        assert_eq!(memory(&Usage::now().unwrap()), 0);
    }

    #[test]
    fn kinds_are_free_of_numbers_that_change() {
        let sockets = Sockets::new("", "", "");
        let kind = |link: &str| sockets.descriptor("7", link).kind;
        assert_eq!(kind("pipe:[123]"), kind("pipe:[45]"));
        assert_eq!(kind("/dev/shm/nccl-AbC1 (deleted)"), kind("/dev/shm/nccl-xYz2"));
        assert_eq!(kind("socket:[123]"), "descriptor of socket");
        assert_ne!(kind("/dev/nvidia0"), kind("/dev/nvidiactl"));
        let maps = "7f00-7f10 rw-s 00000000 00:01 12 /memfd:flux (deleted)\n7f10-7f20 rw-p \
                    00000000 00:01 13 /lib/x.so\n\
                    7f20-7f30 rw-s 00000000 00:01 14 /dev/nvidia0\n7f30-7f40 rw-p 00000000 00:00 \
                    0\n";
        let held = mappings(maps);
        assert_eq!(
            held,
            [Held {
                kind: "mapping of /memfd:flux".into(),
                words: "7f00-7f10 /memfd:flux (deleted)".into()
            }]
        );
    }
}
