//! Whose turn it is on a communicator: calls and changes of the workspace happen one at a time.
//!
//! Invariant: a thread that has its turn is refused another, as it would wait for itself.

use crate::TransportError;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// The turns of a communicator.
#[derive(Debug, Default)]
pub(super) struct Turns {
    order: Mutex<()>,
    /// Who has the turn.
    holder: Mutex<Option<ThreadId>>,
}

/// A thread's turn, until it is dropped, by the same thread.
#[derive(Debug)]
pub(super) struct Turn<'t> {
    turns: &'t Turns,
    _order: MutexGuard<'t, ()>,
}

impl Turns {
    /// Waits for this thread's turn.
    ///
    /// # Errors
    /// [`TransportError::InCall`] where it has it.
    pub(super) fn take(&self) -> Result<Turn<'_>, TransportError> {
        self.free_of_this_thread()?;
        // the lock guards an order, not data
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        *self.holder() = Some(std::thread::current().id());
        Ok(Turn { turns: self, _order: order })
    }

    /// Whether this thread could wait for its turn.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub(super) fn free_of_this_thread(&self) -> Result<(), TransportError> {
        if *self.holder() == Some(std::thread::current().id()) { Err(TransportError::InCall) } else { Ok(()) }
    }

    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.turns.holder() = None;
    }
}

#[cfg(test)]
mod tests {
    use crate::{Communicator, ConnectError, Select, Stream, TransportError, World};
    use flux_core::layout::WorkspaceSize;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Whatever a rank in a call of its own asks for instead of waiting for itself for ever; then its peer's share.
    #[test]
    fn a_thread_that_is_in_a_call_is_told_so_and_its_peers_with_it() {
        let (done, wait) = channel();
        for world in World::local(2).unwrap() {
            let done = done.clone();
            std::thread::spawn(move || {
                let comm = Communicator::connect_blocking(&world, Select::Host.into()).unwrap();
                let first = comm.rank().get() == 0;
                let size = WorkspaceSize { half_bytes: 1 << 12, ..WorkspaceSize::default() };
                if first {
                    let call = comm.begin(Stream::Host).unwrap();
                    assert!(matches!(comm.begin(Stream::Host), Err(TransportError::InCall)));
                    assert!(matches!(comm.reserve(size), Err(TransportError::InCall)));
                    for rebuilt in [comm.rebuild_blocking(crate::Rebuild::Whole), pollster::block_on(comm.rebuild(crate::Rebuild::Whole))] {
                        assert!(matches!(rebuilt, Err(ConnectError::Transport(TransportError::InCall))));
                    }
                    call.finish().unwrap();
                } else {
                    match comm.reserve(size).unwrap_err() {
                        TransportError::PeerFailed { rank, reason } => {
                            assert_eq!((rank.get(), reason), (0, TransportError::InCall.to_string()));
                        }
                        other => panic!("{other}"),
                    }
                    comm.begin(Stream::Host).unwrap().finish().unwrap();
                }
                comm.reserve(size).unwrap();
                assert_eq!((comm.status(), comm.workspace_size()), (Ok(()), size));
                done.send(()).unwrap();
            });
        }
        drop(done);
        for _ in 0..2 {
            wait.recv_timeout(Duration::from_mins(1)).expect("a rank has panicked, or waits for itself");
        }
    }

    #[test]
    fn another_thread_has_its_turn_when_the_call_has_ended() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host.into()).unwrap();
        let (done, wait) = channel();
        let call = comm.begin(Stream::Host).unwrap();
        let other = comm.clone();
        std::thread::spawn(move || done.send(other.begin(Stream::Host).and_then(super::super::Call::finish).is_ok()));
        assert!(wait.recv_timeout(Duration::from_millis(50)).is_err(), "it has not waited");
        call.finish().unwrap();
        assert_eq!(wait.recv_timeout(Duration::from_mins(1)), Ok(true));
        comm.begin(Stream::Host).unwrap().finish().unwrap();
    }
}
