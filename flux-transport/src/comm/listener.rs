//! Passes notices to a communicator and answers questions about it.
//!
//! Invariant: no notice or question is handled after the listener is dropped. So the transport is
//! dropped by the communicator's own thread, never by one that brings notices.

use super::failure::Said;
use super::flight::Flight;
use super::health::Health;
use crate::bootstrap::control::{Answerer, ControlPlane, Notice, Watcher};
use crate::sync::Listening;
use std::sync::Arc;

/// Tells a communicator's health of every notice, and says what the rank does in it.
pub(super) struct NoticeListener {
    listening: Arc<Listening<Health>>,
    _answerer: Arc<Answerer>,
    _watcher: Arc<Watcher>,
}

impl NoticeListener {
    pub(super) fn new(
        number: u32,
        health: &Arc<Health>,
        flight: &Arc<Flight>,
        control: &dyn ControlPlane,
    ) -> Self {
        let listening = Listening::new(health);
        let answerer: Arc<Answerer> = {
            let (listening, flight) = (Arc::clone(&listening), Arc::clone(flight));
            Arc::new(move |asked| {
                if asked != number {
                    return None;
                }
                listening.call(|health| {
                    let record = health.record_to_tell();
                    let paused_in = health.transport().paused_in();
                    Said { record, paused_in, calls: flight.last() }.encode()
                })
            })
        };
        control.answer_with(Arc::downgrade(&answerer));
        let watcher: Arc<Watcher> = {
            let listening = Arc::clone(&listening);
            Arc::new(move |notice: Notice| {
                let _ = listening.call(|health| health.notice(notice));
            })
        };
        control.watch(Arc::downgrade(&watcher));
        Self { listening, _answerer: answerer, _watcher: watcher }
    }
}

impl Drop for NoticeListener {
    fn drop(&mut self) {
        self.listening.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::LocalControl;
    use crate::comm::mock::MockTransport;
    use crate::lateness::AMPLE;
    use flux_core::{Rank, WorldSize};
    use std::sync::mpsc::channel;
    use std::sync::{Mutex, OnceLock};
    use std::thread::ThreadId;
    use std::time::Duration;

    /// Keeps the thread that drops it.
    struct Freed(Arc<OnceLock<ThreadId>>);

    impl Drop for Freed {
        fn drop(&mut self) {
            self.0.set(std::thread::current().id()).unwrap();
        }
    }

    #[test]
    fn the_transport_goes_on_the_thread_that_drops_the_communicator_though_a_notice_is_being_heard()
    {
        let mut ends = LocalControl::world_of(WorldSize::new(2).unwrap());
        let (peer, own) = (ends.remove(1), ends.remove(0));
        let (heard, hears) = channel();
        let (dropped, is_dropped) = channel();
        let is_dropped = Mutex::new(is_dropped);
        let freed_by = Arc::new(OnceLock::new());
        let freed = Freed(Arc::clone(&freed_by));
        let set_abort = move |_| {
            let _of_the_transport = &freed;
            heard.send(()).unwrap();
            // Comes at once where nobody waits for this one, and else never.
            let _ = is_dropped.lock().unwrap().recv_timeout(Duration::from_millis(200));
        };
        let transport =
            MockTransport { set_abort: Box::new(set_abort), ..MockTransport::default() };
        let health = Arc::new(Health::new(Rank::new(0), 0, Box::new(transport)));
        let ear = NoticeListener::new(0, &health, &Arc::new(Flight::new()), &own);
        std::thread::scope(|scope| {
            scope.spawn(|| peer.abort(0, 7));
            hears.recv_timeout(AMPLE).unwrap();
            drop(ear);
            drop(health);
            // The other end is gone with the transport, where all is well.
            let _ = dropped.send(());
        });
        assert_eq!(freed_by.get(), Some(&std::thread::current().id()));
        peer.abort(0, 8);
    }
}
