//! `flux-bench doctor`: what this machine has, which transports can work on it, and why others cannot.
//!
//! Invariant: every line is the answer of the very code that a run would ask, so what the doctor finds is what a run will find.

use crate::{gpu, machine};
use flux_transport::{cuda, nccl};
use std::fmt::Display;

/// Prints the findings.
pub fn run() {
    println!("flux {}, commit {}", env!("CARGO_PKG_VERSION"), crate::report::commit());
    line("cores", machine::cores());
    gpus();
    libraries();
    transports();
}

fn line(name: &str, value: impl Display) {
    println!("{name:<12} {value}");
}

fn found<T: Display, E: Display>(name: &str, what: Result<T, E>) {
    match what {
        Ok(what) => line(name, what),
        Err(why) => line(name, format!("none: {why}")),
    }
}

fn gpus() {
    let version = cuda::driver_version().map(|v| {
        let kernel = machine::describe(true, 1, crate::report::Ranks::Threads).driver.unwrap_or_else(|| "of unknown version".to_owned());
        format!("{kernel}, CUDA {}.{}", v / 1000, v % 1000 / 10)
    });
    found("driver", version);
    let count = machine::gpu_count();
    for ordinal in 0..count {
        let info = cuda::device_info(ordinal).map(|i| {
            let (memory, l2) = (i.memory_bytes >> 30, i.l2_bytes >> 20);
            let sharing = if i.virtual_memory && i.posix_handles { "" } else { ", memory cannot be shared between processes" };
            format!(
                "{}, sm_{}{}, {} SMs, {memory} GiB, {l2} MiB L2, {}, {}{sharing}",
                i.name, i.compute.0, i.compute.1, i.sms, i.pci, i.uuid
            )
        });
        found(&format!("gpu {ordinal}"), info);
    }
    if count > 1 {
        match cuda::peer_matrix() {
            Ok(matrix) => {
                let missing: Vec<String> = pairs(&matrix).into_iter().map(|(a, b)| format!("{a} to {b}")).collect();
                let word = if missing.is_empty() { "between all pairs".to_owned() } else { format!("missing: {}", missing.join(", ")) };
                line("peer access", word);
            }
            Err(why) => line("peer access", format!("unknown: {why}")),
        }
    }
}

/// The pairs that cannot reach each other.
fn pairs(matrix: &[Vec<bool>]) -> Vec<(usize, usize)> {
    let all = matrix.iter().enumerate().flat_map(|(from, row)| row.iter().enumerate().map(move |(to, &can)| (from, to, can)));
    all.filter(|&(.., can)| !can).map(|(from, to, _)| (from, to)).collect()
}

fn libraries() {
    found("NVRTC", gpu::kernels::compiler());
    let version = |v: usize| format!("{}.{}.{}", v / 10_000, v / 100 % 100, v % 100);
    found("cuBLASLt", gpu::cublas::available().map(|(path, v)| format!("{}, {}", version(v), path.display())));
    let nccl = nccl::available().map_err(|e| e.to_string()).and_then(|path| {
        let v = nccl::version().map_err(|e| e.to_string())?;
        Ok(format!("{}, {}", version(v as usize), path.display()))
    });
    found("NCCL", nccl);
}

fn transports() {
    println!();
    line("host", "works: ranks are threads of one process or processes of this machine");
    let word = match nvlink() {
        Ok(ranks) => format!("works: up to {ranks} ranks, one a GPU"),
        Err(why) => format!("does not work: {why}"),
    };
    line("nvlink", word);
    let word = match pcie() {
        Ok(ranks) => format!("may work, if asked for: up to {ranks} ranks, one a GPU, through pinned memory of the host; no CUDA graphs"),
        Err(why) => format!("does not work: {why}"),
    };
    line("pcie", word);
    let word = match nccl() {
        Ok(ranks) => format!(
            "may work, if asked for: up to {ranks} ranks on this host, one a GPU, and more on others; NCCL decides when it connects"
        ),
        Err(why) => format!("does not work: {why}"),
    };
    line("nccl", word);
}

fn nccl() -> Result<u32, String> {
    let count = devices()?;
    nccl::available().map_err(|why| why.to_string())?;
    Ok(count)
}

/// How many devices there are, if the kernels run on all of them and they reach pinned memory of the host.
fn pcie() -> Result<u32, String> {
    let count = devices()?;
    for ordinal in 0..count {
        let device = cuda::CudaDevice::open(ordinal).map_err(|why| why.to_string())?;
        cuda::PinnedBlock::new(&device, 1 << 20).map_err(|why| format!("GPU {ordinal}: no pinned memory: {why}"))?;
    }
    Ok(count)
}

/// How many devices there are, if the kernels run on all of them.
fn devices() -> Result<u32, String> {
    cuda::available().map_err(|why| why.to_string())?;
    let count = cuda::device_count().map_err(|why| why.to_string())?;
    for ordinal in 0..count {
        let info = cuda::device_info(ordinal).map_err(|why| why.to_string())?;
        gpu::kernels::arch(ordinal, info.compute).map_err(|why| why.to_string())?;
    }
    Ok(count)
}

fn nvlink() -> Result<u32, String> {
    let count = devices()?;
    let matrix = cuda::peer_matrix().map_err(|why| why.to_string())?;
    match pairs(&matrix).first() {
        Some((from, to)) => Err(format!("GPU {from} cannot access memory of GPU {to}")),
        None => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_links_are_found_in_both_directions() {
        assert_eq!(pairs(&[vec![true, false], vec![true, true]]), [(0, 1)]);
        assert_eq!(pairs(&[vec![true, true], vec![false, true]]), [(1, 0)]);
        assert!(pairs(&[]).is_empty());
    }

    #[test]
    fn the_doctor_answers_whatever_the_machine() {
        run();
        if machine::gpu_count() == 0 {
            assert!(nvlink().is_err());
        }
    }
}
