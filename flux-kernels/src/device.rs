//! What a device takes: the generation of its kernels, the image that its driver loads, and the
//! shared memory of a CTA.
//!
//! Invariant: it follows from the compute capability and `FLUX_ARCH` alone, so all parts of a
//! process agree.

use crate::nvrtc::Arch;
use flux_core::DType;
use flux_core::tile::{Generation, HOPPER_SHARED_BYTES};
use flux_cuda::ComputeCapability;

/// Runs the portable kernel on Hopper where it is `sm_80`, or with 8-bit operands `sm_89`.
const FLUX_ARCH: &str = "FLUX_ARCH";
const HOPPER: ComputeCapability = ComputeCapability::new(9, 0);

/// The kernels of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelTarget {
    /// Which of the kernels.
    pub generation: Generation,
    /// What it is compiled for.
    pub arch: Arch,
    /// Most dynamic shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
}

/// No kernel runs on a device, or not the one that `FLUX_ARCH` asks for.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoKernel {
    /// The device is older than mma.sync of bf16.
    #[error("the device has compute capability {compute}, the kernels need 8.0 or later")]
    TooOld {
        /// Of the device.
        compute: ComputeCapability,
    },
    /// `FLUX_ARCH` names no kernel.
    #[error(
        "FLUX_ARCH={value} names no kernel: use sm_80 for the portable one, sm_89 for that with \
         8-bit operands, or leave it unset"
    )]
    UnknownArch {
        /// What the variable holds.
        value: String,
    },
}

flux_core::debug_is_text!(NoKernel);

impl KernelTarget {
    /// Of a device with this compute capability, in this process: `FLUX_ARCH=sm_80` or `sm_89`
    /// takes the portable kernel on Hopper.
    ///
    /// # Errors
    /// [`NoKernel`] says what the device lacks, or what is wrong with the variable.
    pub fn of(compute: ComputeCapability) -> Result<Self, NoKernel> {
        let asked = std::env::var_os(FLUX_ARCH).filter(|value| !value.is_empty());
        let Some(value) = asked else { return Self::chosen(compute, Generation::Hopper) };
        let portable = [Generation::Portable, Generation::Ada];
        match portable.into_iter().find(|generation| value == generation.name()) {
            Some(generation) => Self::chosen(compute, generation),
            None => Err(NoKernel::UnknownArch { value: value.to_string_lossy().into_owned() }),
        }
    }

    /// The kernel of such a device and why it is that one, in words.
    ///
    /// # Errors
    /// As of [`Self::of`].
    pub fn explain(compute: ComputeCapability) -> Result<String, NoKernel> {
        Self::of(compute).map(|target| target.words(compute))
    }

    fn words(self, compute: ComputeCapability) -> String {
        let (generation, arch) = (self.generation, self.arch.name());
        let portable = match generation {
            Generation::Hopper => {
                return format!("{generation}, made for compute capability {compute}");
            }
            Generation::Portable => "the portable one",
            Generation::Ada => "the portable one with 8-bit operands",
        };
        if compute == HOPPER {
            return format!(
                "{generation}, {portable}, from {arch}, as {FLUX_ARCH}={generation} asks, in place \
                 of {}",
                Generation::Hopper
            );
        }
        format!(
            "{generation}, {portable}, from {arch}: compute capability {compute} has none of its \
             own"
        )
    }

    /// Where a generation's kernels have all the shared memory that its machines are planned with.
    pub const fn of_generation(generation: Generation) -> Self {
        match generation {
            Generation::Hopper => Self::of_arch(Arch::Sm90a),
            Generation::Portable => Self::of_arch(Arch::Compute80),
            Generation::Ada => Self::of_arch(Arch::Compute89),
        }
    }

    /// The targets that kernels are compiled for ahead of time with `arch`: of PTX also Hopper's,
    /// where the portable kernel is tested.
    pub fn ahead_of_time(arch: Arch) -> Vec<Self> {
        let of_arch = Self::of_arch(arch);
        let of_hopper =
            arch.is_ptx().then_some(Self { shared_bytes: HOPPER_SHARED_BYTES, ..of_arch });
        std::iter::once(of_arch).chain(of_hopper).collect()
    }

    /// Whether its devices convert to 8-bit operands, which all that multiply these do.
    pub fn quantizes(self) -> bool {
        self.generation.multiplies(DType::E4m3.into())
    }

    /// The target of `arch` by itself.
    pub const fn of_arch(arch: Arch) -> Self {
        let generation = match arch {
            Arch::Sm90a => Generation::Hopper,
            Arch::Sm80 | Arch::Sm86 | Arch::Compute80 => Generation::Portable,
            Arch::Sm89 | Arch::Sm100 | Arch::Sm120 | Arch::Compute89 => Generation::Ada,
        };
        Self { generation, arch, shared_bytes: arch.shared_bytes() }
    }

    /// The best kernel, or on Hopper the one of `on_hopper`. Where there is no cubin the driver
    /// compiles PTX.
    fn chosen(compute: ComputeCapability, on_hopper: Generation) -> Result<Self, NoKernel> {
        let arch = match (compute.major, compute.minor) {
            (9, 0) => Self::of_generation(on_hopper).arch,
            (8, 6) => Arch::Sm86,
            (8, 9) => Arch::Sm89,
            (8, _) => Arch::Sm80,
            (10, _) => Arch::Sm100,
            (12, _) => Arch::Sm120,
            (0..8, _) => return Err(NoKernel::TooOld { compute }),
            _ => Arch::Compute89,
        };
        let of_arch = Self::of_arch(arch);
        Ok(if compute.major == HOPPER.major {
            Self { shared_bytes: HOPPER_SHARED_BYTES, ..of_arch }
        } else {
            of_arch
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hopper_has_a_kernel_of_its_own_and_others_the_portable_one() {
        let chosen = |major, minor| {
            KernelTarget::chosen(ComputeCapability::new(major, minor), Generation::Hopper)
                .map(|target| (target.generation, target.arch, target.shared_bytes >> 10))
        };
        assert_eq!(chosen(9, 0), Ok((Generation::Hopper, Arch::Sm90a, 227)));
        assert_eq!(chosen(8, 0), Ok((Generation::Portable, Arch::Sm80, 163)));
        assert_eq!(chosen(8, 7), Ok((Generation::Portable, Arch::Sm80, 163)));
        assert_eq!(chosen(8, 6), Ok((Generation::Portable, Arch::Sm86, 99)));
        assert_eq!(chosen(8, 9), Ok((Generation::Ada, Arch::Sm89, 99)));
        assert_eq!(chosen(10, 3), Ok((Generation::Ada, Arch::Sm100, 227)));
        assert_eq!(chosen(12, 0), Ok((Generation::Ada, Arch::Sm120, 99)));
        assert_eq!(chosen(13, 0), Ok((Generation::Ada, Arch::Compute89, 99)), "the least of all");
        assert_eq!(chosen(7, 5), Err(NoKernel::TooOld { compute: ComputeCapability::new(7, 5) }));
    }

    #[test]
    fn hopper_runs_the_portable_kernel_with_all_of_its_shared_memory() {
        for (generation, arch) in
            [(Generation::Portable, Arch::Compute80), (Generation::Ada, Arch::Compute89)]
        {
            let target = KernelTarget { generation, arch, shared_bytes: 227 << 10 };
            assert_eq!(KernelTarget::chosen(HOPPER, generation), Ok(target));
        }
    }

    #[test]
    fn words_say_which_kernel_runs_and_why() {
        let words =
            |compute, on_hopper| KernelTarget::chosen(compute, on_hopper).unwrap().words(compute);
        assert_eq!(words(HOPPER, Generation::Hopper), "sm_90a, made for compute capability 9.0");
        assert_eq!(
            words(HOPPER, Generation::Portable),
            "sm_80, the portable one, from compute_80, as FLUX_ARCH=sm_80 asks, in place of sm_90a"
        );
        assert_eq!(
            words(ComputeCapability::new(8, 6), Generation::Hopper),
            "sm_80, the portable one, from sm_86: compute capability 8.6 has none of its own"
        );
        assert_eq!(
            words(ComputeCapability::new(8, 9), Generation::Hopper),
            "sm_89, the portable one with 8-bit operands, from sm_89: compute capability 8.9 has \
             none of its own"
        );
    }

    #[test]
    fn an_unsuited_device_is_told_what_is_needed() {
        let text = NoKernel::TooOld { compute: ComputeCapability::new(7, 5) }.to_string();
        assert_eq!(text, "the device has compute capability 7.5, the kernels need 8.0 or later");
    }
}
