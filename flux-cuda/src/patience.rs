//! Bounded waits of the host for a device.
//!
//! Invariant: nothing of a device that was waited for in vain is freed, as freeing would wait. Nor
//! is any pinned memory, whose freeing waits for all devices.

use super::CudaError;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// So long the device is looked at without a pause: most waits are over by then.
const AT_ONCE: Duration = Duration::from_micros(200);
const LOOK: Duration = Duration::from_micros(100);

/// Devices, by ordinal: a process sees fewer.
static GIVEN_UP: AtomicU64 = AtomicU64::new(0);

/// Looks until `over` says how it ended.
pub fn look<T, E>(mut over: impl FnMut(Instant) -> Result<Option<T>, E>) -> Result<T, E> {
    let began = Instant::now();
    loop {
        let now = Instant::now();
        if let Some(end) = over(now)? {
            return Ok(end);
        }
        if now.duration_since(began) < AT_ONCE {
            std::thread::yield_now();
        } else {
            std::thread::sleep(LOOK);
        }
    }
}

/// Looks until `done` says so: true; false at `until`.
pub fn done_by<E>(until: Instant, mut done: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    look(|now| Ok(if done()? { Some(true) } else { (now >= until).then_some(false) }))
}

/// As [`done_by`], of what cannot fail.
pub fn is_by(until: Instant, mut done: impl FnMut() -> bool) -> bool {
    let Ok(done) = done_by(until, || Ok::<_, Infallible>(done()));
    done
}

fn bit(ordinal: u32) -> u64 {
    1_u64.checked_shl(ordinal).unwrap_or(0)
}

/// Notes that a device was waited for in vain, and says it once. Whether it is news.
pub(super) fn give_up(ordinal: u32, why: &str) -> bool {
    let news = GIVEN_UP.fetch_or(bit(ordinal), Ordering::AcqRel) & bit(ordinal) == 0;
    if news {
        tracing::warn!(
            "device {ordinal} is given up: {why}; what this process has there is not freed any \
             more, end it to free it"
        );
    }
    news
}

/// Whether the device was waited for in vain before.
pub(super) fn is_given_up(ordinal: u32) -> bool {
    GIVEN_UP.load(Ordering::Acquire) & bit(ordinal) != 0
}

/// Whether any device was: pinned memory is every device's.
pub(super) fn is_any_given_up() -> bool {
    GIVEN_UP.load(Ordering::Acquire) != 0
}

/// Leaks one reference, so that `shared` is never freed while a device that was given up uses it.
pub fn keep<T: ?Sized>(shared: &Arc<T>) {
    let _ = Arc::into_raw(Arc::clone(shared));
}

/// Whether the device may be used.
///
/// # Errors
/// [`CudaError::GivenUp`].
pub fn usable(ordinal: u32) -> Result<(), CudaError> {
    if is_given_up(ordinal) { Err(CudaError::GivenUp { ordinal }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_in_time_is_seen_and_what_is_not_ends_at_the_deadline() {
        let mut looks = 0;
        let third = || {
            looks += 1;
            Ok::<_, ()>(looks == 3)
        };
        assert_eq!(done_by(Instant::now() + Duration::from_mins(1), third), Ok(true));
        let until = Instant::now() + Duration::from_millis(5);
        assert_eq!(done_by(until, || Ok::<_, ()>(false)), Ok(false));
        assert!(Instant::now() >= until);
        assert_eq!(
            done_by(until, || Ok::<_, ()>(true)),
            Ok(true),
            "it is looked at once, whatever the time"
        );
        assert_eq!(done_by(until, || Err(7)), Err(7));
    }

    #[test]
    fn what_is_kept_outlives_its_holders() {
        let shared = Arc::new(());
        let seen = Arc::downgrade(&shared);
        keep(&shared);
        drop(shared);
        assert!(seen.upgrade().is_some());
    }

    #[test]
    fn a_device_is_given_up_alone_and_for_good() {
        // A number that no device of a test has.
        assert!(give_up(62, "of a test"));
        assert!(!give_up(62, "of a test"), "who keeps the context does it once");
        assert!(is_given_up(62) && !is_given_up(61) && !is_given_up(63) && !is_given_up(64));
        assert!(is_any_given_up());
        assert_eq!((usable(62), usable(61)), (Err(CudaError::GivenUp { ordinal: 62 }), Ok(())));
    }
}
