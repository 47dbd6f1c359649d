//! What the ops of a communicator on the host share: checked programs, and the buffers of calls.
//!
//! Invariant: programs hold a bounded number of bytes, and buffers those of the largest op.

use super::ranges::Ranges;
use super::recipe::{Recipe, Resolved};
use super::{NoRoom, PROGRAM_BYTES, ProgramLimit, no_room};
use crate::error::BuildError;
use flux_core::program::TileProgram;
use flux_kernels::cpu::{Buffers, Executor};
use flux_transport::{Communicator, HeldBytes};
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The programs of a communicator's ops.
#[derive(Debug)]
pub(super) struct HostPrograms {
    programs: Mutex<Ranges<Recipe, Arc<Executor>>>,
}

/// The buffers of a communicator's calls.
#[derive(Debug, Default)]
pub(super) struct HostBuffers(Mutex<Buffers>);

impl HostBuffers {
    pub(super) fn of(comm: &Communicator) -> Arc<Self> {
        comm.attachment(Self::default)
    }

    /// For the call in progress, or between calls: nobody else uses them then.
    pub(super) fn lock(&self) -> MutexGuard<'_, Buffers> {
        // A panic in a call leaves what the next one fills before it reads it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostPrograms {
    pub(super) fn of(comm: &Communicator) -> Arc<Self> {
        let ProgramLimit(limit) = *comm.attachment(|| ProgramLimit(PROGRAM_BYTES));
        comm.attachment(|| Self { programs: Mutex::new(Ranges::new(limit)) })
    }

    /// Whether there is room for a program.
    pub(super) fn check(&self, recipe: &Recipe, program: &TileProgram) -> Result<(), BuildError> {
        let (bytes, limit) = (
            bytes_of(program),
            self.programs.lock().unwrap_or_else(PoisonError::into_inner).limit(),
        );
        if bytes > limit {
            Err(no_room(recipe, NoRoom { bytes, limit, pinned: 0 }))
        } else {
            Ok(())
        }
    }

    /// The program of a recipe, which is made where it is not known.
    pub(super) fn get(
        &self,
        comm: &Communicator,
        recipe: &Recipe,
        pin: bool,
    ) -> Result<Arc<Executor>, BuildError> {
        let known = |programs: &mut Ranges<_, Arc<_>>| programs.take(recipe, pin).map(Arc::clone);
        if let Some(program) =
            known(&mut self.programs.lock().unwrap_or_else(PoisonError::into_inner))
        {
            return Ok(program);
        }
        let Resolved { execution, program, .. } = recipe.resolve(comm)?;
        let workers = NonZeroUsize::new(execution.workers as usize).unwrap_or(NonZeroUsize::MIN);
        let bytes = bytes_of(&program);
        let made = Arc::new(Executor::new(program, workers)?);
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = known(&mut programs) {
            return Ok(program);
        }
        let start = programs.find(bytes, |_, _| {}).map_err(|found| no_room(recipe, found))?;
        programs.insert(*recipe, start, bytes, Arc::clone(&made), pin);
        comm.holds("programs", HeldBytes { host: programs.bytes(), ..HeldBytes::default() });
        Ok(made)
    }
}

fn bytes_of(program: &TileProgram) -> u64 {
    (size_of_val(&program.items[..])
        + size_of_val(&program.awaits[..])
        + size_of_val(&program.transfers[..])) as u64
}
