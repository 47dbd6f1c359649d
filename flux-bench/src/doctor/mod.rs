//! `flux-bench doctor`: what this machine has, and which transports can work on it.
//!
//! Invariant: every line is the answer of the code that a run would ask.

mod requirements;

use crate::harness::gpu;
use crate::{machine, out};
use flux_cuda::DeviceInfo;
use flux_kernels::KernelTarget;
use flux_transport::Select;
use flux_transport::internal::{nccl, topology};
use flux_transport::probe::{self, Proof, Verdict};
use std::fmt::Display;
use std::path::Path;

/// Arguments of `flux-bench doctor`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Exit with status 1 unless each of these transports works here: nvlink, mixed, pcie, nccl or
    /// host. Where left out, unless what auto takes does
    #[arg(long, value_name = "TRANSPORT,...", value_delimiter = ',', value_parser = required)]
    pub require: Vec<Select>,
}

fn required(word: &str) -> Result<Select, String> {
    match word.parse::<Select>() {
        Ok(Select::Auto) => Err("auto is what is required where this is left out".to_owned()),
        Ok(select) => Ok(select),
        Err(error) => Err(error.to_string()),
    }
}

/// Prints the findings, and says whether what is required works. Where that is left open, it is
/// false where GPUs are there and no transport works.
pub(crate) fn run(args: &Args) -> bool {
    out::line(&format_args!(
        "flux {}, commit {}",
        env!("CARGO_PKG_VERSION"),
        crate::report::commit()
    ));
    line("cores", machine::cores());
    gpus();
    libraries();
    for needed in requirements::lines() {
        line("needs", needed);
    }
    plan_table();
    let proof = peers();
    transports(proof.as_ref(), &args.require)
}

fn line(name: &str, value: impl Display) {
    out::line(&format_args!("{name:<12} {value}"));
}

fn found<T: Display, E: Display>(name: &str, what: Result<T, E>) {
    match what {
        Ok(what) => line(name, what),
        Err(why) => line(name, format!("none: {why}")),
    }
}

fn gpus() {
    let version = flux_cuda::driver_version().map(|v| {
        let kernel = machine::driver().unwrap_or_else(|| "of unknown version".to_owned());
        format!("{kernel}, CUDA {}", machine::cuda_version(v))
    });
    found("driver", version);
    let count = machine::gpu_count();
    for ordinal in 0..count {
        let info = flux_cuda::device_info(ordinal);
        let words = |i: &DeviceInfo| {
            let (memory, l2) = (i.memory_bytes >> 30, i.l2_bytes >> 20);
            let sharing = if i.virtual_memory && i.posix_handles {
                ""
            } else {
                ", memory cannot be shared between processes"
            };
            format!(
                "{}, sm_{}{}, {} SMs, {memory} GiB, {l2} MiB L2, {}, {}{sharing}",
                i.name, i.compute.major, i.compute.minor, i.sms, i.pci, i.uuid
            )
        };
        found(&format!("gpu {ordinal}"), info.as_ref().map(words));
        if let Ok(info) = info {
            found("kernel", KernelTarget::explain(info.compute));
        }
    }
    if count == 0 {
        let on_bus = topology::nvidia_gpus(Path::new("/"));
        if !on_bus.is_empty() {
            line(
                "on the bus",
                format!("{}: the driver shows none of them to this process", on_bus.join(", ")),
            );
        }
        if let Err(why) = flux_cuda::available()
            && let Some(advice) = why.advice()
        {
            line("try", advice);
        }
    }
    let infos = infos();
    if let Some(advice) =
        if infos.is_empty() { topology::unseen() } else { topology::instances(&infos) }
    {
        line("try", advice);
    }
    for variable in [
        "CUDA_VISIBLE_DEVICES",
        "FLUX_ARCH",
        "FLUX_TRANSPORT",
        "NCCL_P2P_DISABLE",
        "FLUX_VETO_PEER",
        "FLUX_PLAN_TABLE",
    ] {
        if let Some(value) = std::env::var_os(variable) {
            line(variable, format!("`{}`", value.display()));
        }
    }
}

/// The devices that this process sees.
fn infos() -> Vec<DeviceInfo> {
    (0..machine::gpu_count()).filter_map(|ordinal| flux_cuda::device_info(ordinal).ok()).collect()
}

/// The user's measured plans for each kind of device.
fn plan_table() {
    let mut kinds: Vec<_> =
        infos().into_iter().map(|info| (info.name, Some(info.compute))).collect();
    kinds.dedup();
    if kinds.is_empty() {
        kinds.push(("host".to_owned(), None));
    }
    for (device, compute) in &kinds {
        line("plan table", flux_ops::explain_plan_table(None, device, *compute));
    }
}

/// What the devices are to each other, by topology and by proof.
fn peers() -> Option<Proof> {
    let infos = infos();
    if infos.len() < 2 {
        return None;
    }
    let uuids: Vec<_> = infos.iter().map(|info| info.uuid).collect();
    let proof = probe::prove(&uuids, probe::vetoed());
    if let Some(report) = &proof.report {
        report.notes.iter().for_each(|note| line("topology", note));
    }
    line("peer access", proof.words());
    Some(proof)
}

fn libraries() {
    found("NVRTC", gpu::kernels::compiler());
    let cublas = gpu::cublas::available()
        .and_then(|(path, _)| Ok(format!("{}, {}", gpu::cublas::version()?, path.display())));
    found("cuBLASLt", cublas);
    let nccl = nccl::available().map_err(|e| e.to_string()).and_then(|path| {
        let v = nccl::version().map_err(|e| e.to_string())?;
        Ok(format!("{}, {}", machine::library_version(v), path.display()))
    });
    found("NCCL", nccl);
}

/// Prints each transport and what `auto` takes; whether those that are required work.
fn transports(proof: Option<&Proof>, require: &[Select]) -> bool {
    out::line(&"");
    let (nvlink, nccl) = (nvlink(proof), nccl());
    let kinds = [
        (Select::NvLink, nvlink.clone()),
        (Select::Mixed, mixed(nvlink, &nccl)),
        (Select::Pcie, pcie()),
        (Select::Nccl, nccl),
    ];
    let how = [
        "one a GPU",
        "one a GPU, and as many on each of several hosts where peer access works too; NCCL decides \
         when it connects; no CUDA graphs",
        "one a GPU, through pinned memory of the host; no CUDA graphs",
        "one a GPU, and more on other hosts; NCCL decides when it connects; no CUDA graphs",
    ];
    let auto = left_open(&kinds);
    line("auto", auto.as_ref().unwrap_or_else(|why| why));
    for ((select, found), how) in kinds.iter().zip(how) {
        match found {
            Ok(ranks) => {
                line(select.name(), format!("works: up to {ranks} ranks on this host, {how}"));
            }
            Err(why) => line(select.name(), format!("does not work: {why}")),
        }
    }
    line(
        "host",
        "works: ranks are threads of one process or processes of this machine; it computes on the \
         processors",
    );
    let missing = |required: &&Select| {
        kinds.iter().any(|(select, found)| select == *required && found.is_err())
    };
    let missing: Vec<&str> = require.iter().filter(missing).map(|select| select.name()).collect();
    if !missing.is_empty() {
        line("required", format!("NOT MET: {}", missing.join(", ")));
    }
    if require.is_empty() { auto.is_ok() } else { missing.is_empty() }
}

/// What a run takes that names no transport, or why it fails.
fn left_open(kinds: &[(Select, Result<u32, String>)]) -> Result<String, String> {
    let asked = machine::uses_gpus(Select::Auto).and_then(|_| machine::asked(Select::Auto));
    match asked.map_err(|why| format!("fails: {why:#}"))? {
        Select::Auto => auto(kinds).map_err(str::to_owned),
        select => named(select, kinds),
    }
}

/// What a run takes for which `FLUX_TRANSPORT` names the transport.
fn named(select: Select, kinds: &[(Select, Result<u32, String>)]) -> Result<String, String> {
    match kinds.iter().find(|(kind, _)| *kind == select) {
        None => Ok(format!("takes {select}, as FLUX_TRANSPORT says")),
        Some((_, Ok(ranks))) => {
            Ok(format!("takes {select} for {ranks} ranks on this host, as FLUX_TRANSPORT says"))
        }
        Some((_, Err(why))) => Err(format!(
            "fails: the {select} transport cannot be used, which FLUX_TRANSPORT names: {why}"
        )),
    }
}

/// What `auto` takes for a rank on every GPU, or why it fails.
fn auto(kinds: &[(Select, Result<u32, String>)]) -> Result<String, &'static str> {
    let works = |select: &Select| kinds.iter().any(|(kind, found)| kind == select && found.is_ok());
    let on_several = match [Select::Mixed, Select::Nccl].map(|select| works(&select)) {
        [true, _] => {
            "mixed for as many on each of several, or nccl where that does not work on all"
        }
        [_, true] => "nccl for ranks on several",
        _ => "nothing for ranks on several",
    };
    let here = kinds.iter().find(|(select, found)| *select != Select::Mixed && found.is_ok());
    match here {
        Some((select, Ok(ranks))) => {
            Ok(format!("takes {select} for {ranks} ranks on this host, and {on_several}"))
        }
        _ if machine::gpu_count() == 0 && !broken() => {
            Ok("takes host, as this process sees no GPU".to_owned())
        }
        _ => Err(
            "fails: there are GPUs, and no transport works on them; the host transport has to be \
             asked for by name",
        ),
    }
}

/// Whether there are GPUs, and a driver that does not work.
fn broken() -> bool {
    flux_cuda::available().is_err_and(|why| why.is_fault())
        && !topology::nvidia_gpus(Path::new("/")).is_empty()
}

/// GPUs of this host that could take part in `mixed`, which needs peer memory and messages.
fn mixed(nvlink: Result<u32, String>, nccl: &Result<u32, String>) -> Result<u32, String> {
    match nvlink? {
        1 => Err("one GPU has no peers on this host: ranks on several hosts take nccl".to_owned()),
        count => nccl.clone().map(|_| count),
    }
}

fn nccl() -> Result<u32, String> {
    let count = devices()?;
    let version = nccl::version().map_err(|why| why.to_string())?;
    nccl::supported(version)?;
    Ok(count)
}

/// GPUs, if the kernels run on all of them and they reach pinned memory of the host.
fn pcie() -> Result<u32, String> {
    let count = devices()?;
    for ordinal in 0..count {
        let device = flux_cuda::CudaDevice::open(ordinal).map_err(|why| why.to_string())?;
        flux_cuda::PinnedBlock::new(&device, 1 << 20)
            .map_err(|why| format!("GPU {ordinal}: no pinned memory: {why}"))?;
    }
    Ok(count)
}

/// How many devices there are, if the kernels run on all of them.
fn devices() -> Result<u32, String> {
    flux_cuda::available().map_err(|why| why.to_string())?;
    let count = flux_cuda::device_count().map_err(|why| why.to_string())?;
    for ordinal in 0..count {
        let info = flux_cuda::device_info(ordinal).map_err(|why| why.to_string())?;
        gpu::kernels::target(ordinal, info.compute).map_err(|why| why.to_string())?;
    }
    Ok(count)
}

fn nvlink(proof: Option<&Proof>) -> Result<u32, String> {
    let count = devices()?;
    if probe::forbidden() {
        return Err("NCCL_P2P_DISABLE=1 forbids peer access: unset it".to_owned());
    }
    match proof {
        Some(proof) if proof.verdict == Verdict::Fails => Err(proof.words()),
        _ => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_takes_the_first_that_works() {
        let no = || Err("no".to_owned());
        let kinds = [(Select::NvLink, no()), (Select::Pcie, Ok(4)), (Select::Nccl, Ok(4))];
        assert_eq!(
            auto(&kinds).unwrap(),
            "takes pcie for 4 ranks on this host, and nccl for ranks on several"
        );
        let kinds = [(Select::NvLink, Ok(4)), (Select::Mixed, Ok(4)), (Select::Nccl, Ok(4))];
        assert!(auto(&kinds).unwrap().starts_with(
            "takes nvlink for 4 ranks on this host, and mixed for as many on each of several"
        ));
        let kinds = [(Select::NvLink, Ok(4)), (Select::Mixed, no()), (Select::Nccl, no())];
        assert!(auto(&kinds).unwrap().ends_with("nothing for ranks on several"));
        let none = auto(&[(Select::NvLink, no())]);
        assert_eq!(
            none.is_ok_and(|takes| takes.starts_with("takes host")),
            machine::gpu_count() == 0 && !broken()
        );
    }

    #[test]
    fn a_transport_that_the_variable_names_is_taken_or_none() {
        let kinds = [(Select::NvLink, Err("no peers".to_owned())), (Select::Pcie, Ok(4))];
        assert_eq!(named(Select::Host, &kinds).unwrap(), "takes host, as FLUX_TRANSPORT says");
        assert_eq!(
            named(Select::Pcie, &kinds).unwrap(),
            "takes pcie for 4 ranks on this host, as FLUX_TRANSPORT says"
        );
        assert!(
            named(Select::NvLink, &kinds)
                .unwrap_err()
                .ends_with("cannot be used, which FLUX_TRANSPORT names: no peers")
        );
    }

    #[test]
    fn a_proof_that_peers_are_not_reached_rules_nvlink_out() {
        let proof = Proof { verdict: Verdict::Fails, how: "killed".to_owned(), report: None };
        assert!(nvlink(Some(&proof)).is_err());
    }

    #[test]
    fn mixed_needs_peers_here_and_messages() {
        let no = || Err("no".to_owned());
        assert_eq!(mixed(Ok(4), &Ok(4)), Ok(4));
        assert!(
            [mixed(no(), &Ok(4)), mixed(Ok(4), &no()), mixed(Ok(1), &Ok(1))]
                .iter()
                .all(Result::is_err)
        );
    }

    #[test]
    fn the_doctor_answers_whatever_the_machine() {
        let works = run(&Args::default());
        if machine::gpu_count() == 0 {
            let open = machine::asked(Select::Auto).is_ok_and(|asked| asked == Select::Auto);
            assert!(nvlink(None).is_err() && (works != broken() || !open));
        }
    }
}
