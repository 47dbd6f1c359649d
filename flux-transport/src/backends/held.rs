//! How much memory serves one purpose.
//!
//! Invariant: it counts what was asked for; the driver may round up.

use std::fmt;

/// Bytes that serve one purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeldBytes {
    /// Device memory.
    pub device: u64,
    /// Pinned host memory.
    pub pinned: u64,
    /// Other host memory.
    pub host: u64,
}

impl HeldBytes {
    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            device: self.device + other.device,
            pinned: self.pinned + other.pinned,
            host: self.host + other.host,
        }
    }
}

impl fmt::Display for HeldBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.device, "on the device"),
            (self.pinned, "of pinned host memory"),
            (self.host, "of host memory"),
        ];
        let mut held = parts.iter().filter(|(bytes, _)| *bytes > 0);
        let Some((bytes, place)) = held.next() else { return f.write_str("nothing") };
        write!(f, "{bytes} bytes {place}")?;
        held.try_for_each(|(bytes, place)| write!(f, ", {bytes} {place}"))
    }
}
