//! Bars that show how far a command has come.
//!
//! Invariant: no time left is shown before a step has been done, as nothing is known of it.

use indicatif::{HumanDuration, ProgressBar, ProgressState, ProgressStyle};
use std::fmt;
use std::time::Duration;

/// A bar of so many steps; `shown` on one rank alone.
pub(crate) fn bar(steps: u64, step: &str, shown: bool) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps);
    let style = ProgressStyle::with_template(&format!(
        "{{bar:30}} {{pos:>4}}/{{len}} {step}{{left}}  {{msg}}"
    ));
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.with_key("left", |state: &ProgressState, to: &mut dyn fmt::Write| {
        // The bar is drawn again within a second.
        let _ = to.write_str(&left(state.pos(), state.eta()));
    }));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

fn left(done: u64, expected: Duration) -> String {
    if done == 0 { String::new() } else { format!(", {} left", HumanDuration(expected)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_of_the_time_left_before_a_step_is_done() {
        assert_eq!(left(0, Duration::ZERO), "");
        assert_eq!(left(1, Duration::from_mins(3)), ", 3 minutes left");
    }
}
