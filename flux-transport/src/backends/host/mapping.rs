//! A rank's view of all ranks' memory.
//!
//! Invariant: a mapping holds every block whose address it shows; its own words were initialised
//! before any peer learned of them.

use super::block::Block;
use super::region::Region;
use crate::backends::error::TransportError;
use crate::backends::offer::{Offer, keys_at_one_epoch};
use crate::backends::view::WorkspaceView;
use crate::bootstrap::control::{Collective, Launch, agree, together};
use flux_core::layout::{FAULT_BYTES, WorkspaceSize, control};
use flux_core::signal::{self, Control, Epoch, SharedMemory, Word, Words};
use flux_core::{Rank, WorldSize};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// All ranks' regions, and this rank's private blocks.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) rank: Rank,
    pub(super) world: WorldSize,
    pub(super) words: SharedMemory,
    pub(super) view: Arc<WorkspaceView>,
    // Held for the addresses above.
    _regions: Vec<Arc<Region>>,
    _control: Block,
    _fault: Block,
}

impl Mapping {
    /// Takes memory of `size` on every rank and maps all of it on each. Fails on all ranks if on
    /// one.
    pub(super) fn new(
        steps: Collective<'_>,
        size: WorkspaceSize,
        next: Epoch,
        wait: Duration,
        deadline: Instant,
    ) -> Result<Self, TransportError> {
        let plane = steps.control();
        let (rank, world) = (plane.rank(), plane.world());
        let own = Own::new(size, plane.kind()).inspect(|own| own.initialise(rank, size, next));
        let offer = own.as_ref().map(|own| own.offer(next));
        let answers = agree(steps, &offer, deadline);
        // an own failure is told as it is, not as others hear of it
        let own = own?;
        let keys = keys_at_one_epoch(&answers?);
        let regions = match &own.file {
            None => keys.and_then(|keys| find(&keys)),
            Some(file) => {
                let files = steps.exchange_fds(&[file.as_fd()], deadline)?;
                keys.and_then(|_| open(&own.region, size, rank, &files))
            }
        };
        // Nobody goes on, and perhaps leaves with its memory, before all have found all of it.
        let regions = together(steps, deadline, regions)?;
        let pads: Vec<_> = regions.iter().map(|region| region.pad()).collect();
        // SAFETY: the mapping holds the blocks as long as `words` lives in it; they have the sizes
        // that `size` asks for, and their words are accessed by the signal protocol only.
        let words = unsafe {
            SharedMemory::new(pads.clone(), own.control.address(), own.fault.address(), size)
        };
        let view = WorkspaceView {
            data: regions.iter().map(|region| region.data()).collect(),
            pads,
            scattered: None,
            control: own.control.address(),
            fault: own.fault.address(),
            size,
            deadline_ns: crate::backends::view::nanoseconds(wait),
        };
        Ok(Self {
            rank,
            world,
            words,
            view: Arc::new(view),
            _regions: regions,
            _control: own.control,
            _fault: own.fault,
        })
    }

    /// The number of the call in progress, or of the next one between calls.
    pub(super) fn epoch(&self) -> Epoch {
        Epoch::new(self.words.control(Control::Epoch).load_acquire())
    }
}

/// The regions of threads, by their keys.
fn find(keys: &[u64]) -> Result<Vec<Arc<Region>>, TransportError> {
    let find = |(rank, &key): (u32, &u64)| {
        Region::find(key).ok_or_else(|| failed(Rank::new(rank), "its memory is gone".to_owned()))
    };
    (0..).zip(keys).map(find).collect()
}

/// The regions of processes, from the descriptors that they gave, by rank.
fn open(
    own: &Arc<Region>,
    size: WorkspaceSize,
    rank: Rank,
    files: &[Vec<OwnedFd>],
) -> Result<Vec<Arc<Region>>, TransportError> {
    let open = |(peer, files): (Rank, &Vec<OwnedFd>)| match files.as_slice() {
        [] if peer == rank => Ok(Arc::clone(own)),
        [file] => Region::open(file.as_fd(), size).map_err(|why| failed(peer, why)),
        files => Err(failed(peer, format!("it gave {} descriptors of memory, not 1", files.len()))),
    };
    (0..).map(Rank::new).zip(files).map(open).collect()
}

fn failed(rank: Rank, reason: String) -> TransportError {
    TransportError::PeerFailed { rank, reason }
}

/// A rank's own memory, before it knows of the others'.
struct Own {
    region: Arc<Region>,
    file: Option<OwnedFd>,
    control: Block,
    fault: Block,
}

impl Own {
    fn new(size: WorkspaceSize, ranks: Launch) -> Result<Self, TransportError> {
        let (region, file) = match ranks {
            Launch::Threads => (Region::for_threads(size)?, None),
            Launch::Processes => {
                Region::for_processes(size).map(|(region, file)| (region, Some(file)))?
            }
        };
        let control = Block::new("control words", control::bytes(size.counters))?;
        let fault = Block::new("fault record", FAULT_BYTES)?;
        Ok(Self { region, file, control, fault })
    }

    fn initialise(&self, rank: Rank, size: WorkspaceSize, next: Epoch) {
        let pads = vec![self.region.pad(); rank.index() + 1];
        // SAFETY: the blocks outlive these words and have the sizes that `size` asks for. Only the
        // own pad is written, which no peer knows yet.
        let words =
            unsafe { SharedMemory::new(pads, self.control.address(), self.fault.address(), size) };
        signal::initialise(&words, rank, size, next);
    }

    fn offer(&self, next: Epoch) -> [u8; Offer::BYTES] {
        Offer { key: self.region.key(), epoch: next }.encode()
    }
}
