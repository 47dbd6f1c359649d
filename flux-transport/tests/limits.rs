//! The time limits of tests: how they grow on a late machine, and that they fail all the same.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]
#![allow(clippy::float_cmp, reason = "small whole numbers and what is passed on as it is")]

mod lateness;

use lateness::{VARIABLE, assert_soon, of_process, scaled, soon, worst};
use std::process::Command;
use std::time::Duration;

const TIME: Duration = Duration::from_millis(100);

#[test]
fn the_latest_core_says_how_late_the_machine_is_and_ticks_do_not_count() {
    let late = |measured: &[f64]| worst(measured.iter().copied());
    assert_eq!(late(&[]), 1.0);
    assert_eq!(late(&[0.5, 1.2]), 1.0);
    assert_eq!(late(&[1.0, 6.5, 1.3]), 6.5);
}

/// The entry of the processes that the next test starts.
#[test]
#[ignore = "run by the test that starts it, in a process of its own"]
fn on_a_machine_seven_times_late() {
    assert_eq!(of_process(), 7.0);
    assert_eq!(scaled(TIME), 7 * TIME);
    assert_soon(6 * TIME, TIME);
}

#[test]
fn a_deadline_grows_with_the_lateness_that_a_process_is_told() {
    let run = |late: &str| {
        let words = ["--ignored", "--exact", "on_a_machine_seven_times_late"];
        Command::new(std::env::current_exe().unwrap())
            .args(words)
            .env(VARIABLE, late)
            .output()
            .unwrap()
    };
    let (seven, one) = (run("7"), run("1"));
    assert!(
        seven.status.success() && String::from_utf8_lossy(&seven.stdout).contains("1 passed"),
        "{seven:?}"
    );
    assert!(!one.status.success(), "{one:?}");
}

#[test]
fn a_deadline_is_never_shorter_than_asked_for_and_stays_the_same() {
    let first = scaled(TIME);
    assert!(first >= TIME);
    assert_eq!(scaled(TIME), first);
}

#[test]
fn something_is_soon_within_its_limit_or_its_limit_on_a_late_machine() {
    let measures = || -> f64 { unreachable!("no machine is late for what was in time") };
    assert_eq!(soon(TIME / 2, TIME, measures), Ok(()));
    assert_eq!(soon(3 * TIME, TIME, || 4.0), Ok(()));
    for late in [1.0, 3.0] {
        let refused = soon(3 * TIME, TIME, || late).unwrap_err();
        assert!(
            refused.contains("300ms") && refused.contains(&format!("{late:.1} times late")),
            "{refused}"
        );
    }
}

/// However late the machine is.
#[test]
#[should_panic(expected = "times late")]
fn what_takes_an_hour_is_not_soon() {
    assert_soon(Duration::from_hours(1), Duration::from_millis(1));
}
