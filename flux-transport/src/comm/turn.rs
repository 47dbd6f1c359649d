//! Orders the threads of a rank on a communicator.
//!
//! Invariant: a thread with its turn is refused another. Every wait for a turn is bounded.

use crate::backends::TransportError;
use crate::sync::locked;
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

#[derive(Debug, Default)]
pub(super) struct Turns {
    holder: Mutex<Option<ThreadId>>,
    ended: Condvar,
}

/// A thread's turn, until it is dropped, by the same thread.
#[derive(Debug)]
pub(super) struct Turn<'t> {
    turns: &'t Turns,
    /// Stays on its thread, as a lock's guard does.
    _here: PhantomData<MutexGuard<'t, ()>>,
}

impl Turns {
    /// Waits for this thread's turn, at most `longest`.
    ///
    /// # Errors
    /// [`TransportError::InCall`] if it has it; [`TransportError::NoTurn`] at the end.
    pub(super) fn take(&self, longest: Duration) -> Result<Turn<'_>, TransportError> {
        self.free_of_this_thread()?;
        let taken = |holder: &mut Option<ThreadId>| holder.is_some();
        let (mut holder, _) = self
            .ended
            .wait_timeout_while(locked(&self.holder), longest, taken)
            .unwrap_or_else(PoisonError::into_inner);
        if holder.is_some() {
            return Err(TransportError::NoTurn { waited: longest });
        }
        *holder = Some(std::thread::current().id());
        Ok(Turn { turns: self, _here: PhantomData })
    }

    /// Whether this thread may wait for its turn.
    ///
    /// # Errors
    /// [`TransportError::InCall`] if it has it.
    pub(super) fn free_of_this_thread(&self) -> Result<(), TransportError> {
        if *locked(&self.holder) == Some(std::thread::current().id()) {
            Err(TransportError::InCall)
        } else {
            Ok(())
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *locked(&self.turns.holder) = None;
        self.turns.ended.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use crate::Rebuild;
    use crate::backends::{ConnectError, Options, Select, TransportError};
    use crate::bootstrap::world::World;
    use crate::comm::Communicator;
    use crate::device::Stream;
    use crate::lateness::{AMPLE, scaled};
    use flux_core::layout::WorkspaceSize;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Whatever a rank in a call of its own asks for instead of waiting for itself for ever; then
    /// its peer's share.
    #[test]
    fn a_thread_that_is_in_a_call_is_told_so_and_its_peers_with_it() {
        let (done, wait) = channel();
        for world in World::local(2).unwrap() {
            let done = done.clone();
            std::thread::spawn(move || {
                let comm = Communicator::connect_blocking(&world, Select::Host).unwrap();
                let first = comm.rank().get() == 0;
                let size = WorkspaceSize { half_bytes: 1 << 12, ..WorkspaceSize::default() };
                if first {
                    let call = comm.begin(Stream::Host).unwrap();
                    assert!(matches!(comm.begin(Stream::Host), Err(TransportError::InCall)));
                    assert!(matches!(comm.reserve(size), Err(TransportError::InCall)));
                    for rebuilt in [
                        comm.rebuild_blocking(Rebuild::Whole),
                        pollster::block_on(comm.rebuild(Rebuild::Whole)),
                    ] {
                        assert!(matches!(
                            rebuilt,
                            Err(ConnectError::Transport(TransportError::InCall))
                        ));
                    }
                    call.finish().unwrap();
                } else {
                    match comm.reserve(size).unwrap_err() {
                        TransportError::PeerFailed { rank, reason } => {
                            assert_eq!(
                                (rank.get(), reason),
                                (0, TransportError::InCall.to_string())
                            );
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
            wait.recv_timeout(AMPLE).expect("a rank has panicked, or waits for itself");
        }
    }

    /// What takes a turn.
    type Ask = fn(&Communicator, WorkspaceSize) -> Result<(), ConnectError>;

    /// Begins nothing then, and breaks nothing; but for rebuilding, which breaks the communicator
    /// first.
    #[test]
    fn a_thread_waits_for_another_threads_call_no_longer_than_the_deadline() {
        let deadline = scaled(Duration::from_millis(200));
        let comm = Communicator::connect_blocking(
            &World::single(),
            Options { deadline, ..Select::Host.into() },
        )
        .unwrap();
        let size = WorkspaceSize { half_bytes: 1 << 12, ..WorkspaceSize::default() };
        let asks: [Ask; 3] = [
            |comm, _| Ok(comm.begin(Stream::Host)?.finish()?),
            |comm, size| Ok(comm.reserve(size)?),
            |comm, _| comm.rebuild_blocking(Rebuild::Whole).map(drop),
        ];
        for ask in asks {
            let (done, wait) = channel();
            let call = comm.begin(Stream::Host).unwrap();
            let other = comm.clone();
            std::thread::spawn(move || done.send(ask(&other, size)));
            let refused = wait.recv_timeout(AMPLE).expect("it waits for ever");
            assert!(
                matches!(refused, Err(ConnectError::Transport(TransportError::NoTurn { waited }))
                    if waited == deadline),
                "{refused:?}"
            );
            drop(call);
            ask(&comm, size).unwrap();
        }
        assert!(comm.is_broken());
    }

    #[test]
    fn another_thread_has_its_turn_when_the_call_has_ended() {
        let comm = Communicator::connect_blocking(&World::single(), Select::Host).unwrap();
        let (done, wait) = channel();
        let call = comm.begin(Stream::Host).unwrap();
        let other = comm.clone();
        std::thread::spawn(move || {
            done.send(other.begin(Stream::Host).and_then(super::super::Call::finish).is_ok())
        });
        assert!(wait.recv_timeout(Duration::from_millis(50)).is_err(), "it has not waited");
        call.finish().unwrap();
        assert_eq!(wait.recv_timeout(AMPLE), Ok(true));
        comm.begin(Stream::Host).unwrap().finish().unwrap();
    }
}
