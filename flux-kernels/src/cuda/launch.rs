//! The kernel and its launch.

use super::call::{check, current_context, release_in};
use super::params::Params;
use super::program::DeviceProgram;
use super::tensor_map::{Stack, encode};
use super::LaunchError;
use crate::Variant;
use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
use flux_core::layout::gather_place_bytes;
use flux_core::rank::MAX_WORLD;
use flux_core::{OpKind, WorldSize};
use std::ffi::CString;

/// A loaded variant of the fused kernel.
#[derive(Debug)]
pub struct Kernel {
    variant: Variant,
    module: sys::CUmodule,
    function: sys::CUfunction,
    context: sys::CUcontext,
    multiprocessors: u32,
}

// SAFETY: module, function and context handles may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; launches do not change them.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Loads a compiled variant into the current context, whole: nothing is left to load at the first launch.
    ///
    /// # Errors
    /// [`LaunchError::Driver`] when the cubin does not suit the device, or lacks the entry point.
    pub fn load(variant: Variant, cubin: &[u8]) -> Result<Self, LaunchError> {
        let context = current_context()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a cubin, which states its own length; the out pointer is valid.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, cubin.as_ptr().cast()) })?;
        let mut this = Self { variant, module, function: std::ptr::null_mut(), context, multiprocessors: 0 };
        let entry = CString::new(variant.entry()).unwrap_or_default();
        // SAFETY: the module is loaded and the name NUL-terminated.
        check("cuModuleGetFunction", unsafe { sys::cuModuleGetFunction(&raw mut this.function, module, entry.as_ptr()) })?;
        let shared = variant.shared_bytes() as i32;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(this.function, attribute, shared) })?;
        let mut device = 0;
        // SAFETY: the out pointer is valid.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&raw mut device) })?;
        let mut count = 0;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: the out pointer is valid, the device exists.
        check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&raw mut count, attribute, device) })?;
        this.multiprocessors = count.unsigned_abs();
        Ok(this)
    }

    /// Which variant this is.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Multiprocessors of the device: the CTAs of this kernel that run at once.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        release_in(self.context, || {
            // SAFETY: loaded in `load`, unloaded once; the driver waits for running kernels of the module.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        });
    }
}

/// A row-major matrix on the device.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element; a multiple of 16.
    pub address: u64,
    /// Bytes between rows; a multiple of 16.
    pub row_bytes: u64,
}

/// The operands, the memory and the place of one launch. Shapes are those of the program's problem.
#[derive(Clone, Copy, Debug)]
pub struct LaunchArgs<'a> {
    /// The caller's `x`.
    pub x: Matrix,
    /// The caller's `w`.
    pub w: Matrix,
    /// The caller's `y`.
    pub y: Matrix,
    /// Every rank's data region, as mapped on this device.
    pub data: &'a [u64],
    /// Every rank's pad, as mapped on this device.
    pub pads: &'a [u64],
    /// This rank's control block.
    pub control: u64,
    /// This rank's fault block, as the device sees it.
    pub fault: u64,
    /// Bytes between the halves of a data region.
    pub half_stride: u64,
    /// Longest wait for another rank, in nanoseconds.
    pub deadline_ns: u64,
    /// Whether a mover outside of the kernel reads `x` and reports the end of it in the control block.
    pub await_pushed: bool,
    /// CTAs that compute.
    pub workers: u32,
    /// CTAs that push the caller's shard to the peers; 0 where another mover does.
    pub movers: u32,
    /// The stream.
    pub stream: usize,
}

/// Enqueues one call on the stream. Does not wait for the device and allocates nothing.
///
/// # Safety
/// Every address is valid on the current device for the extents that the program implies, until the launch has completed; all ranks of the
/// world enqueue the same call.
///
/// # Errors
/// [`LaunchError`], before anything is enqueued.
pub unsafe fn launch(kernel: &Kernel, program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<(), LaunchError> {
    let p = program.program();
    let variant = kernel.variant;
    if variant.op() != p.problem.op() || variant.dtype() != p.problem.dtype() || variant.tile() != p.tile {
        let program = format!("{} with tiles of {}", p.problem, p.tile);
        return Err(LaunchError::Mismatch { program, kernel: variant.to_string() });
    }
    let ctas = args.workers + args.movers;
    if args.workers == 0 || ctas > kernel.multiprocessors {
        return Err(LaunchError::Grid { ctas, workers: args.workers, limit: kernel.multiprocessors });
    }
    let mut params = encode_params(program, args)?;
    let mut arguments = [(&raw mut params).cast()];
    // SAFETY: the kernel takes one `Params` by value; the driver copies it before the call returns.
    let result = unsafe {
        sys::cuLaunchKernel(
            kernel.function,
            ctas,
            1,
            1,
            Variant::THREADS,
            1,
            1,
            variant.shared_bytes(),
            args.stream as sys::CUstream,
            arguments.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    };
    check("cuLaunchKernel", result)
}

/// What the kernel reads, with the operands' tensor maps.
fn encode_params(program: &DeviceProgram, args: &LaunchArgs<'_>) -> Result<Params, LaunchError> {
    let p = program.program();
    let problem = &p.problem;
    let (dtype, tile, world) = (problem.dtype(), p.tile, problem.world());
    let (rows, k) = (problem.m_shard(), problem.k_local());
    // The operand whose rows are global is a stack of shards, so that a tile's box ends at the shard's border.
    let (x_shards, y_shards) = match problem.op() {
        OpKind::AllGatherGemm => (1, world.get()),
        OpKind::GemmReduceScatter => (world.get(), 1),
    };
    let shard_bytes = |m: Matrix| u64::from(rows) * m.row_bytes;
    let x_outer = [(x_shards, shard_bytes(args.x)), (1, shard_bytes(args.x))];
    let x = Stack { operand: "x", address: args.x.address, cols: k, rows, row_bytes: args.x.row_bytes, outer: &x_outer, box_rows: tile.m };
    let w = Stack {
        operand: "w",
        address: args.w.address,
        cols: k,
        rows: problem.n_local(),
        row_bytes: args.w.row_bytes,
        outer: &[],
        box_rows: tile.n,
    };
    let y_outer = [(y_shards, shard_bytes(args.y))];
    let y = Stack {
        operand: "y",
        address: args.y.address,
        cols: problem.n_local(),
        rows,
        row_bytes: args.y.row_bytes,
        outer: &y_outer,
        box_rows: 64,
    };
    let row_bytes = u64::from(k) * dtype.bytes() as u64;
    let a_caller = encode(dtype, &x)?;
    let gathers = problem.op() == OpKind::AllGatherGemm && world.peers() > 0;
    let a_gather = if gathers {
        let outer = [(world.peers(), gather_place_bytes(problem)), (2, args.half_stride)];
        let address = args.data[p.rank.index()];
        encode(dtype, &Stack { operand: "the gather buffer", address, row_bytes, outer: &outer, ..x })?
    } else {
        a_caller
    };
    Ok(Params {
        a_caller,
        a_gather,
        b: encode(dtype, &w)?,
        y: encode(dtype, &y)?,
        data: by_rank(args.data, world),
        pad: by_rank(args.pads, world),
        items: program.items(),
        awaits: program.awaits(),
        transfers: program.transfers(),
        control: args.control,
        fault: args.fault,
        half_stride: args.half_stride,
        deadline_ns: args.deadline_ns,
        x: args.x.address,
        x_row_bytes: args.x.row_bytes,
        row_bytes,
        place_bytes: gather_place_bytes(problem),
        rank: p.rank.get(),
        world: world.get(),
        item_count: p.items.len() as u32,
        transfer_count: if args.movers > 0 { p.transfers.len() as u32 } else { 0 },
        k_steps: k.div_ceil(tile.k),
        slots_per_source: p.slots_per_source,
        movers: args.movers,
        await_pushed: u32::from(args.await_pushed),
        reserved: [0; 6],
    })
}

/// The addresses in the kernel's array of fixed capacity.
fn by_rank(addresses: &[u64], world: WorldSize) -> [u64; MAX_WORLD] {
    let mut all = [0; MAX_WORLD];
    all[..world.index()].copy_from_slice(&addresses[..world.index()]);
    all
}
