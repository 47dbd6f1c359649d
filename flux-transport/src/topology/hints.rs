//! What helps a person whose ranks do not share memory as they meant them to: the same words
//! whoever finds it out.
//!
//! Invariant: nothing is decided by it, and nothing is guessed: a hint is given where what it rests
//! on was seen.

use crate::topology::probe::line;

/// The boot of the kernel that this process runs on; empty where that is not known. Containers of
/// one machine have the same.
pub(crate) fn boot() -> String {
    line(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

/// The variable that says which devices CUDA shows a process, and in which order.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// This process's `CUDA_VISIBLE_DEVICES`, as far as it is worth showing; empty where it is not set.
pub(crate) fn visible() -> String {
    shown(&std::env::var_os(VISIBLE).unwrap_or_default().to_string_lossy())
}

/// Text of an environment as an error can show it: on one line, and not without end. What is shown
/// so is shown so again.
pub(crate) fn shown(text: &str) -> String {
    // Sixteen devices by name, and some.
    const SHOWN: usize = 1024;
    // A cut may leave a space at the end.
    line(&line(text).chars().take(SHOWN).collect::<String>())
}

/// What two ranks on one device need, whose `CUDA_VISIBLE_DEVICES` are these: ranks that see one
/// device each may have been shown the same.
pub(crate) fn own_device(visible: [&str; 2]) -> String {
    let [one, other] = visible.map(|list| if list.is_empty() { "not set".to_owned() } else { format!("`{list}`") });
    let both = if one == other { format!("{one} for both") } else { format!("{one} and {other}") };
    format!("give each rank a device of its own ({VISIBLE} is {both})")
}

/// What ranks need that count as ranks of different hosts though they run on this one kernel;
/// nothing where they do not.
pub(crate) fn one_machine(boots: [&str; 2]) -> &'static str {
    match boots {
        [one, other] if !one.is_empty() && one == other => {
            ": they are containers or users of one machine; to count as one host they need the same user and run-time directory (XDG_RUNTIME_DIR, or /tmp) and FLUX_HOST_ID"
        }
        _ => "",
    }
}

/// What has a GPU reach others again.
const MIG_OFF: &str = "switch MIG off (nvidia-smi -mig 0, as root)";

/// What those need that are on MIG instances, ranks or GPUs.
pub(crate) fn instances(whose: &str) -> String {
    format!("MIG instances do not reach each other's memory ({whose}): {MIG_OFF}")
}

/// What a process needs that sees too few devices, where these GPUs are in MIG mode.
pub(crate) fn unseen(gpus: &str) -> String {
    format!(
        "of a GPU in MIG mode ({gpus}) a process is shown one instance at most: have {VISIBLE} name it (MIG-..., in nvidia-smi -L), or {MIG_OFF}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_on_one_device_are_shown_what_each_was_shown() {
        assert_eq!(own_device(["0", ""]), "give each rank a device of its own (CUDA_VISIBLE_DEVICES is `0` and not set)");
        assert_eq!(own_device(["", ""]), "give each rank a device of its own (CUDA_VISIBLE_DEVICES is not set for both)");
    }

    #[test]
    fn whoever_has_mig_on_hears_how_it_is_switched_off() {
        for words in [instances("GPU 0000:17:00.0"), unseen("0000:17:00.0")] {
            assert!(words.contains("0000:17:00.0") && words.ends_with("nvidia-smi -mig 0, as root)"), "{words}");
        }
    }

    #[test]
    fn text_is_shown_on_one_line_of_some_length() {
        assert_eq!(shown(" 0,\n1 "), "0, 1");
        let long = "0 ".repeat(1000);
        assert_eq!((shown(&long).len(), shown(&shown(&long))), (1023, shown(&long)));
    }

    #[test]
    fn one_machine_is_told_only_by_what_is_known() {
        assert!(one_machine(["b", "b"]).contains("FLUX_HOST_ID"));
        assert_eq!([one_machine(["b", "c"]), one_machine(["", ""]), one_machine(["b", ""])], [""; 3]);
    }
}
