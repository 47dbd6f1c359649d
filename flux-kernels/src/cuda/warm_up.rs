//! A first launch ahead of the first call.
//!
//! Invariant: it is a call of a world of one rank without items, in memory of its own: no operand,
//! workspace or peer is touched.

use super::error::LaunchError;
use super::tensor_map::{BoxWidth, Fetch, MappedOperand, Outer, encode};
use crate::abi::Params;
use crate::variant::Variant;
use bytemuck::Zeroable;
use flux_core::DType;
use flux_core::layout::{FAULT_BYTES, LINE, control};
use flux_core::numerics::VECTOR_BYTES;
use flux_core::tile::Generation;
use flux_cuda::current::{self, ContextMemory};
use flux_cuda::{Function, Launch, Module};

/// Launches the kernel once on every multiprocessor and waits for it. The driver then has done its
/// work for a function's first launch, and the device for its first block with this much shared
/// memory.
pub(super) fn warm_up(
    module: &Module,
    function: Function,
    variant: Variant,
    multiprocessors: u32,
) -> Result<(), LaunchError> {
    let control_bytes = control::bytes(0).next_multiple_of(LINE);
    let bytes = control_bytes + FAULT_BYTES;
    let memory = ContextMemory::new(bytes as usize)?;
    let scratch = memory.address();
    // SAFETY: the range was just allocated with this size, and the default stream orders its end
    // after this.
    unsafe { current::fill_bytes_async(scratch, 0, bytes as usize, 0) }?;
    let params =
        Params { control: scratch, fault: scratch + control_bytes, world: 1, ..Params::zeroed() };
    let params = match variant.generation() {
        Generation::Hopper => with_maps(&params, scratch, variant)?,
        Generation::Portable | Generation::Ada => params,
    };
    let launch = Launch {
        grid: (multiprocessors, 1),
        threads: Variant::THREADS,
        shared_bytes: variant.shared_bytes(),
        stream: 0,
        programmatic: false,
    };
    // SAFETY: a call without items and peers uses control block and fault block alone,
    // which live until the synchronisation below.
    unsafe { module.launch(function, launch, &params) }?;
    Ok(current::synchronize(0)?)
}

/// The parameters with tensor maps. Every launch fetches its maps, so they are valid ones, of a
/// line of the scratch memory.
fn with_maps(params: &Params, address: u64, variant: Variant) -> Result<Params, LaunchError> {
    let numerics = variant.numerics();
    let matrix = |dtype: DType, box_rows, outer| {
        let operand = MappedOperand {
            name: "scratch",
            address,
            cols: dtype.per_vector(),
            rows: 1,
            row_bytes: VECTOR_BYTES.into(),
            outer,
            box_rows,
            box_width: BoxWidth::Wide,
            fetch: Fetch::Line,
        };
        encode(dtype, &operand)
    };
    let alone = [Outer::new(1, VECTOR_BYTES.into()); 2];
    let tile = variant.tile();
    let a = matrix(numerics.operand, tile.m, &alone[..])?;
    let y = matrix(numerics.output, variant.out_box().rows, &alone[..1])?;
    let b = matrix(numerics.operand, tile.n, &[])?;
    Ok(Params { a_caller: a, a_gather: a, b, y, ..*params })
}
