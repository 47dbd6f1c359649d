//! Architectures.

/// What kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Arch {
    /// Hopper, with the instructions of `wgmma`; its cubins run on compute capability 9.0 only.
    Sm90a,
    /// A100 and its kin: cubins for compute capability 8.0 and 8.7.
    Sm80,
    /// Ampere of workstations: cubins for compute capability 8.6.
    Sm86,
    /// Ada: cubins for compute capability 8.9.
    Sm89,
    /// Blackwell of data centres: cubins for compute capability 10.x.
    Sm100,
    /// Blackwell of workstations: cubins for compute capability 12.x.
    Sm120,
    /// PTX, which the driver of any later device compiles.
    Compute80,
    /// PTX with instructions for 8-bit operands, from compute capability 8.9 on.
    Compute89,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Sm90a,
        Self::Sm80,
        Self::Sm86,
        Self::Sm89,
        Self::Sm100,
        Self::Sm120,
        Self::Compute80,
        Self::Compute89,
    ];

    /// The name that the compiler knows it by.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm90a => "sm_90a",
            Self::Sm80 => "sm_80",
            Self::Sm86 => "sm_86",
            Self::Sm89 => "sm_89",
            Self::Sm100 => "sm_100",
            Self::Sm120 => "sm_120",
            Self::Compute80 => "compute_80",
            Self::Compute89 => "compute_89",
        }
    }

    /// Dynamic shared memory that a CTA may have, in bytes (CUDA C++ Programming Guide, table of
    /// technical specifications); of PTX what every device has.
    pub const fn shared_bytes(self) -> u32 {
        match self {
            Self::Sm90a | Self::Sm100 => 227 << 10,
            Self::Sm80 => 163 << 10,
            Self::Sm86 | Self::Sm89 | Self::Sm120 | Self::Compute80 | Self::Compute89 => 99 << 10,
        }
    }

    /// Whether the image is PTX.
    pub const fn is_ptx(self) -> bool {
        matches!(self, Self::Compute80 | Self::Compute89)
    }
}
