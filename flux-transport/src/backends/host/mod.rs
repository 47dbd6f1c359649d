//! Ranks on the host, as threads or processes: they share heap memory or anonymous files, and a
//! thread of each rank moves its shard.
//!
//! Invariant: a call is synchronous. After [`finish`](Transport::finish) neither executor nor mover
//! touches the caller's tensors.

mod block;
pub(crate) mod file;
mod mapping;
mod mover;
mod region;

use crate::backends::connect_error::ConnectError;
use crate::backends::error::TransportError;
use crate::backends::jobs::{Job, Started};
use crate::backends::kind::{Capabilities, Mover, PeerStores, TransportKind};
use crate::backends::nodes::grouped;
use crate::backends::options::{Options, Select};
use crate::backends::transport::Transport;
use crate::backends::view::WorkspaceView;
use crate::bootstrap::control::{Collective, ControlError, Launch, together};
use crate::bootstrap::world::World;
use crate::device::{Device, Stream};
use flux_core::Nodes;
use flux_core::layout::{FaultRecord, WorkspaceSize};
use flux_core::signal::{Epoch, Word, Words, read_fault};
use mapping::Mapping;
use mover::MoverThread;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// One rank's end of the host transport.
#[derive(Debug)]
pub(crate) struct Host {
    launch: Launch,
    deadline: Duration,
    mapping: RwLock<Arc<Mapping>>,
    /// `None` in a world of one, where there is nobody to move to.
    mover: Option<MoverThread>,
    /// What the programs of calls take for nodes.
    nodes: Option<Nodes>,
    /// Whether the job of the call in progress was.
    started: AtomicBool,
}

impl Host {
    /// Connects the ranks of a world on one machine. Collective.
    pub(crate) fn connect(world: &World, options: &Options) -> Result<Self, ConnectError> {
        let deadline = Instant::now() + options.deadline;
        // Where there are several hosts, every rank finds another's.
        let (rank, hosts) = (world.rank(), world.control().hosts());
        if let Some(peer) = world.size().ranks().find(|&peer| !hosts.together(rank, peer)) {
            return Err(ControlError::OtherHost { rank, peer }.into());
        }
        // Agreed on, and by what all ranks know: refused on all or on none.
        let nodes =
            options.nodes.map(|count| grouped(world.size(), Some(count), hosts)).transpose();
        let nodes = nodes.map_err(|why| ConnectError::Unusable { select: Select::Host, why })?;
        // Before memory is taken: no later step would tell the others.
        let mover = if world.size().get() > 1 {
            MoverThread::spawn(world.rank()).map(Some)
        } else {
            Ok(None)
        };
        let mover = together(world.steps(), deadline, mover.map_err(ConnectError::from))?;
        let mapping = Mapping::new(
            world.steps(),
            options.reserve,
            options.first_epoch,
            options.deadline,
            deadline,
        )?;
        let launch = world.launch();
        let (mapping, started) = (RwLock::new(Arc::new(mapping)), AtomicBool::new(false));
        Ok(Self { launch, deadline: options.deadline, mapping, mover, nodes, started })
    }

    fn mapping(&self) -> Arc<Mapping> {
        Arc::clone(&self.mapping.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Transport for Host {
    fn kind(&self) -> TransportKind {
        TransportKind::Host
    }

    fn device(&self) -> Device {
        Device::Host
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { peer_stores: PeerStores::All, mover: Mover::Thread, graphs: false }
    }

    fn nodes(&self) -> Option<Nodes> {
        self.nodes
    }

    fn explain(&self) -> String {
        let world = self.mapping().world;
        let how = match self.launch {
            Launch::Threads => "threads of this process, their memory is the heap's",
            Launch::Processes => {
                "processes of this machine, their memory is that of sealed files without names"
            }
        };
        let nodes =
            self.nodes.map_or_else(String::new, |nodes| format!("; programs are those of {nodes}"));
        format!("host: {world} ranks are {how}, and a thread of each rank moves its shard{nodes}")
    }

    fn reserve(
        &self,
        size: WorkspaceSize,
        steps: Collective<'_>,
        deadline: Instant,
    ) -> Result<(), TransportError> {
        let next = self.mapping().epoch();
        let mapping = Mapping::new(steps, size, next, self.deadline, deadline)?;
        *self.mapping.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(mapping);
        Ok(())
    }

    fn view(&self) -> Arc<WorkspaceView> {
        Arc::clone(&self.mapping().view)
    }

    fn begin(&self, stream: Stream<'_>) -> Result<(), TransportError> {
        if stream != Stream::Host {
            return Err(TransportError::WrongStream { stream: stream.raw(), device: Device::Host });
        }
        self.started.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn epoch(&self) -> Option<Epoch> {
        Some(self.mapping().epoch())
    }

    unsafe fn start(&self, _stream: Stream<'_>, job: &Job<'_>) -> Result<Started, TransportError> {
        let mapping = self.mapping();
        job.check(mapping.world.get(), mapping.view.size)?;
        let rows = match job {
            Job::Nothing => None,
            Job::Rows(rows) => Some(rows).filter(|rows| !rows.transfers.is_empty()),
            other => return Err(other.unusable()),
        };
        if self.started.swap(true, Ordering::Relaxed) {
            let why = "a job of this call was started before";
            return Err(TransportError::MoverUnusable { why });
        }
        let started = Started { view: Arc::clone(&mapping.view), pushes: rows.is_some() };
        match (rows, &self.mover) {
            (None, _) => {}
            // SAFETY: the transfers were just checked against this mapping; the caller vouches for
            // the shard until the call has finished. `finish` waits, so the last call's job has
            // ended.
            (Some(rows), Some(mover)) => unsafe { mover.start(mapping, rows) },
            (Some(_), None) => {
                let why = "a world of one rank has no peers to move to";
                return Err(TransportError::MoverUnusable { why });
            }
        }
        Ok(started)
    }

    fn finish(&self, _stream: Stream<'_>) -> Result<(), TransportError> {
        if let Some(mover) = &self.mover {
            mover.wait();
        }
        Ok(())
    }

    fn read_fault(&self) -> Option<FaultRecord> {
        read_fault(&self.mapping().words)
    }

    fn set_abort(&self, reason: u32) {
        self.mapping().words.abort().store_release(reason);
    }

    fn drain(&self) -> Result<(), TransportError> {
        // Calls have ended when they are finished.
        Ok(())
    }
}
