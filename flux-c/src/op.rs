//! Ops: their handles and calls.

use crate::comm::{InUse, flux_comm};
use crate::error::{Error, flux_status, guard};
use crate::handle::{Kind, copy_text, given, here, structure, write};
use crate::messages;
use crate::options::{flag_of, flux_op_options};
use crate::tensor::{flux_operands, flux_tensor, of_weight, operand};
use flux_ops::binding::Handles;
use flux_ops::{FusedLinear, Location, Operand, Operands, Presence, Rank};
use flux_transport::Stream;
use std::ffi::{c_char, c_void};
use std::ops::Range;

/// One rank's part of a fused linear layer. It holds no weights: one op serves every layer with its
/// options.
#[derive(Debug)]
pub struct flux_op {
    _opaque: [u8; 0],
}

/// An op.
#[derive(Debug)]
struct Op {
    // Before the communicator.
    op: FusedLinear,
    flags: u32,
    max_m: usize,
    comm: InUse,
}

static OPS: Kind<Op> = Kind { name: "op", tag: 9, values: Handles::new() };

fn with(op: *const flux_op, run: impl FnOnce(&Op) -> Result<(), Error>) -> flux_status {
    guard(|| run(here(&*OPS.get(op)?)?))
}

/// Creates an op. Collective: every rank creates the same ops in the same order, and no other
/// thread of this rank is in a call. Waits for the others; on CUDA compiles kernels that the cache
/// lacks. Create all ops before the first capture, as a larger workspace moves.
///
/// op        gets the op, or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_create(
    comm: *const flux_comm,
    options: *const flux_op_options,
    op: *mut *mut flux_op,
) -> flux_status {
    guard(|| {
        given("op", op)?;
        // SAFETY: the caller's place for a handle.
        unsafe { op.write(std::ptr::null_mut()) };
        let comm = InUse::of(comm)?;
        // SAFETY: as the header asks.
        let options = unsafe { structure(options) }?;
        let spec = options.spec(comm.comm()?.defaults)?;
        let built = FusedLinear::build(spec, &comm.comm()?.comm).map_err(messages::of_build)?;
        let made =
            OPS.keep(Op { op: built, flags: options.operand_flags(), max_m: options.max_m, comm });
        // SAFETY: the caller's place for a handle, which was checked not to be NULL.
        unsafe { op.write(made) };
        Ok(())
    })
}

/// Destroys an op. Not collective; calls on a stream still end.
#[unsafe(no_mangle)]
pub extern "C" fn flux_op_destroy(op: *mut flux_op) -> flux_status {
    guard(|| {
        here(&*OPS.get(op)?)?;
        OPS.remove(op).map(drop)
    })
}

/// Makes the programs of these numbers of rows and keeps them, for calls that are captured later.
/// Not collective. Waits for this rank's calls.
///
/// rows      `count` values of `m`
/// count     at most max_m + 1, as many values as `m` can have
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_prepare(
    op: *const flux_op,
    rows: *const usize,
    count: usize,
) -> flux_status {
    with(op, |op| {
        if count == 0 {
            return Ok(());
        }
        given("rows", rows)?;
        if count - 1 > op.max_m {
            return Err(Error::argument(format!(
                "count = {count}: `m` has {} values, 0 to max_m",
                op.max_m + 1
            )));
        }
        // SAFETY: as many numbers as the caller says, and no more than an op has values of `m`.
        let rows = unsafe { std::slice::from_raw_parts(rows, count) };
        op.op.prepare(rows).map_err(messages::of_call)
    })
}

/// The rows of a rank's shard, of calls with `m` rows: the first m % W ranks have one more.
///
/// first     gets the first row; or NULL
/// count     gets the number of rows; or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_rows(
    op: *const flux_op,
    m: usize,
    rank: u32,
    first: *mut usize,
    count: *mut usize,
) -> flux_status {
    // SAFETY: as the header asks.
    unsafe { part(op, rank, first, count, |op, rank| op.rows(m, rank).map_err(messages::of_call)) }
}

/// The columns of all `n` that a rank has: the rows of its `w`, and the columns of its `y`, of
/// which it has half with gates. All but of FLUX_ALL_GATHER_GEMM. There `n` is split in groups of
/// 8 columns; with FLUX_E4M3 of 16, with scales of blocks of 128. Gates double the group. The first
/// ranks may have a group more. Of several weights those of the first.
///
/// first     gets the first column; or NULL
/// count     gets the number of columns; or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_columns(
    op: *const flux_op,
    rank: u32,
    first: *mut usize,
    count: *mut usize,
) -> flux_status {
    // SAFETY: as the header asks.
    unsafe { part(op, rank, first, count, |op, rank| Ok(op.columns(rank))) }
}

/// As flux_op_columns, of one of several weights, counted from its own first column.
///
/// weight    its index in the op's columns
/// first     gets the first column; or NULL
/// count     gets the number of columns; or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_weight_columns(
    op: *const flux_op,
    weight: usize,
    rank: u32,
    first: *mut usize,
    count: *mut usize,
) -> flux_status {
    let columns = |op: &FusedLinear, rank| match op.weight_count() {
        weights if weight < weights => Ok(op.weight_columns(weight, rank)),
        weights => Err(Error::operand(format!(
            "weight = {weight} is not below the op's number of weights, {weights}"
        ))),
    };
    // SAFETY: as the header asks.
    unsafe { part(op, rank, first, count, columns) }
}

/// The elements of the inner extent `k` that a rank has: the columns of its `x` and `w`. All of
/// FLUX_ALL_GATHER_GEMM. Of others they are split in groups of 8, of FLUX_E4M3 of 16, with scales
/// of blocks of 128. The first ranks may have a group more.
///
/// first     gets the first element; or NULL
/// count     gets the number of elements; or NULL
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_inner(
    op: *const flux_op,
    rank: u32,
    first: *mut usize,
    count: *mut usize,
) -> flux_status {
    // SAFETY: as the header asks.
    unsafe { part(op, rank, first, count, |op, rank| Ok(op.inner(rank))) }
}

/// # Safety
/// The places are the caller's, or NULL.
unsafe fn part(
    op: *const flux_op,
    rank: u32,
    first: *mut usize,
    count: *mut usize,
    of: impl FnOnce(&FusedLinear, Rank) -> Result<Range<usize>, Error>,
) -> flux_status {
    with(op, |op| {
        let world = op.comm.comm()?.comm.world_size().get();
        if rank >= world {
            return Err(Error::operand(format!(
                "rank = {rank} is not below the world size {world}"
            )));
        }
        let part = of(&op.op, Rank::new(rank))?;
        // SAFETY: as the caller vouches.
        unsafe {
            write(first, part.start);
            write(count, part.len());
        }
        Ok(())
    })
}

/// How calls are executed, for people. The places are those of flux_comm_explain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_explain(
    op: *const flux_op,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> flux_status {
    // SAFETY: as the header asks.
    with(op, |op| unsafe { copy_text(&op.op.explain(), text, capacity, needed) })
}

/// Computes `y` from operands in host memory, on a communicator of the host transport. Collective:
/// every rank makes the same calls in the same order, with operands of one `m`, 0 to `max_m`.
/// Returns when `y` is written. Nobody else accesses the operands meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_forward_host(
    op: *const flux_op,
    operands: *const flux_operands,
) -> flux_status {
    with(op, |op| {
        if let Some(info) = op.comm.comm()?.comm.device().info() {
            return Err(Error::operand(format!(
                "the communicator works on CUDA device {}: call flux_op_forward_cuda",
                info.ordinal
            )));
        }
        // SAFETY: as the header asks.
        unsafe { forward(op, operands, Location::Host, Stream::Host) }
    })
}

/// As flux_op_forward_host, with operands in memory of the communicator's device. Puts the call on
/// the stream and returns: it allocates no device memory and waits for nothing. The operands stay
/// as they are until the stream has come past the call; then flux_comm_check says whether `y` may
/// be read.
///
/// stream    a CUstream or cudaStream_t of the device; NULL is its default stream. It may be in
///           capture, of ops with FLUX_OP_CAPTURES where flux_comm_graphs says 1, with an `m` that
///           was prepared or called before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flux_op_forward_cuda(
    op: *const flux_op,
    operands: *const flux_operands,
    stream: *mut c_void,
) -> flux_status {
    with(op, |op| {
        let Some(ordinal) = op.comm.comm()?.comm.device().info().map(|info| info.ordinal) else {
            return Err(Error::operand(
                "the communicator works on the host: call flux_op_forward_host, or connect over \
                 another transport",
            ));
        };
        // SAFETY: a stream of the caller's, which it keeps.
        let stream = unsafe { Stream::from_raw(stream as usize) };
        // SAFETY: as the header asks.
        unsafe { forward(op, operands, Location::Cuda(ordinal), stream) }
    })
}

/// Whether an operand is given, as the op has its flag.
fn is_given(flags: u32, operand: Operand, tensors: *const flux_tensor) -> Result<bool, Error> {
    let (name, given) = (operand.name(0), !tensors.is_null());
    let Some((flag, word)) = flag_of(operand) else { return Ok(given) };
    match (flags & flag != 0, given) {
        // Scales then lie behind rows.
        (true, false) if operand == Operand::YNormScale => Ok(false),
        (true, false) => Err(Error::operand(format!(
            "operands.{name} is NULL, and the op was created with {word}: give it"
        ))),
        (false, true) => Err(Error::operand(format!(
            "operands.{name} is given, and the op was created without {word}: give NULL"
        ))),
        _ => Ok(given),
    }
}

/// # Safety
/// The operands are the caller's, at `location`.
unsafe fn forward(
    op: &Op,
    operands: *const flux_operands,
    location: Location,
    stream: Stream<'_>,
) -> Result<(), Error> {
    // SAFETY: as the caller vouches.
    let given = unsafe { structure(operands) }?;
    // SAFETY: as the caller vouches.
    let operand = |name: &'static str, tensor| unsafe { operand(name, tensor, location) };
    let (weights, count) = (op.op.weight_count(), given.weight_count.max(1));
    if count != weights {
        return Err(Error::operand(format!(
            "operands.weight_count = {}, and the op was created with {weights} {}: give as many",
            given.weight_count,
            if weights == 1 { "weight" } else { "weights" }
        )));
    }
    // A call allocates nothing.
    let mut operands = Operands::new(operand("x", given.x)?);
    for weight in 0..weights {
        // SAFETY: as the caller vouches, with as many elements as the op has weights.
        let one = |tensors, name| unsafe { of_weight(name, tensors, weight, weights, location) };
        operands.add_weight(one(given.w, "w")?, one(given.y, "y")?);
    }
    for kind in Operand::ALL.into_iter().filter(|kind| kind.presence() != Presence::Always) {
        let (name, tensors) = (kind.name(0), given.tensor(kind));
        if !is_given(op.flags, kind, tensors)? {
            continue;
        }
        let count = if kind.is_of_weight() { weights } else { 1 };
        for weight in 0..count {
            // SAFETY: the caller's flags say that this operand's tensors are there, one a weight.
            let tensor = unsafe { of_weight(name, tensors, weight, count, location) }?;
            operands.set(kind, weight, tensor);
        }
    }
    operands.constant_weights = match given.constant_weights {
        0 => false,
        1 => true,
        other => {
            let words = format!("operands.constant_weights = {other}: give 0 or 1");
            return Err(Error::operand(words));
        }
    };
    // SAFETY: as the caller vouches.
    unsafe { op.op.run(&operands, stream) }.map_err(messages::of_call)
}
