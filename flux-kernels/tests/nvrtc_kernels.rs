//! A test for each kernel that it compiles: compiling one takes seconds, and all of them minutes.
//!
//! - `activation NAME`: the kernel has the formula, in its smallest form, with and without gates.
//! - `reference`: the harness's verification has a reference for every activation.
//! - `rms_norm ARCH`, `gathered_rows ARCH`: the kernels behind an op.
//! - `most NAME`: what takes registers makes no kernel spill, of the fewest that have every tile and
//!   send partial sums of the op's type. Time stamps come with gates, or with weights of `[k, n]`
//!   where the kernel sums over ranks.

mod compiler;
mod skipped;

use flux_core::{DType, OpKind, Partials};
use flux_kernels::nvrtc::{Arch, KernelSource};
use flux_kernels::{Activation, KernelTarget, Source, Variant, WeightLayout};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let reference = compiles("reference".to_owned(), Source::harness(), Arch::Sm90a);
    let behind = [Arch::Sm90a, Arch::Sm80].into_iter().flat_map(|arch| {
        [("rms_norm", Source::rms_norm()), ("gathered_rows", Source::gathered_rows())]
            .map(|(name, source)| compiles(format!("{name} {}", arch.name()), source, arch))
    });
    let fused = [Arch::Sm90a, Arch::Sm80].into_iter().flat_map(of_arch);
    libtest_mimic::run(&Arguments::from_args(), fused.chain([reference]).chain(behind).collect()).exit();
}

/// The kernels of an architecture.
fn of_arch(arch: Arch) -> Vec<Trial> {
    let variants = Variant::all(KernelTarget::of_arch(arch));
    let smallest =
        |variant: &&Variant| (variant.op(), variant.dtype(), variant.weights()) == (OpKind::AllGatherGemm, DType::Bf16, WeightLayout::Nk);
    let tile = variants.iter().filter(smallest).map(Variant::tile).min_by_key(|tile| tile.m * tile.n);
    let activated = variants.iter().filter(|variant| smallest(variant) && Some(variant.tile()) == tile);
    let activated = activated.map(|variant| compiles(format!("activation {variant} {}", arch.name()), variant.source(), arch));
    let cover = || Variant::cover(KernelTarget::of_arch(arch)).into_iter();
    let most = cover().filter(|variant| variant.partials() == Partials::OpDType).map(|variant| match variant.op() {
        OpKind::AllGatherGemm => variant.with_activation(Activation::Gelu).with_gates(true).traced(),
        OpKind::GemmReduceScatter | OpKind::GemmAllReduce => variant.with_weights(WeightLayout::Kn).traced(),
    });
    let most = most.map(|variant| compiles(format!("most {variant}"), variant.source(), arch));
    activated.chain(most).collect()
}

/// It compiles, without spills where it is a fused kernel.
fn compiles(name: String, source: Source, arch: Arch) -> Trial {
    Trial::test(name, move || {
        let Some(nvrtc) = compiler::nvrtc("nvrtc_kernels") else { return Ok(()) };
        let report = nvrtc.compile(&KernelSource::ours(&source, arch)).map_err(|error| error.to_string())?.report;
        let defects = report.defects();
        if report.functions.is_empty() || !defects.is_empty() {
            return Err(Failed::from(format!("{} functions, {}", report.functions.len(), defects.join("; "))));
        }
        Ok(())
    })
}
