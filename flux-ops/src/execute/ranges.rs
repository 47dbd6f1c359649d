//! Values that have ranges of one memory, whose least recently used ones make room for new ones.
//!
//! Invariant: ranges do not overlap and end within the memory. A pinned value is never evicted.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::ops::Range;

/// Alignment of ranges: a line of a GPU's L2 cache, twice.
const ALIGN: u64 = 256;

/// Values by key, with their ranges.
#[derive(Debug)]
pub(crate) struct Ranges<K, V> {
    limit: u64,
    entries: HashMap<K, Entry<V>>,
    /// Ends by start.
    taken: BTreeMap<u64, u64>,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    range: Range<u64>,
    used: u64,
    pinned: bool,
}

/// There is no range of this size, whatever is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom {
    /// Bytes asked for.
    pub(crate) bytes: u64,
    /// Bytes of the memory.
    pub(crate) limit: u64,
    /// Bytes of pinned values.
    pub(crate) pinned: u64,
}

impl<K: Copy + Eq + Hash, V> Ranges<K, V> {
    /// Nothing yet, in a memory of `limit` bytes.
    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, entries: HashMap::new(), taken: BTreeMap::new(), clock: 0 }
    }

    /// Bytes of the memory.
    pub(crate) const fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether there is a value.
    pub(crate) fn contains(&self, key: &K) -> bool {
        self.entries.contains_key(key)
    }

    /// The value, which is the most recently used one from then on, and with `pin` stays for good.
    pub(crate) fn take(&mut self, key: &K, pin: bool) -> Option<&V> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.clock;
        entry.pinned |= pin;
        Some(&entry.value)
    }

    /// The start of a free range of `bytes`, after evicting as many values as need be; `evicted`
    /// hears of each.
    pub(crate) fn find(
        &mut self,
        bytes: u64,
        mut evicted: impl FnMut(Range<u64>, V),
    ) -> Result<u64, NoRoom> {
        let pinned = || {
            self.entries
                .values()
                .filter(|entry| entry.pinned)
                .map(|entry| entry.range.end - entry.range.start)
                .sum()
        };
        let no_room = NoRoom { bytes, limit: self.limit, pinned: pinned() };
        if bytes > self.limit - no_room.pinned {
            return Err(no_room);
        }
        loop {
            if let Some(start) = self.gap(bytes) {
                return Ok(start);
            }
            let unpinned = self.entries.iter().filter(|(_, entry)| !entry.pinned);
            let Some(&oldest) = unpinned.min_by_key(|(_, entry)| entry.used).map(|(key, _)| key)
            else {
                return Err(no_room);
            };
            if let Some(Entry { range, value, .. }) = self.entries.remove(&oldest) {
                self.taken.remove(&range.start);
                evicted(range, value);
            }
        }
    }

    /// Gives a value a range that [`find`](Self::find) has found free.
    pub(crate) fn insert(&mut self, key: K, start: u64, bytes: u64, value: V, pin: bool) {
        let range = start..start + bytes.max(1);
        self.clock += 1;
        self.taken.insert(range.start, range.end);
        self.entries.insert(key, Entry { value, range, used: self.clock, pinned: pin });
    }

    /// Bytes in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.taken.iter().map(|(start, end)| end - start).sum()
    }

    /// The first gap that is large enough.
    fn gap(&self, bytes: u64) -> Option<u64> {
        let mut free = 0_u64;
        for (&start, &end) in &self.taken {
            if free + bytes.max(1) <= start {
                return Some(free);
            }
            free = end.next_multiple_of(ALIGN);
        }
        (free + bytes.max(1) <= self.limit).then_some(free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn put(
        ranges: &mut Ranges<u32, u32>,
        key: u32,
        bytes: u64,
        pin: bool,
    ) -> Result<Vec<u32>, NoRoom> {
        let mut evicted = Vec::new();
        let start = ranges.find(bytes, |_, value| evicted.push(value))?;
        ranges.insert(key, start, bytes, key, pin);
        Ok(evicted)
    }

    #[test]
    fn the_least_recently_used_value_makes_room() {
        let mut ranges = Ranges::new(1024);
        for key in 0..4 {
            assert_eq!(put(&mut ranges, key, 256, false), Ok(vec![]));
        }
        assert_eq!(ranges.take(&0, false), Some(&0));
        assert_eq!(
            put(&mut ranges, 4, 200, false),
            Ok(vec![1]),
            "not the first, which was used again"
        );
        assert!(!ranges.contains(&1) && ranges.contains(&0));
        // Two neighbours have to go for twice the size; the one that was used last stays.
        assert_eq!(put(&mut ranges, 5, 512, false), Ok(vec![2, 3]));
        assert_eq!(ranges.bytes(), 256 + 200 + 512);
    }

    #[test]
    fn pinned_values_stay_and_what_does_not_fit_beside_them_is_refused() {
        let mut ranges = Ranges::new(1024);
        put(&mut ranges, 0, 256, true).unwrap();
        put(&mut ranges, 1, 256, false).unwrap();
        assert_eq!(ranges.take(&1, true), Some(&1), "a later use pins it");
        put(&mut ranges, 2, 512, false).unwrap();
        assert_eq!(put(&mut ranges, 3, 512, false), Ok(vec![2]));
        let refused = put(&mut ranges, 4, 513, false);
        assert_eq!(refused, Err(NoRoom { bytes: 513, limit: 1024, pinned: 512 }));
        assert!(ranges.contains(&3), "nothing is evicted in vain");
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_stay_within_the_memory(
            steps in prop::collection::vec((0_u32..30, 1_u64..1500, prop::bool::weighted(0.1), any::<bool>()), 1..200),
        ) {
            let (mut ranges, mut pinned) = (Ranges::new(4096), Vec::new());
            for (key, bytes, pin, again) in steps {
                if again && ranges.take(&key, pin).is_some() {
                    if pin {
                        pinned.push(key);
                    }
                } else if !ranges.contains(&key) {
                    let placed = put(&mut ranges, key, bytes, pin);
                    if pin && placed.is_ok() {
                        pinned.push(key);
                    }
                    prop_assert!(
                        pinned.iter().all(|key| ranges.contains(key)),
                        "a pinned value is gone"
                    );
                }
                let mut end = 0;
                for (&start, &next) in &ranges.taken {
                    prop_assert!(end <= start && start % ALIGN == 0 && next <= 4096);
                    end = next;
                }
                prop_assert_eq!(ranges.taken.len(), ranges.entries.len());
            }
        }
    }
}
