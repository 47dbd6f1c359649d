//! The thread that moves a rank's shard to its peers.
//!
//! Invariant: it has at most one job, and touches the caller's `x` and gather buffers only from
//! [`MoverThread::start`] until [`MoverThread::wait`] returns. It waits only for chunks to forward,
//! at most until the deadline, so every job ends.
//!
//! It forwards from its own gather buffer, which nobody overwrites before the next call but one.

use super::block::pointer;
use super::mapping::Mapping;
use crate::backends::error::TransportError;
use crate::backends::jobs::{RowTransfers, place_offset};
use crate::reason;
use crate::sync::locked;
use flux_core::program::{Forward, Transfer};
use flux_core::signal::{Protocol, Word, Words};
use flux_core::{Rank, rank::MAX_WORLD};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between looks at a signal: ranks outnumber the cores of a machine without GPUs.
const NAP: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(super) struct MoverThread {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Desk {
    job: Mutex<Job>,
    changed: Condvar,
}

/// The job; its list is reused, so that calls stop allocating.
#[derive(Debug)]
struct Job {
    state: State,
    mapping: Option<Arc<Mapping>>,
    x: u64,
    row_stride: u64,
    row_bytes: u64,
    element_bytes: u64,
    place_bytes: u64,
    full_places: u32,
    transfers: Vec<Transfer>,
    forwards: Vec<Forward>,
}

impl Job {
    /// Offset of a place in the gather buffer.
    const fn place(&self, place: u32) -> u64 {
        place_offset(place, self.place_bytes, self.full_places, self.row_bytes)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Idle,
    Given,
    Stop,
}

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Job> {
        locked(&self.job)
    }

    fn wait_while<'g>(&self, job: MutexGuard<'g, Job>, state: State) -> MutexGuard<'g, Job> {
        self.changed
            .wait_while(job, |job| job.state == state)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl MoverThread {
    pub(super) fn spawn(rank: Rank) -> Result<Self, TransportError> {
        let job = Job {
            state: State::Idle,
            mapping: None,
            x: 0,
            row_stride: 0,
            row_bytes: 0,
            element_bytes: 0,
            place_bytes: 0,
            full_places: u32::MAX,
            transfers: Vec::with_capacity(64 * MAX_WORLD),
            forwards: Vec::new(),
        };
        let desk = Arc::new(Desk { job: Mutex::new(job), changed: Condvar::new() });
        let for_thread = Arc::clone(&desk);
        let thread = std::thread::Builder::new()
            .name(format!("flux-mover-{rank}"))
            .spawn(move || serve(&for_thread))
            .map_err(|source| TransportError::Io { what: "starting the mover's thread", source })?;
        Ok(Self { desk, thread: Some(thread) })
    }

    /// Hands over a job; returns at once.
    ///
    /// # Safety
    /// Every transfer passed `RowTransfers::check`. The shard stays readable and unwritten until
    /// [`wait`](Self::wait) returns. The job before has ended.
    pub(super) unsafe fn start(&self, mapping: Arc<Mapping>, push: &RowTransfers<'_>) {
        let mut job = self.desk.lock();
        job.mapping = Some(mapping);
        (job.x, job.row_stride, job.row_bytes) = (push.x, push.row_stride, push.row_bytes);
        (job.element_bytes, job.place_bytes, job.full_places) =
            (push.element_bytes, push.place_bytes, push.full_places);
        job.transfers.clear();
        job.transfers.extend_from_slice(push.transfers);
        job.forwards.clear();
        job.forwards.extend_from_slice(push.forwards);
        job.state = State::Given;
        self.desk.changed.notify_all();
    }

    /// Returns when the job, if there is one, has ended.
    pub(super) fn wait(&self) {
        drop(self.desk.wait_while(self.desk.lock(), State::Given));
    }
}

impl Drop for MoverThread {
    fn drop(&mut self) {
        self.wait();
        self.desk.lock().state = State::Stop;
        self.desk.changed.notify_all();
        if let Some(Err(_)) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("a mover's thread panicked");
        }
    }
}

fn serve(desk: &Desk) {
    loop {
        let mut job = desk.wait_while(desk.lock(), State::Idle);
        if job.state == State::Stop {
            return;
        }
        // The lock is held while the job is carried out: nobody needs it before the job has ended.
        if let Some(mapping) = job.mapping.take() {
            // A partial job leaves data only behind signals that were not raised.
            if catch_unwind(AssertUnwindSafe(|| carry_out(&job, &mapping))).is_err() {
                mapping.words.abort().store_release(reason::PANICKED);
            }
        }
        job.state = State::Idle;
        desk.changed.notify_all();
    }
}

fn carry_out(job: &Job, mapping: &Mapping) {
    // The call cannot close before it sees `pushed`, so the epoch stands still.
    let call = Protocol::open(&mapping.words, mapping.rank);
    let half = call.half() as u64 * mapping.view.size.half_stride();
    for transfer in &job.transfers {
        if call.poisoned() || mapping.words.abort().load_acquire() != 0 {
            return;
        }
        let to = mapping.view.data[transfer.dest as usize] + half + job.place(transfer.place);
        copy_rows(job, transfer, job.x, job.row_stride, to);
        call.publish(Rank::new(transfer.dest), transfer.raise);
    }
    for Forward { from, awaits, to } in &job.forwards {
        if call
            .wait(
                awaits.signal,
                Rank::new(awaits.peer),
                until(Duration::from_nanos(mapping.view.deadline_ns)),
            )
            .is_err()
        {
            return;
        }
        let at = |rank: usize, place: u32| mapping.view.data[rank] + half + job.place(place);
        copy_rows(
            job,
            to,
            at(mapping.rank.index(), *from),
            job.row_bytes,
            at(to.dest as usize, to.place),
        );
        call.publish(Rank::new(to.dest), to.raise);
    }
    call.pushed();
}

/// A pause between looks at a signal, which breaks once `deadline` has passed.
fn until(deadline: Duration) -> impl FnMut(u64) -> ControlFlow<()> {
    let started = Instant::now();
    move |_| {
        if started.elapsed() >= deadline {
            return ControlFlow::Break(());
        }
        std::thread::sleep(NAP);
        ControlFlow::Continue(())
    }
}

/// Copies a transfer's columns of its rows from `from`, with this row stride, to the slot at `to`.
fn copy_rows(job: &Job, transfer: &Transfer, from: u64, stride: u64, to: u64) {
    let (first, rows) = (u64::from(transfer.row), u64::from(transfer.rows));
    let (col, width) =
        (u64::from(transfer.col) * job.element_bytes, u64::from(transfer.cols) * job.element_bytes);
    // whole rows that lie densely are one piece
    let (pieces, piece_rows) =
        if width == job.row_bytes && stride == job.row_bytes { (1, rows) } else { (rows, 1) };
    for piece in 0..pieces {
        let row = first + piece * piece_rows;
        let from = pointer(from + row * stride + col).cast_const();
        let to = pointer(to + row * job.row_bytes + col);
        let bytes = usize::try_from(piece_rows * width).expect("rows in memory are addressable");
        // SAFETY: `start`'s caller vouches for the shard; a forwarded slot's rows are there by the
        // signal just awaited. The destination passed `RowTransfers::check` and is this rank's to
        // write: its owner has ended the call before the last, and reads after the signal.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::control::{Collective, LocalControl};
    use crate::lateness::AMPLE;
    use flux_core::WorldSize;
    use flux_core::layout::WorkspaceSize;
    use flux_core::signal::{Control, Epoch};
    use std::sync::mpsc::channel;

    #[test]
    fn a_job_that_panics_ends_and_so_does_its_call() {
        let size = WorkspaceSize { half_bytes: 16, signals: 1, counters: 0 };
        let plane = LocalControl::world_of(WorldSize::new(1).unwrap()).remove(0);
        let mapping = || {
            Arc::new(
                Mapping::new(
                    Collective::new(&plane, 0),
                    size,
                    Epoch::FIRST,
                    AMPLE,
                    Instant::now() + AMPLE,
                )
                .unwrap(),
            )
        };
        let mover = Arc::new(MoverThread::spawn(Rank::new(0)).unwrap());
        let x = [7_u8; 16];
        let carry = |mapping: &Arc<Mapping>, dest| {
            let transfers = [Transfer { dest, rows: 1, cols: 16, ..Transfer::default() }];
            let x = x.as_ptr().expose_provenance() as u64;
            let push = RowTransfers {
                x,
                row_stride: 16,
                row_bytes: 16,
                element_bytes: 1,
                rows: 1,
                place_bytes: 16,
                full_places: u32::MAX,
                transfers: &transfers,
                forwards: &[],
            };
            // SAFETY: `x` lives on; the transfer is in the workspace, or to a rank that there is
            // none of, at whose address the job panics.
            unsafe { mover.start(Arc::clone(mapping), &push) };
            let (ended, has_ended) = channel();
            let mover = Arc::clone(&mover);
            std::thread::spawn(move || {
                mover.wait();
                ended.send(())
            });
            has_ended.recv_timeout(AMPLE).unwrap();
        };
        let word = |mapping: &Mapping| {
            (
                mapping.words.abort().load_acquire(),
                mapping.words.control(Control::Pushed).load_acquire(),
            )
        };
        let (panicked, good) = (mapping(), mapping());
        carry(&panicked, 9);
        assert_eq!(word(&panicked), (reason::PANICKED, Epoch::FIRST.before(1).get()));
        carry(&good, 0);
        assert_eq!(word(&good), (0, Epoch::FIRST.get()), "the thread carries on");
    }
}
