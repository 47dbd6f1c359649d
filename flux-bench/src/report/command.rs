//! The command line that repeats a run.
//!
//! Invariant: it is one line of a shell, and names no folder of this machine.

use std::path::Path;

/// The variable in which `flux-bench launch` tells its ranks its own [`command_line`].
pub(crate) const LAUNCHED_BY: &str = "FLUX_LAUNCHED_BY";

/// The command line that repeats this run, or the one of `flux-bench launch`, with the variables
/// that change it. Absolute paths, and all that variables name, are cut to the file's name.
pub(crate) fn command_line() -> String {
    if let Some(launcher) = std::env::var(LAUNCHED_BY).ok().filter(|launcher| !launcher.is_empty())
    {
        return launcher;
    }
    let variables = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    shown(variables, std::env::args_os().map(|word| word.to_string_lossy().into_owned()))
}

/// Variables that name a file or a folder of this machine, of which the last name alone is told.
const PLACES: [&str; 6] = [
    "FLUX_CUBIN_DIR",
    "FLUX_CUBLASLT_LIB",
    "FLUX_CUDA_LIB_DIR",
    "FLUX_NCCL_LIB",
    "FLUX_NVRTC_LIB",
    "FLUX_PLAN_TABLE",
];

/// Whether a variable changes what is measured. NVLink multicast is off unless it is asked for.
fn counts((name, value): &(String, String)) -> bool {
    const OURS: [&str; 8] = [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
        "CUDA_VISIBLE_DEVICES",
        "FLUX_ARCH",
        "FLUX_NCCL_CTAS",
        "FLUX_NODES",
        "FLUX_TRANSPORT",
        "FLUX_VETO_PEER",
    ];
    let nccl = name.starts_with("NCCL_") && !(name == "NCCL_NVLS_ENABLE" && value == "0");
    nccl || OURS.contains(&name.as_str()) || (PLACES.contains(&name.as_str()) && !value.is_empty())
}

/// A variable as it is set in a shell, with nothing of this machine's folders.
fn assigned((name, value): (String, String)) -> String {
    let file = Path::new(&value).file_name().filter(|_| PLACES.contains(&name.as_str()));
    let value = file.map_or_else(|| value.clone(), |file| file.to_string_lossy().into_owned());
    format!("{name}={value}")
}

/// The words of a [`command_line`].
fn shown(
    variables: impl Iterator<Item = (String, String)>,
    words: impl Iterator<Item = String>,
) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:@%+".contains(c);
    let mut variables: Vec<String> = variables.filter(counts).map(assigned).collect();
    variables.sort_unstable();
    let program = variables.len();
    let mut line = Vec::new();
    for (i, word) in variables.into_iter().chain(words).enumerate() {
        let (option, value) = word
            .split_once("=/")
            .map_or((None, word.as_str()), |(option, value)| (Some(option), value));
        let absolute = i == program || option.is_some() || value.starts_with('/');
        let value = if absolute { value.rsplit('/').next().unwrap_or_default() } else { value };
        let word = option.map_or_else(|| value.to_owned(), |option| format!("{option}={value}"));
        line.push(if !word.is_empty() && word.chars().all(plain) { word } else { quoted(&word) });
    }
    line.join(" ")
}

/// A word for a shell, on one line: one with control characters as bash, zsh and ksh have it.
fn quoted(word: &str) -> String {
    if !word.contains(char::is_control) {
        return format!("'{}'", word.replace('\'', r"'\''"));
    }
    let escaped = word.chars().map(|c| match c {
        '\\' | '\'' => format!("\\{c}"),
        '\n' => r"\n".to_owned(),
        '\t' => r"\t".to_owned(),
        // Those beyond ASCII by their number, as they are several bytes.
        c if c.is_ascii_control() => format!(r"\x{:02x}", u32::from(c)),
        c if c.is_control() => format!(r"\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    format!("$'{}'", escaped.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_is_quoted_with_what_counts_and_tells_no_machines_paths() {
        let words = [
            "/opt/flux-bench",
            "bench",
            "--json",
            "/data/out/x.json",
            "--json=/data/y.json",
            "results/z.json",
            "it's",
        ];
        let set = [
            ("FLUX_CUBIN_DIR", "../here/cubins/"),
            ("FLUX_NCCL_LIB", "/opt/libnccl.so.2"),
            ("FLUX_NVRTC_LIB", ""),
            ("FLUX_PLAN_TABLE", "/data/plans.csv"),
            ("FLUX_LOG", "info"),
        ];
        let set = set.into_iter().chain([
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_NVLS_ENABLE", "0"),
            ("HOME", "/x"),
            ("FLUX_NODES", "2"),
            ("FLUX_ARCH", "sm_80"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
        ]);
        let set = set.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let line = shown(set, words.map(str::to_owned).into_iter());
        assert_eq!(
            line,
            concat!(
                "CUDA_VISIBLE_DEVICES=0,1 FLUX_ARCH=sm_80 FLUX_CUBIN_DIR=cubins ",
                "FLUX_NCCL_LIB=libnccl.so.2 FLUX_NODES=2 FLUX_PLAN_TABLE=plans.csv ",
                "NCCL_P2P_DISABLE=1 flux-bench bench --json x.json --json=y.json ",
                r"results/z.json 'it'\''s'"
            )
        );
    }

    #[test]
    fn words_of_a_command_line_stay_on_its_line() {
        let words = ["flux-bench", "sh", "-c", "export X=1\nexec it's \\t\t\u{1b}\u{85}é"];
        let line = shown(std::iter::empty(), words.map(str::to_owned).into_iter());
        assert_eq!(line, r"flux-bench sh -c $'export X=1\nexec it\'s \\t\t\x1b\u0085é'");
    }
}
