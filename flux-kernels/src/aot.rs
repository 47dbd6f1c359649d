//! Compiling every kernel ahead of time.
//!
//! Invariant: a folder that this wrote serves every lookup of this version of the sources, with no
//! compiler on the machine.

use crate::cache::{AheadError, Cubins};
use crate::device::KernelTarget;
use crate::inspect::Report;
use crate::nvrtc::{Arch, KernelSource};
use crate::sources::Source;
use crate::variant::Variant;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Compiles every source for an architecture into `folder`, on as many threads as there are cores,
/// and returns their resources, variants first.
///
/// # Errors
/// The first [`AheadError`] in that order; the others are compiled all the same.
pub fn compile_all(arch: Arch, folder: &Path) -> Result<Vec<Report>, AheadError> {
    let variants = KernelTarget::ahead_of_time(arch).into_iter().flat_map(Variant::all);
    // Links are measured by Hopper's bulk copies.
    let links = (arch == Arch::Sm90a).then(Source::links);
    let sources: Vec<_> = variants.map(|variant| variant.source()).chain([Source::rms_norm(), Source::harness()]).chain(links).collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(sources.len());
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((index, source)) = Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, sources.get(i)?))) {
                    let result = Cubins::compile_ahead(&KernelSource::ours(source, arch), folder);
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result.map(|(_, report)| report)).collect()
}
