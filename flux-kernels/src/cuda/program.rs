//! A tile program in device memory, with the memory that its launches need.
//!
//! Invariant: whoever gives the memory keeps it, and the records in it, until the launches that
//! walk them have completed.

use super::error::LaunchError;
use super::kernel::Kernel;
use crate::device::KernelTarget;
use crate::variant::Variant;
use flux_core::program::{Await, TileProgram, Transfer, WorkItem};
use flux_core::tile::Generation;
use flux_cuda::current::{ContextMemory, upload, upload_async};

/// A program on a device: the records that a launch walks, and where.
#[derive(Debug)]
pub struct DeviceProgram {
    /// Without its items and awaits, which the device alone reads.
    program: TileProgram,
    counts: RecordCounts,
    /// Address of the records.
    records: u64,
    staging: EpilogueStaging,
    /// Where the memory is its own.
    _memory: Option<ContextMemory>,
}

/// How many records a program has: items, then awaits, then transfers.
#[derive(Clone, Copy, Debug)]
struct RecordCounts {
    /// Before copies of peers' results.
    computed: usize,
    /// Copies of peers' results.
    copies: usize,
    awaits: usize,
    transfers: usize,
}

impl RecordCounts {
    fn of(program: &TileProgram) -> Self {
        let computed = program.computed().len();
        let (copies, awaits) = (program.items.len() - computed, program.awaits.len());
        Self { computed, copies, awaits, transfers: program.transfers.len() }
    }

    /// Bytes before the awaits, before the transfers, and in all.
    const fn bytes(&self) -> [usize; 3] {
        let items = (self.computed + self.copies) * size_of::<WorkItem>();
        let awaits = items + self.awaits * size_of::<Await>();
        [items, awaits, awaits + self.transfers * size_of::<Transfer>()]
    }
}

/// Global staging memory of the CTAs of launches, which come one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpilogueStaging {
    /// Its address.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl EpilogueStaging {
    /// Bytes that launches of `kernel` need.
    pub fn bytes_for(kernel: &Kernel) -> u64 {
        kernel.variant().epilogue_staging_bytes() * u64::from(kernel.multiprocessors())
    }

    /// Bytes that suffice for launches of every kernel that sends partial sums of the type that
    /// `kernel` sends; 0 if it needs none.
    pub fn bytes_like(kernel: &Kernel) -> u64 {
        if Self::bytes_for(kernel) == 0 {
            return 0;
        }
        let all = Variant::all(KernelTarget::of_generation(Generation::Hopper))
            .into_iter()
            .filter(|variant| variant.op().reduces());
        let most = all
            .map(|variant| {
                variant.with_partials(kernel.variant().numerics().partials).epilogue_staging_bytes()
            })
            .max()
            .unwrap_or(0);
        most * u64::from(kernel.multiprocessors())
    }
}

impl DeviceProgram {
    /// A program whose records are [copied](Self::copy_records) to `records`, an address of
    /// [`bytes_of`](Self::bytes_of) bytes.
    pub fn at(mut program: TileProgram, records: u64, staging: EpilogueStaging) -> Self {
        let counts = RecordCounts::of(&program);
        (program.items, program.awaits) = (Vec::new(), Vec::new());
        Self { program, counts, records, staging, _memory: None }
    }

    /// Allocates device memory on the current device for launches on `kernel`, and copies the
    /// records there; waits for the copy.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when memory is short.
    pub fn upload(program: TileProgram, kernel: &Kernel) -> Result<Self, LaunchError> {
        let mut bytes = vec![0; Self::bytes_of(&program)];
        Self::write_records(&program, &mut bytes);
        let staging = EpilogueStaging::bytes_for(kernel);
        let memory = ContextMemory::new(staging as usize + bytes.len())?;
        let (address, records) = (memory.address(), memory.address() + staging);
        // SAFETY: the destination was allocated with this size, the source is a live vector.
        unsafe { upload(records, &bytes, 0) }?;
        Ok(Self {
            _memory: Some(memory),
            ..Self::at(program, records, EpilogueStaging { address, bytes: staging })
        })
    }

    /// Bytes of a program's records.
    pub fn bytes_of(program: &TileProgram) -> usize {
        RecordCounts::of(program).bytes()[2]
    }

    /// Writes a program's records to the start of `to`.
    ///
    /// # Panics
    /// If there are fewer bytes than [`bytes_of`](Self::bytes_of).
    pub fn write_records(program: &TileProgram, to: &mut [u8]) {
        let parts: [&[u8]; 3] = [
            bytemuck::cast_slice(&program.items),
            bytemuck::cast_slice(&program.awaits),
            bytemuck::cast_slice(&program.transfers),
        ];
        let mut at = 0;
        for part in parts {
            to[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }

    /// Puts a copy of the records from pinned host memory on `stream`.
    ///
    /// # Safety
    /// `from` has the program's [records](Self::write_records), which stay until the copy is done;
    /// what came before on the stream is the last use of this program's memory by another.
    ///
    /// # Errors
    /// [`LaunchError::Driver`].
    pub unsafe fn copy_records(&self, from: *const u8, stream: usize) -> Result<(), LaunchError> {
        let [.., bytes] = self.counts.bytes();
        // SAFETY: both ranges have this length, and the caller keeps them.
        Ok(unsafe { upload_async(self.records, from, bytes, stream) }?)
    }

    /// The program without its items and awaits.
    pub const fn program(&self) -> &TileProgram {
        &self.program
    }

    /// Whether there is global staging memory for this many CTAs of a kernel.
    pub(super) fn has_room_for(&self, variant: Variant, ctas: u32) -> bool {
        variant.epilogue_staging_bytes() * u64::from(ctas) <= self.staging.bytes
    }

    pub(super) const fn global_staging(&self) -> u64 {
        self.staging.address
    }

    /// Items.
    pub const fn item_count(&self) -> usize {
        self.counts.computed + self.counts.copies
    }

    /// Items before the copies of peers' results.
    pub(super) const fn computed_count(&self) -> u32 {
        self.counts.computed as u32
    }

    /// Copies of peers' results.
    pub(super) const fn copy_count(&self) -> u32 {
        self.counts.copies as u32
    }

    pub(super) const fn items(&self) -> u64 {
        self.records
    }

    pub(super) const fn awaits(&self) -> u64 {
        self.items() + self.counts.bytes()[0] as u64
    }

    pub(super) const fn transfers(&self) -> u64 {
        self.items() + self.counts.bytes()[1] as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::layout::RowLayout;
    use flux_core::program::Schedule;
    use flux_core::{DType, OpKind, Problem, Rank, TileShape, WorldSize};

    /// Every address of a record is where it was written.
    #[test]
    fn records_are_found_where_they_are_written() {
        let world = WorldSize::new(4).unwrap();
        for op in OpKind::ALL {
            let problem = Problem::new(op, 100, 320, 320, DType::Bf16, world).unwrap();
            for rows in
                [RowLayout::PerShard, RowLayout::Flattened, RowLayout::FlattenedTwoExchanges]
            {
                let schedule =
                    Schedule { rows, split_k: 2, ..Schedule::of(TileShape::new(16, 32, 64)) };
                let program = TileProgram::build(&problem, Rank::new(1), &schedule).unwrap();
                let mut bytes = vec![0; DeviceProgram::bytes_of(&program)];
                DeviceProgram::write_records(&program, &mut bytes);

                let placed =
                    DeviceProgram::at(program.clone(), 1 << 20, EpilogueStaging::default());
                let from = |address: u64| &bytes[(address - (1 << 20)) as usize..];
                assert!(
                    from(placed.items()).starts_with(bytemuck::cast_slice(&program.items)),
                    "{op} {rows:?}"
                );
                assert!(
                    from(placed.awaits()).starts_with(bytemuck::cast_slice(&program.awaits)),
                    "{op} {rows:?}"
                );
                assert_eq!(
                    from(placed.transfers()),
                    bytemuck::cast_slice::<_, u8>(&program.transfers),
                    "{op} {rows:?}"
                );
                assert_eq!(
                    (placed.computed_count() as usize, placed.item_count()),
                    (program.computed().len(), program.items.len()),
                    "{op} {rows:?}"
                );
                assert_eq!(
                    placed.copy_count() > 0,
                    op == OpKind::GemmAllReduce && rows != RowLayout::Flattened,
                    "{op} {rows:?}"
                );
            }
        }
    }
}
