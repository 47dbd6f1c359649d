//! Advice for people whose ranks do not share memory.
//!
//! Invariant: nothing is decided by it. Advice is given only where its reason was seen.

use crate::topology::probe::line;

/// The boot id of the running kernel; empty if unknown. Containers of one machine share it.
pub(crate) fn boot() -> String {
    line(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

/// The variable that says which devices CUDA shows a process, and in which order.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// This process's `CUDA_VISIBLE_DEVICES`, as far as it is worth showing; empty where it is not set.
pub(crate) fn visible() -> String {
    shown(&std::env::var_os(VISIBLE).unwrap_or_default().to_string_lossy())
}

/// Text of an environment for an error: one line of bounded length. Idempotent.
pub(crate) fn shown(text: &str) -> String {
    // Sixteen devices by name, and some.
    const SHOWN: usize = 1024;
    // A cut may leave a space at the end.
    line(&line(text).chars().take(SHOWN).collect::<String>())
}

/// Advice for two ranks on one device with these values of `CUDA_VISIBLE_DEVICES`.
pub(crate) fn own_device(visible: [&str; 2]) -> String {
    let [one, other] = visible
        .map(|list| if list.is_empty() { "not set".to_owned() } else { format!("`{list}`") });
    let both = if one == other { format!("{one} for both") } else { format!("{one} and {other}") };
    format!("give each rank a device of its own ({VISIBLE} is {both})")
}

/// Advice for ranks that count as on different hosts though they run on one kernel; else empty.
pub(crate) fn one_machine(boots: [&str; 2]) -> &'static str {
    match boots {
        [one, other] if !one.is_empty() && one == other => {
            ": they are containers or users of one machine; to count as one host they need the \
             same user and run-time directory (XDG_RUNTIME_DIR, or /tmp) and FLUX_HOST_ID"
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
        "of a GPU in MIG mode ({gpus}) a process is shown one instance at most: have {VISIBLE} \
         name it (MIG-..., in nvidia-smi -L), or {MIG_OFF}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_on_one_device_are_shown_what_each_was_shown() {
        assert_eq!(
            own_device(["0", ""]),
            "give each rank a device of its own (CUDA_VISIBLE_DEVICES is `0` and not set)"
        );
        assert_eq!(
            own_device(["", ""]),
            "give each rank a device of its own (CUDA_VISIBLE_DEVICES is not set for both)"
        );
    }

    #[test]
    fn whoever_has_mig_on_hears_how_it_is_switched_off() {
        for words in [instances("GPU 0000:17:00.0"), unseen("0000:17:00.0")] {
            assert!(
                words.contains("0000:17:00.0") && words.ends_with("nvidia-smi -mig 0, as root)"),
                "{words}"
            );
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
        assert_eq!(
            [one_machine(["b", "c"]), one_machine(["", ""]), one_machine(["b", ""])],
            [""; 3]
        );
    }
}
