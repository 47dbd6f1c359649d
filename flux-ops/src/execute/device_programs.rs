//! What the ops of a communicator on a GPU share: programs in one arena of device memory, and the
//! staging memory of their kernels.
//!
//! Invariant: all device memory is allocated when an op is built, and never moves. A program is
//! copied on the stream of the call that needs it first, from the same place in pinned memory.
//! Calls are ordered on the device, so a copy over an evicted program comes after its last reader.
//! A program that a captured graph reads stays for good.

use super::plan::ExecutionPlan;
use super::ranges::Ranges;
use super::recipe::{Recipe, Resolved};
use super::{PROGRAM_BYTES, ProgramLimit, no_room};
use crate::error::BuildError;
use flux_core::program::WorkItem;
use flux_cuda::{CudaDevice, DeviceBlock, Event, PinnedBlock, SideStream};
use flux_kernels::cuda::{DeviceProgram, EpilogueStaging};
use flux_kernels::{KernelTarget, Variant};
use flux_transport::{Communicator, HeldBytes, TransportError};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A program in the arena, with what is decided of its calls.
#[derive(Debug)]
pub(super) struct PlacedProgram {
    /// What a time line lists; none of an op that is not traced.
    pub(super) items: Vec<WorkItem>,
    pub(super) execution: ExecutionPlan,
    /// What a kernel is chosen by, but for gates and the layout of weights.
    pub(super) variant: Variant,
    pub(super) program: DeviceProgram,
}

/// The programs of a communicator's ops.
#[derive(Debug)]
pub(super) struct DevicePrograms {
    limit: u64,
    /// Made with the first op.
    state: Mutex<Option<State>>,
}

#[derive(Debug)]
struct State {
    // Drop order: events and the stream before the memory that their copies use.
    programs: Ranges<Recipe, Uploaded>,
    /// Where evicted programs' copies may still read pinned memory.
    evicted: Vec<(Range<u64>, Event)>,
    /// For copies that are no part of a call.
    aside: SideStream,
    /// The last one is the largest. Programs of kernels that need less read another.
    staging: Vec<DeviceBlock>,
    arena: DeviceBlock,
    pinned: PinnedBlock,
    device: CudaDevice,
    deadline: Duration,
}

/// A program, and the event behind its copy.
#[derive(Debug)]
struct Uploaded {
    program: Arc<PlacedProgram>,
    copied: Event,
}

/// On which stream a copy goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum CopyOn {
    /// That of the call in progress.
    Call(usize),
    /// None: the copy is done on return.
    Aside,
}

impl DevicePrograms {
    pub(super) fn of(comm: &Communicator) -> Arc<Self> {
        let ProgramLimit(limit) = *comm.attachment(|| ProgramLimit(PROGRAM_BYTES));
        comm.attachment(|| Self { limit, state: Mutex::new(None) })
    }

    /// Bytes of the arena.
    pub(super) const fn limit(&self) -> u64 {
        self.limit
    }

    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates what the first op needs, and `staging` bytes of global staging. The device's
    /// context is current.
    pub(super) fn open(
        &self,
        comm: &Communicator,
        device: &CudaDevice,
        staging: u64,
    ) -> Result<(), BuildError> {
        let mut state = self.lock();
        let state = match &mut *state {
            Some(state) => state,
            empty => {
                let bytes = usize::try_from(self.limit).unwrap_or(usize::MAX);
                let held = HeldBytes { device: self.limit, pinned: self.limit, host: 0 };
                let made = State {
                    programs: Ranges::new(self.limit),
                    evicted: Vec::new(),
                    aside: SideStream::new(device)?,
                    staging: Vec::new(),
                    arena: DeviceBlock::new(device, bytes)?,
                    pinned: PinnedBlock::new(device, bytes)?,
                    device: device.clone(),
                    deadline: comm.deadline(),
                };
                comm.holds("program arena", held);
                empty.insert(made)
            }
        };
        if staging > state.staging().bytes {
            state
                .staging
                .push(DeviceBlock::new(device, usize::try_from(staging).unwrap_or(usize::MAX))?);
            let all = state.staging.iter().map(|block| block.bytes() as u64).sum();
            comm.holds("epilogue staging", HeldBytes { device: all, ..HeldBytes::default() });
        }
        Ok(())
    }

    /// Whether a recipe's program is on the device.
    pub(super) fn contains(&self, recipe: &Recipe) -> bool {
        self.lock().as_ref().is_some_and(|state| state.programs.contains(recipe))
    }

    /// The program of a recipe, if it is on the device; with `pin` it stays for good. In a turn of
    /// the communicator.
    pub(super) fn take(&self, recipe: &Recipe, pin: bool) -> Option<Arc<PlacedProgram>> {
        self.lock().as_mut().and_then(|state| {
            state.programs.take(recipe, pin).map(|uploaded| Arc::clone(&uploaded.program))
        })
    }

    /// Puts a program on the device. In a turn of the communicator, with the device's context
    /// current.
    pub(super) fn place(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        resolved: Resolved,
        on: CopyOn,
        pin: bool,
    ) -> Result<Arc<PlacedProgram>, BuildError> {
        let mut state = self.lock();
        let state = state
            .as_mut()
            .ok_or(BuildError::Transport { op: recipe.problem.to_string(), source: no_arena() })?;
        let Resolved { execution, program, .. } = resolved;
        let target = KernelTarget::of(state.device.info().compute)?;
        let (variant, bytes) = (Variant::of(&program, target)?, DeviceProgram::bytes_of(&program));
        let evicted = &mut state.evicted;
        let before = evicted.len();
        let start = state
            .programs
            .find(bytes as u64, |range, Uploaded { copied, .. }| evicted.push((range, copied)));
        let start = start.map_err(|found| no_room(recipe, found))?;
        let range = start..start + bytes as u64;
        let evicts = state.evicted.len() > before;
        // Aside, no order on the device keeps a copy behind the last readers of its place.
        if evicts && matches!(on, CopyOn::Aside) {
            comm.drain().map_err(|source| BuildError::Transport {
                op: recipe.problem.to_string(),
                source,
            })?;
        }
        state
            .await_copies_from(&range)
            .map_err(|source| BuildError::Transport { op: recipe.problem.to_string(), source })?;
        let at = usize::try_from(start).unwrap_or(usize::MAX);
        // SAFETY: the range lies within the pinned block. No copy reads it any more, and `state` is
        // locked.
        let records = unsafe {
            std::slice::from_raw_parts_mut(state.pinned.host().cast::<u8>().add(at), bytes)
        };
        DeviceProgram::write_records(&program, records);
        let (from, staging) = (records.as_ptr(), state.staging());
        let items = if recipe.launch.trace { program.computed().to_vec() } else { Vec::new() };
        let program = DeviceProgram::at(program, state.arena.address() + start, staging);
        let copied = Event::new(&state.device)?;
        let stream = match on {
            CopyOn::Call(stream) => stream,
            CopyOn::Aside => state.aside.raw(),
        };
        // SAFETY: the records stay until `copied`. Kernels of earlier calls are before the copy on
        // the stream, which the communicator has ordered, or were waited for.
        unsafe { program.copy_records(from, stream) }?;
        copied.record(stream)?;
        if matches!(on, CopyOn::Aside) {
            state.aside.synchronize()?;
        }
        let program = Arc::new(PlacedProgram { items, execution, variant, program });
        state.programs.insert(
            *recipe,
            start,
            bytes as u64,
            Uploaded { program: Arc::clone(&program), copied },
            pin,
        );
        Ok(program)
    }
}

/// An op opens the arena when it is built.
const fn no_arena() -> TransportError {
    TransportError::OutOfMemory { what: "program arena", bytes: 0 }
}

impl State {
    fn staging(&self) -> EpilogueStaging {
        self.staging.last().map_or_else(EpilogueStaging::default, |block| EpilogueStaging {
            address: block.address(),
            bytes: block.bytes() as u64,
        })
    }

    /// Returns when no copy reads this range of pinned memory. It is done long ago unless the arena
    /// is overwritten faster than the device runs.
    fn await_copies_from(&mut self, range: &Range<u64>) -> Result<(), TransportError> {
        let until = Instant::now() + self.deadline;
        loop {
            let mut busy = false;
            let mut failed = None;
            self.evicted.retain(|(taken, copied)| match copied.is_done() {
                Ok(true) => false,
                Ok(false) => {
                    busy |= taken.start < range.end && range.start < taken.end;
                    true
                }
                Err(error) => {
                    failed = Some(error);
                    true
                }
            });
            if let Some(error) = failed {
                return Err(error.into());
            }
            if !busy {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(TransportError::NotDrained);
            }
            std::thread::yield_now();
        }
    }
}
