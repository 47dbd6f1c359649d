//! A tile program in device memory, with the memory that its launches need.

use super::call::{check, current_context, release_in, synchronize};
use super::error::LaunchError;
use super::kernel::Kernel;
use crate::variant::Variant;
use cudarc::driver::sys;
use flux_core::program::{Await, TileProgram, Transfer, WorkItem};

/// A program on the device whose context was current: the records that every launch of an op walks.
#[derive(Debug)]
pub struct DeviceProgram {
    program: TileProgram,
    /// Global staging memory, then the records.
    memory: u64,
    epilogue_staging_bytes: u64,
    context: sys::CUcontext,
}

// SAFETY: the context handle and the address are plain values; the driver's calls on them are
// thread-safe.
unsafe impl Send for DeviceProgram {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for DeviceProgram {}

impl DeviceProgram {
    /// Allocates device memory on the current device for launches on `kernel`, and copies the
    /// records there; waits for the copy.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when memory is short.
    pub fn upload(program: TileProgram, kernel: &Kernel) -> Result<Self, LaunchError> {
        let context = current_context()?;
        let mut bytes = Vec::<u8>::with_capacity(Self::bytes_of(&program));
        bytes.extend_from_slice(bytemuck::cast_slice(&program.items));
        bytes.extend_from_slice(bytemuck::cast_slice(&program.awaits));
        bytes.extend_from_slice(bytemuck::cast_slice(&program.transfers));
        let epilogue_staging_bytes = kernel.variant().epilogue_staging_bytes() * u64::from(kernel.multiprocessors());
        let mut memory = 0;
        // SAFETY: the out pointer is valid and the size is not zero: a program has items.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut memory, epilogue_staging_bytes as usize + bytes.len()) })?;
        let this = Self { program, memory, epilogue_staging_bytes, context };
        // SAFETY: the destination was allocated with this size, the source is a live vector.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(this.items(), bytes.as_ptr().cast(), bytes.len()) })?;
        synchronize(0)?;
        Ok(this)
    }

    /// The program.
    pub fn program(&self) -> &TileProgram {
        &self.program
    }

    /// Whether there is global staging memory for this many CTAs of a kernel.
    pub(super) fn has_room_for(&self, variant: Variant, ctas: u32) -> bool {
        variant.epilogue_staging_bytes() * u64::from(ctas) <= self.epilogue_staging_bytes
    }

    pub(super) fn global_staging(&self) -> u64 {
        self.memory
    }

    pub(super) fn items(&self) -> u64 {
        self.memory + self.epilogue_staging_bytes
    }

    pub(super) fn awaits(&self) -> u64 {
        self.items() + (self.program.items.len() * size_of::<WorkItem>()) as u64
    }

    pub(super) fn transfers(&self) -> u64 {
        self.awaits() + (self.program.awaits.len() * size_of::<Await>()) as u64
    }

    fn bytes_of(program: &TileProgram) -> usize {
        size_of_val(&program.items[..]) + size_of_val(&program.awaits[..]) + program.transfers.len() * size_of::<Transfer>()
    }
}

impl Drop for DeviceProgram {
    fn drop(&mut self) {
        release_in(self.context, || {
            // SAFETY: allocated in `upload`, freed once; the driver waits for work that uses it.
            let _ = unsafe { sys::cuMemFree_v2(self.memory) };
        });
    }
}
