//! `flux-bench lab soak` on the host.

use crate::program::{flux_bench, text};
use flux_core::OpKind;
use flux_ops::Activation;

/// Cases of the soak in the least shape: each op in two types, plain and with a bias and each
/// activation. Then two kinds of gates, or of sums a residual, without norm and with it, and in one
/// type fp32 partial sums.
pub(crate) fn least_cases() -> usize {
    OpKind::ALL
        .map(|op| 2 * (1 + Activation::of(op).len() + 2) + usize::from(op.reduces()))
        .iter()
        .sum()
}

#[test]
fn the_soak_passes_on_the_host() {
    let done = flux_bench(&[
        "lab",
        "soak",
        "--transport",
        "host",
        "--tp",
        "3",
        "--quick",
        "--only",
        "least",
    ]);
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(
        text(&done).lines().filter(|l| l.starts_with("passed  least")).count(),
        least_cases(),
        "{}",
        text(&done)
    );
}

#[test]
fn processes_share_host_memory_as_threads_do() {
    for ranks in ["2", "3", "8"] {
        let done = flux_bench(&[
            "lab",
            "soak",
            "--transport",
            "host",
            "--tp",
            ranks,
            "--quick",
            "--processes",
            "--only",
            "least",
        ]);
        assert!(done.status.success(), "{}", text(&done));
        assert!(
            text(&done).contains(&format!("{ranks} ranks are processes of this machine")),
            "{}",
            text(&done)
        );
        assert_eq!(
            text(&done).lines().filter(|l| l.starts_with("passed  least")).count(),
            least_cases(),
            "{}",
            text(&done)
        );
    }
}

#[test]
fn a_random_soak_says_its_seed_and_one_of_its_cases_can_be_run_again() {
    let words = ["lab", "soak", "--transport", "host", "--tp", "3"];
    let done = flux_bench(&[words.as_slice(), &["--random", "0.04", "--seed", "11"]].concat());
    assert!(done.status.success(), "{}", text(&done));
    assert!(text(&done).contains("random cases of seed 11: "), "{}", text(&done));
    let again = flux_bench(&[words.as_slice(), &["--case", "1", "--seed", "11"]].concat());
    assert!(
        again.status.success() && text(&again).contains("passed  case 1, "),
        "{}",
        text(&again)
    );
    assert_eq!(
        flux_bench(&[words.as_slice(), &["--case", "1"]].concat()).status.code(),
        Some(2),
        "a case is of a seed"
    );
}

#[test]
fn a_soak_of_nothing_is_a_failure() {
    let done =
        flux_bench(&["lab", "soak", "--transport", "host", "--tp", "2", "--only", "no such case"]);
    assert_eq!(done.status.code(), Some(1), "{}", text(&done));
}
