//! Compiles kernels, without a GPU. Fails where one spills, uses local memory or has
//! serialized wgmma instructions.
//!
//! Without an NVRTC on the machine, its wheel is fetched once into `nvrtc/` of the target folder.

use crate::cargo::{build, check, commit, remove, root, target_folder};
use anyhow::{Context, ensure};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The version for the GPU hosts' driver.
const VERSION: &str = "13.0";
/// The library inside the unpacked wheel.
const LIBRARY: &str = "nvidia/cu13/lib/libnvrtc.so.13";
/// Exit status of `flux-kernels` without an NVRTC.
const NO_NVRTC: i32 = 3;

/// Which kernels.
#[derive(Clone, Copy)]
pub(crate) enum Selection {
    Every,
    /// Those that most ops take.
    Shipped,
    /// The fewest that check the sources.
    Cover,
}

impl Selection {
    /// The options that name them, of these those with all of `only` in their names, and `archs`.
    fn options<'a>(self, archs: &[&'a str], only: &[&'a str]) -> Vec<&'a str> {
        let option = match self {
            Self::Every => None,
            Self::Shipped => Some("--shipped"),
            Self::Cover => Some("--cover"),
        };
        option
            .into_iter()
            .chain(only.iter().flat_map(|text| ["--only", text]))
            .chain(archs.iter().flat_map(|arch| ["--arch", arch]))
            .collect()
    }
}

/// Compiles kernels for `archs` into `out`, by default `cubins/` of the target folder, and prints
/// their resources.
pub(crate) fn compile(
    out: Option<&Path>,
    archs: &[&str],
    selection: Selection,
    only: &[&str],
) -> anyhow::Result<()> {
    let target = target_folder()?;
    let out = out.map_or_else(|| target.join("cubins"), Path::to_path_buf);
    let mut words: Vec<&OsStr> = vec!["compile".as_ref(), "--out".as_ref(), out.as_ref()];
    words.extend(selection.options(archs, only).into_iter().map(OsStr::new));
    with_nvrtc(&target, &words)
}

/// Compares the table of kernel images with the sources, or rewrites it.
pub(crate) fn images(record: bool) -> anyhow::Result<()> {
    let (target, table, seed) =
        (target_folder()?, root().join("flux-kernels/images.csv"), commit());
    let out = target.join("cubins");
    let mut words: Vec<&OsStr> =
        vec!["images".as_ref(), table.as_ref(), "--out".as_ref(), out.as_ref()];
    // Every commit takes another sample.
    let options: &[&str] = if record { &["--record"] } else { &["--sample", &seed] };
    words.extend(options.iter().map(OsStr::new));
    with_nvrtc(&target, &words)
}

/// Prints the kernels' names, and compiles none.
pub(crate) fn list(archs: &[&str], selection: Selection) -> anyhow::Result<()> {
    let options = selection.options(archs, &[]);
    let mut list = Command::new(program()?);
    list.arg("list").args(options);
    check(list)
}

/// Provides an NVRTC where tests look for one.
pub(crate) fn provide_nvrtc() -> anyhow::Result<()> {
    with_nvrtc(&target_folder()?, &["nvrtc".as_ref()])
}

/// Runs `flux-kernels` with the fetched NVRTC or the machine's; without either, fetches one.
fn with_nvrtc(target: &Path, words: &[&OsStr]) -> anyhow::Result<()> {
    let program = program()?;
    let compiler = |fetched: Option<&Path>| {
        let mut run = Command::new(&program);
        run.args(words);
        if let Some(fetched) = fetched {
            run.env("FLUX_NVRTC_LIB", fetched.join(LIBRARY));
        }
        run
    };
    let fetched = target.join("nvrtc");
    let named = std::env::var_os("FLUX_NVRTC_LIB").is_some_and(|value| !value.is_empty());
    if !named && is_fetched(&fetched) {
        return check(compiler(Some(&fetched)));
    }
    // A missing NVRTC is no error yet, so its message is kept back.
    let mut first = compiler(None);
    let done = first
        .stdout(Stdio::inherit())
        .stderr(Stdio::piped())
        .output()
        .context("cannot start flux-kernels")?;
    if done.status.code() == Some(NO_NVRTC) && !named {
        fetch(&fetched)?;
        return check(compiler(Some(&fetched)));
    }
    eprint!("{}", String::from_utf8_lossy(&done.stderr));
    ensure!(done.status.success(), "flux-kernels failed: {}", done.status);
    Ok(())
}

/// Builds `flux-kernels`, and returns its path.
fn program() -> anyhow::Result<PathBuf> {
    let built = build("dev", &["--bin", "flux-kernels"])?;
    built.into_iter().next().map(|artifact| artifact.path).context("cargo built no flux-kernels")
}

/// Whether the wheel of this version is unpacked in `folder`: its `dist-info` names the version.
fn is_fetched(folder: &Path) -> bool {
    let of_version = format!("nvidia_cuda_nvrtc-{VERSION}.");
    let mut entries = fs::read_dir(folder).into_iter().flatten().flatten();
    folder.join(LIBRARY).is_file()
        && entries.any(|entry| entry.file_name().to_string_lossy().starts_with(&of_version))
}

/// Fetches the wheel, of 90 MB, and unpacks it into `folder`, which is whole once it has its name.
fn fetch(folder: &Path) -> anyhow::Result<()> {
    let parent = folder.parent().context("the target folder has no parent")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    // One fetch at a time: what is in the scratch folder is then a killed one's.
    let lock = fs::File::create(folder.with_extension("lock"))
        .with_context(|| format!("cannot write to {}", parent.display()))?;
    lock.lock().context("another fetch of NVRTC cannot be waited for")?;
    if is_fetched(folder) {
        return Ok(());
    }
    let wheel = format!("nvidia-cuda-nvrtc=={VERSION}.*");
    let scratch = folder.with_extension("partial");
    remove(&scratch)?;
    let (wheels, unpacked) = (scratch.join("wheels"), scratch.join("nvrtc"));
    println!("no NVRTC here: fetching {wheel} (90 MB) into {}", folder.display());

    let mut download = python();
    download
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(&wheels)
        .arg(wheel);
    check(download)
        .context("the wheel cannot be fetched: name an NVRTC of this machine in FLUX_NVRTC_LIB")?;

    let wheel = fs::read_dir(&wheels)?.next().context("pip has downloaded nothing")??.path();
    let mut unpack = python();
    unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&unpacked);
    check(unpack)?;
    ensure!(unpacked.join(LIBRARY).is_file(), "{} holds no {LIBRARY}", wheel.display());

    remove(folder)?;
    fs::rename(&unpacked, folder)
        .with_context(|| format!("cannot move the wheel's files to {}", folder.display()))?;
    remove(&scratch)
}

fn python() -> Command {
    Command::new("python3")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wheel_of_another_version_is_fetched_anew() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let library = folder.join(LIBRARY);
        fs::create_dir_all(library.parent().unwrap()).unwrap();
        fs::write(library, "").unwrap();
        fs::create_dir(folder.join("nvidia_cuda_nvrtc-12.9.86.dist-info")).unwrap();
        assert!(!is_fetched(folder));
        fs::create_dir(folder.join(format!("nvidia_cuda_nvrtc-{VERSION}.88.dist-info"))).unwrap();
        assert!(is_fetched(folder));
        fs::remove_dir_all(folder.join("nvidia")).unwrap();
        assert!(!is_fetched(folder));
    }
}
