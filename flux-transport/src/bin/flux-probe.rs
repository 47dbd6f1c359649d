//! Asks the devices of this machine whether they reach each other's memory, for a process that
//! would not risk it: see `flux_transport::probe`.

fn main() {
    flux_transport::probe::serve();
    eprintln!(
        "flux-probe is started by programs that use flux; `flux-bench doctor` says what this \
         machine can do"
    );
    std::process::exit(2);
}
