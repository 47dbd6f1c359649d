//! The program `flux-bench`; see the library.

fn main() -> std::process::ExitCode {
    flux_transport::probe::serve();
    flux_bench::main()
}
