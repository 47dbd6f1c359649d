//! Compiling kernels ahead of time.
//!
//! Invariant: a folder with [every](Selection::Every) variant serves every lookup of them by this
//! version of the sources, with no compiler on the machine.

use crate::cache::{AheadError, Cubins};
use crate::device::KernelTarget;
use crate::inspect::Report;
use crate::nvrtc::{Arch, KernelSource};
use crate::on_threads::on_threads;
use crate::shipped;
use crate::sources::Source;
use crate::variant::Variant;
use std::path::Path;

/// Which variants are compiled ahead of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection {
    /// [`Variant::all`]: a device of the architecture needs no compiler for them.
    Every,
    /// Those that most ops take: the others are compiled on first use.
    Shipped,
    /// [`Variant::cover`], which checks the sources in a fraction of the time.
    Cover,
}

impl Selection {
    /// The variants for an architecture.
    pub fn variants(self, arch: Arch) -> Vec<Variant> {
        let of = match self {
            Self::Every => Variant::all,
            Self::Shipped => shipped::variants,
            Self::Cover => Variant::cover,
        };
        KernelTarget::ahead_of_time(arch)
            .into_iter()
            .flat_map(of)
            .filter(|variant| !arch.is_ptx() || variant.ptx() == arch)
            .collect()
    }
}

/// What is compiled ahead of time for an architecture: the variants, then the kernels beside them.
/// PTX is of the sources that need no older one.
pub fn sources_ahead(arch: Arch, variants: &[Variant]) -> Vec<Source> {
    // Links are measured by Hopper's bulk copies.
    let links = (arch == Arch::Sm90a).then(Source::links);
    let quantize = KernelTarget::of_arch(arch).quantizes().then(Source::quantize);
    let others = [Source::rms_norm(), Source::gathered_rows(), Source::harness()];
    let others = others.into_iter().chain(links).chain(quantize);
    variants
        .iter()
        .map(Variant::source)
        .chain(others)
        .filter(|source| !arch.is_ptx() || source.ptx == arch)
        .collect()
}

/// Compiles sources for an architecture into `folder`, on as many threads as there are cores, and
/// returns their resources.
///
/// # Errors
/// The first [`AheadError`] in their order; the others are compiled all the same.
pub fn compile_ahead(
    arch: Arch,
    sources: &[Source],
    folder: &Path,
) -> Result<Vec<Report>, AheadError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    on_threads(sources, threads, 0, |source| {
        Cubins::compile_ahead(&KernelSource::ours(source, arch), folder)
    })
    .into_iter()
    .collect()
}
