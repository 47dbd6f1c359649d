//! `flux-kernels compile --out DIR [--shipped | --cover] [--only TEXT]... [--arch ARCH]...`
//! compiles every kernel ahead of time, without a GPU, and prints its resources. `--shipped` selects
//! those that most ops take, `--cover` the fewest that have every tile and element type. `--only`
//! leaves those with all of these texts in their names. ARCH is `sm_90a` or another name of
//! [`Arch`], or `all`; by default `sm_90a`.
//!
//! `flux-kernels list` prints their names, and `flux-kernels nvrtc` the compiler.
//!
//! Exit status: 0; 1 when a kernel does not compile, spills, uses local memory or serializes
//! `wgmma`; 3 without NVRTC.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line program answers there"
)]

use flux_kernels::nvrtc::{Arch, CompileError, Nvrtc};
use flux_kernels::{AheadError, Report, Selection, Variant, compile_ahead};
use std::path::Path;
use std::process::ExitCode;

const NO_NVRTC: u8 = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match &words[..] {
        ["nvrtc"] => return nvrtc(),
        ["compile", "--out", folder, options @ ..] => match selected(options) {
            Ok(selected) => return compile(&selected, Path::new(folder)),
            Err(why) => eprintln!("error: {why}"),
        },
        ["list", options @ ..] => match selected(options) {
            Ok(selected) => return list(&selected),
            Err(why) => eprintln!("error: {why}"),
        },
        _ => {}
    }
    eprintln!(
        "usage: flux-kernels compile --out DIR [--shipped | --cover] [--only TEXT]... \
         [--arch ARCH]..., flux-kernels list [with the same options], or flux-kernels nvrtc"
    );
    ExitCode::FAILURE
}

/// The variants of each architecture that the options name.
fn selected(options: &[&str]) -> Result<Vec<(Arch, Vec<Variant>)>, String> {
    let (selection, mut options) = match options {
        ["--cover", options @ ..] => (Selection::Cover, options),
        ["--shipped", options @ ..] => (Selection::Shipped, options),
        options => (Selection::Every, options),
    };
    let mut texts = Vec::new();
    while let ["--only", text, rest @ ..] = options {
        texts.push(*text);
        options = rest;
    }
    let is_wanted = |variant: &Variant| {
        let name = variant.to_string();
        texts.iter().all(|text| name.contains(text))
    };
    let selected: Vec<(Arch, Vec<Variant>)> = archs_of(options)?
        .into_iter()
        .map(|arch| (arch, selection.variants(arch).into_iter().filter(is_wanted).collect()))
        .collect();
    if selected.iter().all(|(_, variants)| variants.is_empty()) {
        return Err(format!("no kernel's name has --only {}", texts.join(" and ")));
    }
    Ok(selected)
}

fn list(selected: &[(Arch, Vec<Variant>)]) -> ExitCode {
    for (arch, variants) in selected {
        for variant in variants {
            println!("{} {variant}", arch.name());
        }
    }
    ExitCode::SUCCESS
}

/// The architectures that `--arch` options name.
fn archs_of(mut options: &[&str]) -> Result<Vec<Arch>, String> {
    let mut archs = Vec::new();
    while let ["--arch", name, rest @ ..] = options {
        let named: Vec<Arch> =
            Arch::ALL.into_iter().filter(|arch| *name == "all" || arch.name() == *name).collect();
        if named.is_empty() {
            let known = Arch::ALL.map(Arch::name).join(", ");
            return Err(format!("--arch {name} names no architecture: use all, {known}"));
        }
        archs.extend(named);
        options = rest;
    }
    match options {
        [] if archs.is_empty() => Ok(vec![Arch::Sm90a]),
        [] => Ok(archs),
        [word, ..] => Err(format!("{word} is no option here: --only and then --arch come last")),
    }
}

fn nvrtc() -> ExitCode {
    match Nvrtc::get() {
        Ok(nvrtc) => {
            println!("NVRTC {} ({})", nvrtc.version(), nvrtc.path().display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(NO_NVRTC)
        }
    }
}

fn compile(selected: &[(Arch, Vec<Variant>)], folder: &Path) -> ExitCode {
    // Before minutes of work are lost to a misspelt path.
    if let Err(error) = std::fs::create_dir_all(folder) {
        eprintln!("error: {} cannot be made: {error}", folder.display());
        return ExitCode::FAILURE;
    }
    let (mut count, mut defects) = (0, Vec::new());
    for &(arch, ref variants) in selected {
        let reports = match compile_ahead(arch, variants, folder) {
            Ok(reports) => reports,
            Err(error) => {
                eprintln!("error: {}: {error}", arch.name());
                let missing = matches!(error, AheadError::Compile(CompileError::Unavailable(_)));
                return if missing { ExitCode::from(NO_NVRTC) } else { ExitCode::FAILURE };
            }
        };
        println!("{}: {} bytes of shared memory for a CTA", arch.name(), arch.shared_bytes());
        print(variants, &reports);
        for warning in reports.iter().flat_map(|report| &report.warnings) {
            println!("{warning}");
        }
        count += reports.len();
        defects.extend(
            reports
                .iter()
                .flat_map(Report::defects)
                .map(|defect| format!("{}: {defect}", arch.name())),
        );
    }
    for defect in &defects {
        eprintln!("error: {defect}");
    }
    if let Ok(nvrtc) = Nvrtc::get() {
        println!(
            "{count} images in {}, by NVRTC {} ({})",
            folder.display(),
            nvrtc.version(),
            nvrtc.path().display()
        );
    }
    if defects.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints one line for each function, in bytes; launch shared memory is that of the fused kernel.
/// PTX has no functions yet.
fn print(variants: &[Variant], reports: &[Report]) {
    let width =
        reports.iter().flat_map(|r| &r.functions).map(|f| f.function.len()).max().unwrap_or(0);
    println!(
        "{:width$} {:>9} {:>12} {:>11} {:>6} {:>14} {:>14} {:>12}",
        "kernel",
        "registers",
        "spill stores",
        "spill loads",
        "stack",
        "static shared",
        "launch shared",
        "instructions"
    );
    for f in reports.iter().flat_map(|report| &report.functions) {
        let launch = variants
            .iter()
            .find(|variant| variant.entry() == f.function)
            .map_or(0, Variant::shared_bytes);
        println!(
            "{:width$} {:>9} {:>12} {:>11} {:>6} {:>14} {:>14} {:>12}",
            f.function,
            f.registers,
            f.spill_store_bytes,
            f.spill_load_bytes,
            f.stack_bytes,
            f.shared_bytes,
            launch,
            f.instructions
        );
    }
}
