//! Ranks as threads, and what an executor does with a workspace.

use flux_core::Rank;
use flux_core::layout::WorkspaceSize;
use flux_core::signal::{Left, Poisoned, Protocol, SharedMemory};
use flux_transport::{Options, Select, WorkspaceView, World};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// Runs `body` on every rank of a world of threads; its panics are the test's.
#[allow(dead_code, reason = "each test uses a part of it")]
pub(crate) fn each_rank(n: u32, body: impl Fn(World) + Sync) {
    let body = &body;
    std::thread::scope(|scope| {
        for world in World::local(n).unwrap() {
            scope.spawn(move || body(world));
        }
    });
}

/// The host transport, with a deadline that a test survives.
pub(crate) fn options(reserve: WorkspaceSize) -> Options {
    Options {
        select: Select::Host,
        deadline: Duration::from_mins(1),
        reserve,
        ..Options::default()
    }
}

/// A rank's executor: the workspace in the eyes of the signal protocol.
#[derive(Debug)]
pub(crate) struct Words {
    rank: Rank,
    view: WorkspaceView,
    inner: SharedMemory,
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

#[allow(dead_code, reason = "each test uses a part of it")]
impl Words {
    pub(crate) fn new(view: &WorkspaceView, rank: Rank) -> Self {
        // SAFETY: the communicator outlives this value in every test, and holds the memory.
        let inner =
            unsafe { SharedMemory::new(view.pads.clone(), view.control, view.fault, view.size) };
        Self { rank, view: view.clone(), inner }
    }

    pub(crate) fn open(&self) -> Protocol<'_, SharedMemory> {
        Protocol::open(&self.inner, self.rank)
    }

    fn pause(&self) -> impl FnMut(u64) -> ControlFlow<()> + use<> {
        let end = Instant::now() + Duration::from_nanos(self.view.deadline_ns);
        move |_| {
            std::thread::yield_now();
            if Instant::now() < end { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        }
    }

    pub(crate) fn wait(
        &self,
        protocol: &Protocol<'_, SharedMemory>,
        signal: u32,
        peer: Rank,
    ) -> Result<(), Poisoned> {
        protocol.wait(signal, peer, self.pause())
    }

    pub(crate) fn leave(
        &self,
        protocol: Protocol<'_, SharedMemory>,
        await_pushed: bool,
    ) -> Result<(), Poisoned> {
        protocol.leave(1, await_pushed, self.pause()).map(|left| assert_eq!(left, Left::Closed))
    }

    /// Bytes of the own data region.
    pub(crate) fn read(&self, half: usize, offset: u64, bytes: u64) -> Vec<u8> {
        assert!(offset + bytes <= self.view.size.half_bytes);
        let first =
            self.view.data[self.rank.index()] + half as u64 * self.view.size.half_stride() + offset;
        // SAFETY: inside the region, and published before the signal that the caller has awaited.
        unsafe { std::slice::from_raw_parts(pointer(first), usize::try_from(bytes).unwrap()) }
            .to_vec()
    }
}
