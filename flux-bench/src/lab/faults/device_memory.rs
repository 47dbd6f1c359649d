//! Whether a process leaks memory of its GPU, by what is in use after each rebuild.
//!
//! Invariant: growth with rebuilds is found, and what a driver keeps is not. The figure is the
//! whole device's and varies with what NCCL still holds, so all of the last must lie above all of
//! the first.

/// Measurements that only say what is normal: after the first calls, before anything was rebuilt.
const FIRST: usize = 1;
/// Later measurements whose highest is the base; rebuilds with and without survivors alternate.
const BASE: usize = 2;
/// The last ones, whose lowest counts.
const LAST: usize = 3;
/// What a driver may keep: pools grow by 32 MiB, and one for ops and one for operands may begin.
/// After n measurements a leak of 64 MiB / (n - 5) a rebuild is found.
const SLACK: u64 = 64 << 20;

/// One process's measurements.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceMemory {
    used: Vec<u64>,
    reported: bool,
}

impl DeviceMemory {
    /// Takes how many bytes are in use after a rebuild: a text once it has shown itself to leak.
    pub(super) fn check(&mut self, used: u64) -> Option<String> {
        self.used.push(used);
        let later = self.used.get(FIRST..)?;
        let highest = later.get(..BASE)?.iter().max()?;
        let lowest = later.get(BASE..)?.last_chunk::<LAST>()?.iter().min()?;
        if self.reported || *lowest <= highest + SLACK {
            return None;
        }
        self.reported = true;
        let (rebuilds, mib) = (self.used.len() - FIRST, |bytes: &u64| bytes >> 20);
        Some(format!(
            "device memory: {} MiB in use after the first rebuilds, {} at least after the last \
             {LAST} of {rebuilds}",
            mib(highest),
            mib(lowest)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NEVER: [usize; 0] = [];

    /// After which measurement it reports, where so many MiB are in use after each.
    fn reported(used: impl IntoIterator<Item = u64>) -> Vec<usize> {
        let mut memory = DeviceMemory::default();
        used.into_iter()
            .enumerate()
            .filter_map(|(at, mib)| memory.check(mib * MIB).map(|_| at + 1))
            .collect()
    }

    #[test]
    fn what_is_left_at_each_rebuild_is_found_once() {
        assert_eq!(reported((0..30).map(|at| 1000 + 14 * at)), [10], "a group's workspace");
        assert_eq!(
            reported((0..30).map(|at| 1000 + 3 * at)),
            [27],
            "the least that 27 measurements find"
        );
        assert_eq!(
            reported((0..6).map(|at| 1000 + 65 * at)),
            [6],
            "as soon as there is a base and what lies above it"
        );
        assert_eq!(
            reported((0..30).map(|at| 1000 + 14 * (at / 2))).len(),
            1,
            "at each second rebuild"
        );
    }

    #[test]
    fn a_leak_is_found_below_what_comes_and_goes() {
        assert_eq!(
            reported((0..60).map(|at| 1000 + 14 * at + [0, 300, 150][at as usize % 3])).len(),
            1
        );
    }

    #[test]
    fn what_is_taken_once_or_comes_and_goes_is_no_leak() {
        assert_eq!(reported([1000; 30]), NEVER);
        assert_eq!(
            reported((0..30).map(|at| if at == 0 { 500 } else { 1000 })),
            NEVER,
            "at the first rebuild"
        );
        assert_eq!(
            reported((0..30).map(|at| if at < 15 { 1000 } else { 1064 })),
            NEVER,
            "a block or two more, for good"
        );
        assert_eq!(
            reported((0..60).map(|at| 1000 + 400 * (at % 2))),
            NEVER,
            "a communicator that is not gone yet, in turns"
        );
        assert_eq!(
            reported((0..60).map(|at| 1000 + if at > 20 && at % 3 != 0 { 900 } else { 0 })),
            NEVER,
            "and where it is gone again each third time"
        );
        assert_eq!(reported((0..30).map(|at| 2000 - 20 * at)), NEVER);
    }

    #[test]
    fn the_text_says_how_much() {
        let mut memory = DeviceMemory::default();
        let text =
            [500, 1000, 990, 1100, 1200, 1300].into_iter().find_map(|mib| memory.check(mib * MIB));
        assert_eq!(
            text.as_deref(),
            Some(
                "device memory: 1000 MiB in use after the first rebuilds, 1100 at least after the \
                 last 3 of 5"
            )
        );
    }
}
