//! `flux-kernels compile --out DIR [--shipped | --cover] [--only TEXT]... [--arch ARCH]...`
//! compiles every kernel ahead of time, without a GPU, and prints its resources. `--shipped` selects
//! those that most ops take, `--cover` the fewest that have every tile and element type. `--only`
//! leaves those with all of these texts in their names. ARCH is `sm_90a` or another name of
//! [`Arch`], or `all`; by default `sm_90a`.
//!
//! `flux-kernels list` prints their names, and `flux-kernels nvrtc` the compiler.
//!
//! `flux-kernels images TABLE --out DIR --sample SEED` compares a table of images with the sources,
//! and `--record` rewrites it.
//!
//! Exit status: 0; 1 when a kernel does not compile, spills, uses local memory or serializes
//! `wgmma`, or when the table is not of the sources; 3 without NVRTC.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line program answers there"
)]

mod images;

use flux_kernels::nvrtc::{Arch, CompileError, Nvrtc};
use flux_kernels::{AheadError, Report, Selection, Source, Variant, compile_ahead, sources_ahead};
use images::{Image, Table, Wrong};
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
        ["images", table, "--out", folder, "--sample", seed] => {
            return images(|compiler| check(Path::new(table), Path::new(folder), seed, compiler));
        }
        ["images", table, "--out", folder, "--record"] => {
            return images(|compiler| record(Path::new(table), Path::new(folder), compiler));
        }
        ["list", options @ ..] => match selected(options) {
            Ok(selected) => return list(&selected),
            Err(why) => eprintln!("error: {why}"),
        },
        _ => {}
    }
    eprintln!(
        "usage: flux-kernels compile --out DIR [--shipped | --cover] [--only TEXT]... \
         [--arch ARCH]..., flux-kernels list [with the same options], flux-kernels images TABLE \
         --out DIR --sample SEED | --record, or flux-kernels nvrtc"
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
        let reports = match compile_ahead(arch, &sources_ahead(arch, variants), folder) {
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

/// Does `work` on the table of images with the compiler, whose release it takes, and says what is
/// wrong.
fn images(work: impl FnOnce(&str) -> Result<Wrong, String>) -> ExitCode {
    let nvrtc = match Nvrtc::get() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(NO_NVRTC);
        }
    };
    let release = nvrtc.release().map_err(|error| error.to_string());
    let Wrong { defects, rows } = match release.and_then(|release| work(&release)) {
        Ok(wrong) => wrong,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::FAILURE;
        }
    };
    for line in defects.iter().chain(&rows) {
        eprintln!("error: {line}");
    }
    if !rows.is_empty() {
        eprintln!("`cargo xtask images --record` writes the rows of these sources");
    }
    if defects.is_empty() && rows.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn check(table: &Path, folder: &Path, seed: &str, release: &str) -> Result<Wrong, String> {
    let text = std::fs::read_to_string(table)
        .map_err(|error| format!("{} cannot be read: {error}", table.display()))?;
    let parsed = parse(&text, table)?;
    images::check(&parsed, &Image::all(), release, seed, |images| compiled(images, folder))
}

fn record(table: &Path, folder: &Path, release: &str) -> Result<Wrong, String> {
    let old = match std::fs::read_to_string(table) {
        Ok(text) => parse(&text, table)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Table::default(),
        Err(error) => return Err(format!("{} cannot be read: {error}", table.display())),
    };
    let (new, wrong) =
        images::record(&old, &Image::all(), release, |images| compiled(images, folder))?;
    flux_files::write(table, new.to_string().as_bytes())
        .map_err(|error| format!("{} cannot be written: {error}", table.display()))?;
    Ok(wrong)
}

fn parse(text: &str, table: &Path) -> Result<Table, String> {
    Table::parse(text).map_err(|why| format!("{}: {why}", table.display()))
}

/// The resources of images, of those of one architecture after the other.
fn compiled(images: &[Image], folder: &Path) -> Result<Vec<Report>, String> {
    let mut reports = Vec::new();
    for of_arch in images.chunk_by(|a, b| a.arch == b.arch) {
        let arch = of_arch[0].arch;
        let sources: Vec<Source> = of_arch.iter().map(|image| image.source.clone()).collect();
        let compiled = compile_ahead(arch, &sources, folder);
        reports.extend(compiled.map_err(|error| format!("{}: {error}", arch.name()))?);
    }
    Ok(reports)
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
