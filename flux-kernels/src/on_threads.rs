//! A list of jobs on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// `job` of each item, in their order. `threads` threads take the items one by one, from number
/// `first` on and then from the list's begin.
pub(crate) fn on_threads<T: Sync, R: Send>(
    items: &[T],
    threads: usize,
    first: usize,
    job: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let taken = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(items.len()));
    let work = || {
        loop {
            let number = taken.fetch_add(1, Ordering::Relaxed);
            if number >= items.len() {
                return;
            }
            let at = (first + number) % items.len();
            let result = job(&items[at]);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(items.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn results_have_the_order_of_items_and_jobs_run_side_by_side() {
        for (threads, first) in [(1, 0), (3, 2), (16, 9)] {
            let (items, together): (Vec<usize>, _) = ((0..7).collect(), threads.min(7));
            let (begun, all) = (AtomicUsize::new(0), Barrier::new(together));
            let doubled = on_threads(&items, threads, first, |&item| {
                // As many as there are threads begin before one ends.
                if begun.fetch_add(1, Ordering::Relaxed) < together {
                    all.wait();
                }
                2 * item
            });
            assert_eq!(doubled, [0, 2, 4, 6, 8, 10, 12]);
        }
        assert!(on_threads(&[0; 0], 4, 1, |&item| item).is_empty());
    }

    #[test]
    fn the_first_job_is_that_of_the_first_item() {
        let order = Mutex::new(Vec::new());
        on_threads(&[0, 1, 2, 3], 1, 6, |&item| order.lock().unwrap().push(item));
        assert_eq!(order.into_inner().unwrap(), [2, 3, 0, 1]);
    }
}
