//! What flux needs of a machine with GPUs, and whether this one has it.
//!
//! Invariant: a minimum is the constant by which the library refuses what is older.

use crate::harness::gpu;
use crate::machine::{cuda_version, library_version};
use flux_cuda::ComputeCapability;
use flux_kernels::nvrtc::Nvrtc;
use flux_transport::internal::nccl;

/// What a machine has; the doctor's other lines say why it lacks one.
struct Facts {
    /// `1000 * major + 10 * minor`.
    driver: Option<u32>,
    /// Compute capability of each GPU.
    cards: Vec<ComputeCapability>,
    /// Major and minor.
    nvrtc: Option<(u32, u32)>,
    /// `10000 * major + 100 * minor + patch`.
    nccl: Option<u32>,
}

/// One line for each requirement: what is needed, and whether it is met.
pub(super) fn lines() -> Vec<String> {
    let infos = super::infos();
    let facts = Facts {
        driver: flux_cuda::driver_version().ok(),
        cards: infos.iter().map(|info| info.compute).collect(),
        nvrtc: Nvrtc::get().map(|nvrtc| (nvrtc.version().major, nvrtc.version().minor)).ok(),
        nccl: nccl::version().ok(),
    };
    facts.lines()
}

/// The words of each requirement, as in README's list.
fn needed() -> [String; 4] {
    let (driver, nvrtc) = (flux_cuda::OLDEST_DRIVER, Nvrtc::OLDEST);
    [
        format!("a driver of CUDA {} or newer", cuda_version(driver)),
        format!("a GPU of compute capability {}", gpu::kernels::CAPABILITIES),
        format!("NVRTC {nvrtc} or newer, of no newer major version than the driver's"),
        format!(
            "NCCL {}.{} or newer, for nccl and mixed",
            nccl::OLDEST / 10_000,
            nccl::OLDEST / 100 % 100
        ),
    ]
}

/// Why a requirement is not met where there is nothing.
const NONE: &str = "as said above";

impl Facts {
    fn lines(&self) -> Vec<String> {
        let found = [self.driver(), self.cards(), self.nvrtc(), self.nccl()];
        let line = |(needed, found): (String, Result<String, String>)| match found {
            Ok(found) => format!("{needed}: met by {found}"),
            Err(why) => format!("{needed}: NOT MET, {why}"),
        };
        needed().into_iter().zip(found).map(line).collect()
    }

    fn driver(&self) -> Result<String, String> {
        let version = self.driver.ok_or(NONE)?;
        let words = format!("CUDA {}", cuda_version(version));
        if version < flux_cuda::OLDEST_DRIVER {
            Err(format!("the driver's is {words}: update the driver"))
        } else {
            Ok(words)
        }
    }

    fn cards(&self) -> Result<String, String> {
        if self.cards.is_empty() {
            return Err("this process sees no GPU".to_owned());
        }
        for (ordinal, &compute) in (0..).zip(&self.cards) {
            gpu::kernels::target(ordinal, compute).map_err(|why| why.to_string())?;
        }
        Ok(format!("{} of {}", self.cards.len(), self.cards.len()))
    }

    fn nvrtc(&self) -> Result<String, String> {
        let (major, minor) = self.nvrtc.ok_or(NONE)?;
        match self.driver {
            Some(driver) if major > driver / 1000 => {
                let driver = driver / 1000;
                Err(format!(
                    "a driver of CUDA {driver} loads no cubin of NVRTC {major}.{minor}: install \
                     NVRTC {driver} or update the driver"
                ))
            }
            _ => Ok(format!("{major}.{minor}")),
        }
    }

    fn nccl(&self) -> Result<String, String> {
        let version = self.nccl.ok_or(NONE)?;
        nccl::supported(version).map(library_version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        Facts {
            driver: Some(13_000),
            cards: vec![ComputeCapability::new(9, 0); 4],
            nvrtc: Some((13, 0)),
            nccl: Some(22_803),
        }
    }

    fn not_met(facts: &Facts) -> Vec<String> {
        facts.lines().into_iter().filter(|line| line.contains("NOT MET")).collect()
    }

    #[test]
    fn a_machine_with_all_of_them_meets_each() {
        assert_eq!(not_met(&facts()), [""; 0]);
        assert!(facts().lines().iter().all(|line| line.contains(": met by ")));
        // A driver of the next major version loads what an older compiler makes.
        assert_eq!(not_met(&Facts { nvrtc: Some((12, 4)), ..facts() }), [""; 0]);
    }

    #[test]
    fn what_is_too_old_or_missing_is_named_with_what_is_needed() {
        let one = |facts: Facts, needed: &str, found: &str| {
            let lines = not_met(&facts);
            assert!(
                lines.len() == 1 && lines[0].starts_with(needed) && lines[0].contains(found),
                "{lines:?}"
            );
        };
        one(
            Facts { driver: Some(12_020), nvrtc: Some((12, 0)), ..facts() },
            "a driver of CUDA 12.3",
            "CUDA 12.2",
        );
        one(
            Facts {
                cards: vec![ComputeCapability::new(9, 0), ComputeCapability::new(7, 5)],
                ..facts()
            },
            "a GPU",
            "GPU 1: the device has compute capability 7.5",
        );
        one(Facts { cards: Vec::new(), ..facts() }, "a GPU", "sees no GPU");
        one(
            Facts { driver: Some(12_040), ..facts() },
            "NVRTC",
            "install NVRTC 12 or update the driver",
        );
        one(Facts { nccl: Some(21_701), ..facts() }, "NCCL 2.18", "2.17.1");
        one(Facts { nccl: None, ..facts() }, "NCCL 2.18", NONE);
    }

    #[test]
    fn the_readme_lists_the_same_minimums() {
        let readme = include_str!("../../../README.md");
        for needed in needed() {
            assert!(readme.contains(&format!("\n- {needed}\n")), "README.md lacks `- {needed}`");
        }
    }
}
