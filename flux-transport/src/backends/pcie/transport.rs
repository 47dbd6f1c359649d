//! The host-staged transport of one rank.
//!
//! Invariant: side streams fork when a job is started, and carry a staged one once the kernel was
//! launched. A kernel that scatters is given the regions. The host waits only for full queues.
//! Calls are not captured: a graph would freeze the buffer index.

use super::carry::Streams;
use super::proof::prove;
use super::watch::Watch;
use super::workspace::Workspace;
use crate::backends::connect_error::ConnectError;
use crate::backends::device::calls::{Calls, Captures, Refreshed, Transfers};
use crate::backends::device::drain::Drain;
use crate::backends::device::fault_block::FaultBlock;
use crate::backends::device::lane::Lane;
use crate::backends::device::peer_memory::PeerDevices;
use crate::backends::error::TransportError;
use crate::backends::held::HeldBytes;
use crate::backends::jobs::{Job, Started};
use crate::backends::kind::{Capabilities, Mover, PeerStores, TransportKind};
use crate::backends::options::{Options, Select};
use crate::backends::transport::Transport;
use crate::backends::view::{WorkspaceView, nanoseconds};
use crate::bootstrap::control::{Collective, together};
use crate::bootstrap::world::World;
use crate::device::{Device, Stream};
use crate::sync::locked;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::Epoch;
use flux_cuda::{CudaDevice, words_async};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// One rank's device, memory and side streams.
#[derive(Debug)]
pub(crate) struct Pcie {
    // Drop order, after `Drop` has drained the device: the watch ends waits until then.
    watch: Watch,
    state: Mutex<State>,
    members: PeerDevices,
    deadline_ns: u64,
    drain: Drain,
    device: CudaDevice,
    place: Device,
}

#[derive(Debug)]
struct State {
    out: Lane,
    back: Lane,
    calls: Calls,
    current: Workspace,
    refreshed: Refreshed,
    /// For executors beside copy engines, and for those that scatter rows themselves.
    view: Arc<WorkspaceView>,
    scattering: Arc<WorkspaceView>,
    /// Whether the call in progress is one of the latter.
    scatters: bool,
}

/// Why a call cannot be captured.
const NO_GRAPHS: &str = "the half of host memory that its copies use would be frozen in the graph: \
                         capture with the nvlink transport";

impl Pcie {
    /// Connects ranks that have met. Collective.
    pub(crate) fn connect(
        world: &World,
        options: &Options,
        members: PeerDevices,
    ) -> Result<Self, ConnectError> {
        let (steps, deadline) = (world.steps(), Instant::now() + options.deadline);
        let unusable = |error: TransportError| error.into_connect_error(Select::Pcie);
        let opened = CudaDevice::open(members.info.ordinal).map_err(TransportError::from);
        let device = together(steps, deadline, opened).map_err(unusable)?;
        let epoch = options.first_epoch;
        let make = || {
            let (out, back) = (Lane::new(&device)?, Lane::new(&device)?);
            let calls =
                Calls::new(&device, epoch, Captures::Refused(TransportKind::Pcie, NO_GRAPHS))?;
            Ok::<_, TransportError>((out, back, calls, FaultBlock::new(&device)?))
        };
        let (out, back, calls, fault) = together(steps, deadline, make()).map_err(unusable)?;
        let size = options.reserve;
        let workspace = Workspace::new(steps, deadline, &device, &out, &members, size, epoch)?;
        let proven = prove(&device, &out, &back, &workspace, members.rank, epoch);
        together(steps, deadline, proven.map_err(TransportError::from)).map_err(unusable)?;
        let deadline_ns = nanoseconds(options.deadline);
        let [view, scattering] = views(&workspace, fault.address(), deadline_ns);
        let watch =
            Watch::start(members.rank, fault, Arc::clone(workspace.words()), epoch.before(1).get());
        let watch = together(steps, deadline, watch).map_err(unusable)?;
        let state = State {
            out,
            back,
            calls,
            current: workspace,
            refreshed: Refreshed::new(epoch),
            view,
            scattering,
            scatters: false,
        };
        let place = Device::from(device.info().clone());
        let drain = Drain::new(device.clone(), options.deadline);
        Ok(Self { watch, state: Mutex::new(state), members, deadline_ns, drain, device, place })
    }

    /// Waits for this rank's calls. Kernels' waits end by the deadline, streams' a moment later.
    fn drained(&self) -> Result<(), TransportError> {
        self.drain.wait(|| self.watch.fault().has_failed())
    }
}

fn views(at: &Workspace, fault: u64, deadline_ns: u64) -> [Arc<WorkspaceView>; 2] {
    [at.view(fault, deadline_ns), at.view_of_regions(fault, deadline_ns)].map(Arc::new)
}

impl Transport for Pcie {
    fn kind(&self) -> TransportKind {
        TransportKind::Pcie
    }

    fn device(&self) -> Device {
        self.place.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { peer_stores: PeerStores::Rows, mover: Mover::CopyEngine, graphs: false }
    }

    fn explain(&self) -> String {
        let state = locked(&self.state);
        let size = state.current.size();
        format!(
            "pcie: {} ranks; this rank on {}; what a rank sends is copied to pinned memory of the \
             host and from there by each reader, by copy engines on two side streams, or stored \
             and loaded by kernels where it is few rows of partial sums; {} bytes of device memory \
             and {} of pinned memory a rank",
            self.members.world(),
            self.device(),
            size.total_bytes() + size.data_bytes(),
            state.current.host_region(self.members.rank).layout.bytes().unwrap_or(u64::MAX),
        )
    }

    fn reserve(
        &self,
        size: WorkspaceSize,
        steps: Collective<'_>,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let state = &mut *locked(&self.state);
        let drained = self.drained().and_then(|()| Ok(state.current.read_epoch()?));
        // After this step no rank's kernel or copy touches any rank's workspace.
        let epoch = together(steps, deadline, drained)?;
        let (device, out) = (&self.device, &state.out);
        let grown = Workspace::new(steps, deadline, device, out, &self.members, size, epoch)?;
        [state.view, state.scattering] =
            views(&grown, self.watch.fault().address(), self.deadline_ns);
        self.watch.replace(Arc::clone(grown.words()));
        (state.current, state.refreshed) = (grown, Refreshed::new(epoch));
        state.calls.go_on_at(epoch);
        // The old memory is gone on every rank. Unpinning waits for all devices of the process, so
        // it must not come beside a peer's next call.
        together(steps, deadline, Ok(()))
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&locked(&self.state).view)
    }

    fn held(&self) -> HeldBytes {
        let state = locked(&self.state);
        let size = state.current.size();
        let pinned =
            state.current.host_region(self.members.rank).layout.bytes().unwrap_or(u64::MAX);
        HeldBytes { device: size.total_bytes() + size.data_bytes(), pinned, host: 0 }
    }

    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        locked(&self.state).calls.begin(stream)
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(locked(&self.state).calls.epoch())
    }

    unsafe fn start(&self, stream: Stream<'_>, job: &Job<'_>) -> Result<Started, TransportError> {
        let State { out, back, calls, current, refreshed, view, scattering, scatters } =
            &mut *locked(&self.state);
        let caller = calls.unstarted(stream)?;
        job.check(self.members.world(), *current.size())?;
        let epoch = calls.epoch();
        let (view, transfers) = match job {
            Job::Nothing => (view, Transfers::InOrder),
            Job::Staged(_) => (view, Transfers::AwaitsLaunch),
            Job::Scattered { .. } => (scattering, Transfers::OnSideStreams),
            other => return Err(other.unusable()),
        };
        if transfers != Transfers::InOrder {
            let _current = self.device.enter()?;
            refreshed.keep(epoch, |before| current.refresh(&self.device, before, caller))?;
            out.fork(caller)?;
            back.fork(caller)?;
        }
        calls.note(transfers);
        if let Job::Scattered { op } = job {
            *scatters = true;
            self.watch.begin(epoch.get());
            current.words().say(epoch, *op);
        }
        Ok(Started { view: Arc::clone(view), pushes: false })
    }

    unsafe fn launched(&self, _stream: Stream<'_>, job: &Job<'_>) -> Result<(), TransportError> {
        let State { out, back, calls, current, .. } = &mut *locked(&self.state);
        let Job::Staged(staged) = job else { return Ok(()) };
        if !calls.awaited_launch() {
            return Err(TransportError::MoverUnusable { why: "nothing waits to be staged" });
        }
        job.check(self.members.world(), *current.size())?;
        let (rank, epoch) = (self.members.rank, calls.epoch());
        let _current = self.device.enter()?;
        self.watch.begin(epoch.get());
        current.words().say(epoch, staged.op);
        let streams = Streams { device: &self.device, at: current, rank, epoch, out, back };
        // SAFETY: checked above, forked when it was started; the caller promises the rows; no call
        // is captured, so the host's count is the device's epoch.
        Ok(unsafe { streams.carry(staged) }?)
    }

    fn abandon(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { out, back, calls, current, scatters, .. } = &mut *locked(&self.state);
        let (scattered, epoch) = (std::mem::take(scatters), calls.epoch());
        let _current = self.device.enter()?;
        calls.abandon(stream, |caller| {
            let done = scattered.then(|| current.finished(epoch));
            // SAFETY: the device's context is current; the word is in the generation's pinned
            // block, which lives until the device is drained.
            let told = unsafe { words_async(&self.device, done, back.raw()) };
            // Both: after a failed carry `back` may not be ordered after `out`, which reads the
            // caller's rows.
            out.join(caller).and(back.join(caller)).and(told)
        })
    }

    fn finish(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        let State { back, calls, current, scatters, .. } = &mut *locked(&self.state);
        let (scattered, epoch) = (std::mem::take(scatters), calls.epoch());
        calls.finish(stream, |caller| {
            if !scattered {
                return back.join(caller);
            }
            // The caller's stream goes on: it is behind the kernel, which has waited for all peers.
            back.fork(caller)?;
            // SAFETY: the word is in the generation's pinned block, which lives until the device is
            // drained.
            unsafe { words_async(&self.device, [current.finished(epoch)], back.raw()) }
        })
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        self.watch.record()
    }

    fn set_abort(&self, reason: u32) {
        self.watch.abort(reason);
    }

    fn drain(&self) -> Result<(), TransportError> {
        self.drained()
    }
}

impl Drop for Pcie {
    fn drop(&mut self) {
        // Nothing is unmapped while this rank uses it; peers hold what theirs use.
        self.drain.close(self.members.rank, || self.watch.fault().has_failed());
    }
}
