//! A tile program in device memory, with the memory that its launches need.
//!
//! Invariant: whoever gives the memory keeps it, and the records in it, until the launches that
//! walk them have completed.

use super::call::{check, synchronize};
use super::error::LaunchError;
use super::kernel::Kernel;
use super::memory::OwnMemory;
use crate::device::KernelTarget;
use crate::variant::Variant;
use cudarc::driver::sys;
use flux_core::program::{Await, TileProgram, Transfer, WorkItem};
use flux_core::tile::Generation;

/// A program on a device: the records that a launch walks, and where.
#[derive(Debug)]
pub struct DeviceProgram {
    program: TileProgram,
    /// Address of the records.
    records: u64,
    staging: EpilogueStaging,
    /// Where the memory is its own.
    _memory: Option<OwnMemory>,
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
        let all = Variant::all(KernelTarget::of_generation(Generation::Hopper)).into_iter().filter(|variant| variant.op().reduces());
        let most = all.map(|variant| variant.with_partials(kernel.variant().partials()).epilogue_staging_bytes()).max().unwrap_or(0);
        most * u64::from(kernel.multiprocessors())
    }
}

impl DeviceProgram {
    /// A program whose records are [copied](Self::copy_records) to `records`, an address of
    /// [`bytes_of`](Self::bytes_of) bytes.
    pub const fn at(program: TileProgram, records: u64, staging: EpilogueStaging) -> Self {
        Self { program, records, staging, _memory: None }
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
        let memory = OwnMemory::new(staging as usize + bytes.len())?;
        let (address, records) = (memory.address(), memory.address() + staging);
        // SAFETY: the destination was allocated with this size, the source is a live vector.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(records, bytes.as_ptr().cast(), bytes.len()) })?;
        synchronize(0)?;
        Ok(Self { program, records, staging: EpilogueStaging { address, bytes: staging }, _memory: Some(memory) })
    }

    /// Bytes of a program's records.
    pub fn bytes_of(program: &TileProgram) -> usize {
        size_of_val(&program.items[..]) + size_of_val(&program.awaits[..]) + program.transfers.len() * size_of::<Transfer>()
    }

    /// Writes a program's records to the start of `to`.
    ///
    /// # Panics
    /// If there are fewer bytes than [`bytes_of`](Self::bytes_of).
    pub fn write_records(program: &TileProgram, to: &mut [u8]) {
        let parts: [&[u8]; 3] =
            [bytemuck::cast_slice(&program.items), bytemuck::cast_slice(&program.awaits), bytemuck::cast_slice(&program.transfers)];
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
        let bytes = Self::bytes_of(&self.program);
        // SAFETY: both ranges have this length, and the caller keeps them.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(self.records, from.cast(), bytes, stream as sys::CUstream) };
        check("cuMemcpyHtoDAsync", copied)
    }

    /// The program.
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

    pub(super) const fn items(&self) -> u64 {
        self.records
    }

    pub(super) fn awaits(&self) -> u64 {
        self.items() + (self.program.items.len() * size_of::<WorkItem>()) as u64
    }

    pub(super) fn transfers(&self) -> u64 {
        self.awaits() + (self.program.awaits.len() * size_of::<Await>()) as u64
    }
}
