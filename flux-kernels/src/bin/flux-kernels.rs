//! `flux-kernels compile --out DIR` compiles every kernel ahead of time, without a GPU, and prints
//! its resources; `flux-kernels nvrtc` prints the compiler.
//!
//! Exit status: 0; 1 when a kernel does not compile, spills, uses local memory or serializes
//! `wgmma`; 3 without NVRTC.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command line program answers there")]

use flux_kernels::nvrtc::{CompileError, Nvrtc};
use flux_kernels::{AheadError, Report, Variant, compile_all};
use std::path::Path;
use std::process::ExitCode;

const NO_NVRTC: u8 = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [task, option, folder] = &args[..]
        && task == "compile"
        && option == "--out"
    {
        return compile(Path::new(folder));
    }
    if args == ["nvrtc"] {
        return nvrtc();
    }
    eprintln!("usage: flux-kernels compile --out DIR, or flux-kernels nvrtc");
    ExitCode::FAILURE
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

fn compile(folder: &Path) -> ExitCode {
    // Before minutes of work are lost to a misspelt path.
    if let Err(error) = std::fs::create_dir_all(folder) {
        eprintln!("error: {} cannot be made: {error}", folder.display());
        return ExitCode::FAILURE;
    }
    let reports = match compile_all(folder) {
        Ok(reports) => reports,
        Err(error) => {
            eprintln!("error: {error}");
            let missing = matches!(error, AheadError::Compile(CompileError::Unavailable(_)));
            return if missing { ExitCode::from(NO_NVRTC) } else { ExitCode::FAILURE };
        }
    };
    print(&reports);
    for warning in reports.iter().flat_map(|report| &report.warnings) {
        println!("{warning}");
    }
    let defects: Vec<String> = reports.iter().flat_map(Report::defects).collect();
    for defect in &defects {
        eprintln!("error: {defect}");
    }
    if let Ok(nvrtc) = Nvrtc::get() {
        println!("{} cubins in {}, by NVRTC {} ({})", reports.len(), folder.display(), nvrtc.version(), nvrtc.path().display());
    }
    if defects.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints one line for each function, in bytes; launch shared memory is that of the fused kernel.
fn print(reports: &[Report]) {
    let variants = Variant::all();
    let width = reports.iter().flat_map(|r| &r.functions).map(|f| f.function.len()).max().unwrap_or(0);
    println!(
        "{:width$} {:>9} {:>12} {:>11} {:>6} {:>14} {:>14} {:>12}",
        "kernel", "registers", "spill stores", "spill loads", "stack", "static shared", "launch shared", "instructions"
    );
    for f in reports.iter().flat_map(|report| &report.functions) {
        let launch = variants.iter().find(|variant| variant.entry() == f.function).map_or(0, Variant::shared_bytes);
        println!(
            "{:width$} {:>9} {:>12} {:>11} {:>6} {:>14} {:>14} {:>12}",
            f.function, f.registers, f.spill_store_bytes, f.spill_load_bytes, f.stack_bytes, f.shared_bytes, launch, f.instructions
        );
    }
}
