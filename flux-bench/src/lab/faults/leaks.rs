//! Whether a process leaks handles, by kind, from what it holds after each rebuild.
//!
//! Invariant: a kind leaks when its count has risen above its maximum twice after the first
//! rebuild, and something of an earlier group is left. Things opened once, or on first use, do not
//! count.

use super::usage::Usage;
use std::collections::BTreeMap;

/// Measurements that only say what is normal: after the first calls, and after the first rebuild.
const FIRST: u32 = 2;
/// How often a kind has risen when it leaks.
const RISES: u32 = 2;

/// One process's measurements.
#[derive(Clone, Debug, Default)]
pub(super) struct LeakDetector {
    measured: u32,
    base: Usage,
    before: Usage,
    kinds: BTreeMap<String, Kind>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Kind {
    first: usize,
    highest: usize,
    rises: u32,
    reported: bool,
}

impl LeakDetector {
    /// Records what the process holds after a rebuild, and returns a text for each new leak.
    pub(super) fn check(&mut self, usage: Usage) -> Vec<String> {
        self.measured += 1;
        let normal = self.measured <= FIRST;
        let mut leaks = Vec::new();
        for (name, count) in usage.counts() {
            let kind = self.kinds.entry(name.to_owned()).or_default();
            if count <= kind.highest {
                continue;
            }
            kind.highest = count;
            if normal {
                kind.first = count;
                continue;
            }
            kind.rises += 1;
            // Neither there at first nor new with this rebuild: left of an earlier one.
            let new = usage.new_since(&self.base, name);
            let fresh = usage.new_since(&self.before, name);
            let (fresh, left): (Vec<&str>, Vec<&str>) =
                new.into_iter().partition(|words| fresh.contains(words));
            if kind.rises >= RISES && !left.is_empty() && !kind.reported {
                kind.reported = true;
                let (first, after) = (kind.first, self.measured - FIRST);
                let (left, fresh) = (left.join(", "), fresh.join(", "));
                leaks.push(format!(
                    "{name}: {first} after the first rebuild, {count} after {after} more; left of \
                     an earlier one: {left}; new: {fresh}"
                ));
            }
        }
        if normal {
            self.base = usage.clone();
        }
        self.before = usage;
        leaks
    }
}

#[cfg(test)]
mod tests {
    use super::super::usage::Held;
    use super::*;

    /// A process with so many pipes after each measurement, and one socket that is always new.
    fn leaks(pipes: &[usize]) -> Vec<(usize, String)> {
        let mut leaks = LeakDetector::default();
        let mut found = Vec::new();
        for (at, &pipes) in pipes.iter().enumerate() {
            let held = (0..pipes).map(|fd| Held {
                kind: "descriptor of pipe".into(),
                words: format!("{fd} of pipe:[{fd}]"),
            });
            let socket =
                Held { kind: "descriptor of socket".into(), words: format!("99 of socket {at}") };
            found.extend(
                leaks.check(held.chain([socket]).collect()).into_iter().map(|text| (at, text)),
            );
        }
        found
    }

    #[test]
    fn one_descriptor_a_rebuild_is_a_leak_and_is_named() {
        let found = leaks(&[4, 5, 6, 7, 8, 9]);
        let text = "descriptor of pipe: 5 after the first rebuild, 7 after 2 more; left of an \
                    earlier one: 5 of pipe:[5]; new: 6 of pipe:[6]";
        assert_eq!(found, [(3, text.to_owned())]);
    }

    #[test]
    fn a_leak_of_every_second_rebuild_is_found_too() {
        assert_eq!(leaks(&[4, 4, 5, 5, 6, 6]).len(), 1);
        assert_eq!(leaks(&[0, 0, 1, 1, 2]).len(), 1, "of a kind that was not there at first");
    }

    #[test]
    fn a_group_that_holds_more_than_the_one_before_is_no_leak() {
        let mut leaks = LeakDetector::default();
        for (at, sockets) in [1, 1, 2, 3, 1, 4].into_iter().enumerate() {
            let held = |n| Held {
                kind: "descriptor of socket".into(),
                words: format!("{n} of socket {at}{n}"),
            };
            assert_eq!(leaks.check((0..sockets).map(held).collect()), [""; 0]);
        }
    }

    #[test]
    fn what_is_opened_once_or_comes_and_goes_is_no_leak() {
        for pipes in [
            [4, 4, 4, 4, 4, 4, 4],
            [4, 9, 9, 9, 9, 9, 9],
            [4, 4, 4, 5, 5, 5, 5],
            [4, 6, 5, 6, 4, 6, 5],
            [4, 4, 7, 4, 7, 4, 7],
        ] {
            assert_eq!(leaks(&pipes), [], "{pipes:?}");
        }
    }
}
