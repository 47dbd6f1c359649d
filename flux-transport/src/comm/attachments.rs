//! What the layers above keep with a communicator, and how much memory it holds in all.
//!
//! Invariant: an attachment lives as long as its communicator, and is dropped when no call uses it.

use crate::HeldBytes;
use crate::sync::locked;
use flux_cuda::keep;
use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex};

/// What one rank's communicator holds, by purpose;
/// [`Communicator::memory`](crate::Communicator::memory) makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommunicatorMemory {
    /// The workspace that ranks share.
    pub workspace: HeldBytes,
    /// What ops hold besides, by name: the same for any number of ops.
    pub ops: BTreeMap<&'static str, HeldBytes>,
}

impl CommunicatorMemory {
    /// What is held besides the workspace.
    pub fn besides_workspace(&self) -> HeldBytes {
        self.ops.values().fold(HeldBytes::default(), |sum, &held| sum.plus(held))
    }
}

impl fmt::Display for CommunicatorMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "workspace: {}", self.workspace)?;
        self.ops.iter().try_for_each(|(name, held)| write!(f, "\n{name}: {held}"))
    }
}

/// The values by type, and what they hold by name.
#[derive(Default)]
pub(super) struct Attachments {
    values: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
    held: Mutex<BTreeMap<&'static str, HeldBytes>>,
}

impl Attachments {
    /// Leaves the values as they are for ever: calls that did not end may use them.
    pub(super) fn abandon(&self) {
        locked(&self.values).values().for_each(keep);
    }

    /// The value of type `T`, as the first caller has made it.
    pub(super) fn get_or_make<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let mut values = locked(&self.values);
        if let Some(Ok(known)) =
            values.get(&TypeId::of::<T>()).map(|value| Arc::clone(value).downcast())
        {
            return known;
        }
        let made = Arc::new(make());
        let value: Arc<dyn Any + Send + Sync> = Arc::<T>::clone(&made);
        values.insert(TypeId::of::<T>(), value);
        made
    }

    /// Says what a value holds by this name, in place of what was said before.
    pub(super) fn holds(&self, name: &'static str, held: HeldBytes) {
        locked(&self.held).insert(name, held);
    }

    /// What all values hold, by name.
    pub(super) fn held(&self) -> BTreeMap<&'static str, HeldBytes> {
        locked(&self.held).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Communicator, Select, World};
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Debug)]
    struct Dropped(Arc<AtomicU32>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_attachment_is_made_once_and_goes_with_the_communicator() {
        let dropped = Arc::new(AtomicU32::new(0));
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        let first = comm.attachment(|| Dropped(Arc::clone(&dropped)));
        let again = comm.clone().attachment(|| Dropped(Arc::new(AtomicU32::new(7))));
        assert!(Arc::ptr_eq(&first, &again), "made twice");
        assert_eq!(*comm.attachment(|| 5_u32), 5, "of another type");
        drop((first, again));
        assert_eq!(dropped.load(Ordering::Relaxed), 0);
        drop(comm);
        assert_eq!(dropped.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn memory_is_said_by_purpose_and_replaced_by_name() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        comm.holds("arena", HeldBytes { device: 9, ..HeldBytes::default() });
        comm.holds("arena", HeldBytes { device: 32, pinned: 16, host: 0 });
        comm.holds("panels", HeldBytes { host: 8, ..HeldBytes::default() });
        let memory = comm.memory();
        assert_eq!(memory.besides_workspace(), HeldBytes { device: 32, pinned: 16, host: 8 });
        let text = memory.to_string();
        assert!(
            text.ends_with(
                "\narena: 32 bytes on the device, 16 of pinned host memory\npanels: 8 bytes of \
                 host memory"
            ),
            "{text}"
        );
        assert_eq!(HeldBytes::default().to_string(), "nothing");
    }
}
