//! Ops.

use crate::comm::{InUse, OpDefaults, flux_comm};
use crate::error::{Error, flux_status, guard};
use crate::handle::{Kind, Structure, copy_text, given, here, structure, write};
use crate::tensor::{dtype, flux_operands, flux_tensor, of_weight, operand};
use flux_ops::binding::{Handles, NamedActivation};
use flux_ops::{
    BuildError, CallError, DType, EpilogueSpec, FusedLinear, Location, MAX_WEIGHTS, NormSpec,
    Numerics, OpKind, OpSpec, Operand, Operands, Partials, Presence, ProblemError, Rank, Scales,
    WeightLayout,
};
use flux_transport::Stream;
use std::ffi::{c_char, c_void};
use std::ops::Range;

/// One rank's part of a fused linear layer. It holds no weights: one op serves every layer with its
/// options.
#[derive(Debug)]
pub struct flux_op {
    _opaque: [u8; 0],
}

/// The kinds of ops. Extents `m`, `n` and `k` are global, and rank `r` has `m_r` rows:
/// flux_op_rows. It has `n_r` columns or `k_r` elements of the inner extent: flux_op_columns,
/// flux_op_inner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_op_kind {
    /// Column-parallel: x[m_r, k], w[n_r, k], y[m, n_r] = act(gather(x) * w^T + bias).
    FLUX_ALL_GATHER_GEMM = 1,
    /// Row-parallel: x[m, k_r], w[n, k_r], y[m_r, n] = scatter(sum of x * w^T) + bias + residual.
    FLUX_GEMM_REDUCE_SCATTER = 2,
    /// Row-parallel: x[m, k_r], w[n, k_r], y[m, n] = sum of x * w^T + bias + residual, the same
    /// bits on every rank.
    FLUX_GEMM_ALL_REDUCE = 3,
}

/// Element types of operands. Products are added in fp32. Partial sums travel between ranks in this
/// type, or in fp32 with FLUX_OP_F32_PARTIALS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_dtype {
    /// bfloat16.
    FLUX_BF16 = 1,
    /// IEEE half precision.
    FLUX_FP16 = 2,
    /// 8 bits, E4M3, 448 at most: of `x` and `w`, which have scales, and of normalised rows. On a
    /// GPU of compute capability 8.9 or later.
    FLUX_E4M3 = 3,
    /// IEEE single precision: of scales alone.
    FLUX_FP32 = 4,
}

/// The fp32 factors of operands of FLUX_E4M3: an element is its code times its scale. Extents are
/// those of a rank's `x` and `w[n, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_scales {
    /// None.
    FLUX_SCALES_NONE = 0,
    /// scale_x[1, 1], the same on all ranks that gather `x`, and scale_w[1, 1].
    FLUX_SCALES_TENSOR = 1,
    /// One of each row: scale_x[rows, 1], scale_w[1, n].
    FLUX_SCALES_ROW = 2,
    /// One of each 1 x 128 of `x` and 128 x 128 of `w`: scale_x[rows, k/128],
    /// scale_w[n/128, k/128].
    FLUX_SCALES_BLOCK = 3,
}

/// Activations of FLUX_ALL_GATHER_GEMM.
///
/// Those with gates multiply an activated gate by its up, and `y` has n_r/2 columns. Of the n_r
/// rows of a rank's weight, and of its bias, half are gates and half are ups. Gates come first, or
/// with INTERLEAVED each before its up. n_r is then a multiple of 16, and FLUX_OP_WEIGHTS_KN is
/// refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum flux_activation {
    /// None.
    FLUX_ACTIVATION_NONE = 0,
    /// GELU in its tanh form.
    FLUX_ACTIVATION_GELU = 1,
    /// v / (1 + exp(-v)).
    FLUX_ACTIVATION_SILU = 2,
    /// max(v, 0).
    FLUX_ACTIVATION_RELU = 3,
    /// GELU of gates.
    FLUX_ACTIVATION_GEGLU = 4,
    /// SiLU of gates.
    FLUX_ACTIVATION_SWIGLU = 5,
    /// ReLU of gates.
    FLUX_ACTIVATION_REGLU = 6,
    /// GELU of gates, each before its up.
    FLUX_ACTIVATION_GEGLU_INTERLEAVED = 7,
    /// SiLU of gates, each before its up.
    FLUX_ACTIVATION_SWIGLU_INTERLEAVED = 8,
    /// ReLU of gates, each before its up.
    FLUX_ACTIVATION_REGLU_INTERLEAVED = 9,
}

/// Calls add a bias.
pub const FLUX_OP_BIAS: u32 = 1;
/// Calls add a residual before the one rounding. Not of FLUX_ALL_GATHER_GEMM.
pub const FLUX_OP_RESIDUAL: u32 = 2;
/// Calls also write the normalised rows of `y`: y / sqrt(mean(y^2) + eps) * gain. Not of
/// FLUX_ALL_GATHER_GEMM.
pub const FLUX_OP_RMS_NORM: u32 = 4;
/// Calls may be captured in CUDA graphs. Such graphs are destroyed before the communicator, and the
/// operands of their calls stay where they are until then.
pub const FLUX_OP_CAPTURES: u32 = 8;
/// The weight is stored as `[k, n]`, of this rank's extents, in place of `[n, k]`.
pub const FLUX_OP_WEIGHTS_KN: u32 = 16;
/// A row of the result has the same bits whatever rows share its call. They then depend on the
/// row's values, the weights, `n`, `k`, the number of ranks and the element type alone.
pub const FLUX_OP_BATCH_INVARIANT: u32 = 32;
/// Ranks send partial sums in fp32, in place of the operands' type: the result is rounded once, and
/// twice the bytes of partial sums are sent. Not of FLUX_ALL_GATHER_GEMM.
pub const FLUX_OP_F32_PARTIALS: u32 = 64;
/// With FLUX_E4M3 and scales of tensors or rows: tensor cores add all products, and keep fewer bits
/// of sums than fp32. Sums leave them every 128 elements of `k` otherwise.
pub const FLUX_OP_FAST_ACCUMULATION: u32 = 128;
/// Of an op with scales: none of the caller's flags.
const SCALED: u32 = 1 << 31;
/// Of an op whose normalised rows have one scale, or scales of their own: none of the caller's.
const STATIC_NORM: u32 = 1 << 30;
const QUANTIZED_NORM: u32 = 1 << 29;
const FLAGS: u32 = FLUX_OP_BIAS
    | FLUX_OP_RESIDUAL
    | FLUX_OP_RMS_NORM
    | FLUX_OP_CAPTURES
    | FLUX_OP_WEIGHTS_KN
    | FLUX_OP_BATCH_INVARIANT
    | FLUX_OP_F32_PARTIALS
    | FLUX_OP_FAST_ACCUMULATION;

/// The flag with which an op takes an operand, and its name.
const fn flag_of(operand: Operand) -> Option<(u32, &'static str)> {
    match operand {
        Operand::Bias => Some((FLUX_OP_BIAS, "FLUX_OP_BIAS")),
        Operand::Residual => Some((FLUX_OP_RESIDUAL, "FLUX_OP_RESIDUAL")),
        Operand::Gain | Operand::YNorm => Some((FLUX_OP_RMS_NORM, "FLUX_OP_RMS_NORM")),
        Operand::ScaleX | Operand::ScaleW => Some((SCALED, "options.scales")),
        Operand::NormScale => Some((STATIC_NORM, "FLUX_SCALES_TENSOR as options.norm_scales")),
        Operand::YNormScale => {
            Some((QUANTIZED_NORM, "FLUX_SCALES_ROW or FLUX_SCALES_BLOCK as options.norm_scales"))
        }
        Operand::X | Operand::W | Operand::Y | Operand::XFull => None,
    }
}

/// Most weights of an op.
pub const FLUX_MAX_WEIGHTS: usize = 4;
const _: () = assert!(FLUX_MAX_WEIGHTS == MAX_WEIGHTS);

/// What an op is created for; the same on every rank.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flux_op_options {
    /// sizeof(flux_op_options).
    pub size: usize,
    /// A flux_op_kind.
    pub kind: i32,
    /// A flux_dtype: of `x` and `w`.
    pub dtype: i32,
    /// Most rows of a call, of all ranks together.
    pub max_m: usize,
    /// Output features of all ranks together, a multiple of 8, with gates of 16; of FLUX_E4M3 twice
    /// as many, with FLUX_SCALES_BLOCK of 128 and 256. Of FLUX_ALL_GATHER_GEMM at least as many for
    /// each rank.
    pub n: usize,
    /// Inner features of all ranks together, a multiple of 8, of FLUX_E4M3 of 16, with
    /// FLUX_SCALES_BLOCK of 128. Of others than FLUX_ALL_GATHER_GEMM at least as many for each rank.
    pub k: usize,
    /// Of FLUX_ALL_GATHER_GEMM with several weights, such as queries, keys and values, which share
    /// the gathered rows: the columns of each, `n` in all, then zeros. Zeros for one weight. Ranks
    /// split each weight on its own: flux_op_weight_columns. Gates and FLUX_OP_WEIGHTS_KN are
    /// refused.
    pub columns: [usize; FLUX_MAX_WEIGHTS],
    /// FLUX_OP_BIAS and others, or 0.
    pub flags: u32,
    /// A flux_activation.
    pub activation: i32,
    /// The eps of FLUX_OP_RMS_NORM; else 0.
    pub rms_norm_eps: f32,
    /// A flux_scales, of FLUX_E4M3; else 0.
    pub scales: i32,
    /// A flux_dtype, of FLUX_E4M3: that of `y` and of what is added to it. Else 0, for `dtype`.
    pub output: i32,
    /// A flux_scales, with FLUX_OP_RMS_NORM: those of `y_norm`, which then is FLUX_E4M3, ready to
    /// be `x` of the next op. `n` is a multiple of 16, with FLUX_SCALES_BLOCK of 128, and a GPU has
    /// compute capability 8.9 or later. Else 0, for a `y_norm` of the type of `y`.
    pub norm_scales: i32,
}

// SAFETY: numbers.
unsafe impl Structure for flux_op_options {
    const NAME: &'static str = "options";
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

impl flux_op_options {
    fn spec(&self, defaults: OpDefaults) -> Result<OpSpec, Error> {
        let kind = match self.kind {
            1 => OpKind::AllGatherGemm,
            2 => OpKind::GemmReduceScatter,
            3 => OpKind::GemmAllReduce,
            other => {
                return Err(Error::argument(format!(
                    "options.kind = {other} is no flux_op_kind: give FLUX_ALL_GATHER_GEMM or \
                     another"
                )));
            }
        };
        let named = usize::try_from(self.activation).ok().and_then(NamedActivation::numbered);
        let unknown = || {
            Error::argument(format!(
                "options.activation = {} is no flux_activation",
                self.activation
            ))
        };
        let NamedActivation { activation, gates, .. } = named.ok_or_else(unknown)?;
        if self.flags & !FLAGS != 0 {
            return Err(Error::argument(format!(
                "options.flags = {:#x}: this library knows {FLAGS:#x}",
                self.flags
            )));
        }
        let has = |flag| self.flags & flag != 0;
        if !has(FLUX_OP_RMS_NORM) && self.rms_norm_eps != 0.0 {
            return Err(Error::argument(format!(
                "options.rms_norm_eps = {} without FLUX_OP_RMS_NORM: give both or neither",
                self.rms_norm_eps
            )));
        }
        let known = scales(self.norm_scales);
        let norm_scales = known
            .filter(|&known| known == Scales::None || has(FLUX_OP_RMS_NORM))
            .ok_or_else(|| {
                Error::argument(format!(
                    "options.norm_scales = {}: give a flux_scales with FLUX_OP_RMS_NORM, else 0",
                    self.norm_scales
                ))
            })?;
        let several = self.columns.iter().take_while(|&&columns| columns > 0).count();
        if self.columns[several..].iter().any(|&columns| columns > 0) {
            return Err(Error::argument(format!(
                "options.columns[{several}] = 0 before other columns: give zeros after those of \
                 all weights"
            )));
        }
        let mut spec = OpSpec::new(kind, self.max_m, self.n, self.k, self.numerics()?);
        if has(FLUX_OP_F32_PARTIALS) {
            spec.numerics.partials = Partials::F32;
        }
        if has(FLUX_OP_WEIGHTS_KN) {
            spec.weights = WeightLayout::Kn;
        }
        if has(FLUX_OP_CAPTURES) {
            // SAFETY: the flag asks for what captures need.
            unsafe { spec.allow_captures() };
        }
        spec.columns = (several > 0).then(|| self.columns[..several].to_vec());
        spec.epilogue = EpilogueSpec {
            operands: Operand::optional()
                .filter(|&operand| flag_of(operand).is_some_and(|(flag, _)| has(flag)))
                .collect(),
            activation,
            gates,
            rms_norm: has(FLUX_OP_RMS_NORM)
                .then(|| NormSpec { eps: self.rms_norm_eps.into(), scales: norm_scales }),
        };
        spec.batch_invariant = has(FLUX_OP_BATCH_INVARIANT);
        spec.launch.sm_margin = defaults.sm_margin;
        spec.max_workspace = defaults.max_workspace;
        Ok(spec)
    }

    /// Element types, with scales and outputs of 8-bit operands alone.
    fn numerics(&self) -> Result<Numerics, Error> {
        let dtype = dtype("options.dtype", self.dtype)?;
        let numerics = match (dtype, scales(self.scales), self.output) {
            (DType::E4m3, Some(scales), output) => {
                Numerics::e4m3(scales, self::dtype("options.output", output)?)
            }
            (DType::Bf16 | DType::F16, Some(Scales::None), 0) => dtype.into(),
            _ => Numerics::e4m3(Scales::None, dtype),
        };
        let fast_accumulation = self.flags & FLUX_OP_FAST_ACCUMULATION != 0;
        let numerics = Numerics { fast_accumulation, ..numerics };
        if numerics.is_supported() {
            return Ok(numerics);
        }
        Err(Error::argument(format!(
            "options.dtype = {}, scales = {}, output = {}, flags = {:#x}: give FLUX_E4M3 with a \
             flux_scales and the output FLUX_BF16 or FLUX_FP16, or another dtype with 0 for both; \
             FLUX_OP_FAST_ACCUMULATION with FLUX_SCALES_TENSOR or FLUX_SCALES_ROW alone",
            self.dtype, self.scales, self.output, self.flags
        )))
    }
}

/// The form of scales with this number.
fn scales(number: i32) -> Option<Scales> {
    usize::try_from(number).ok().and_then(|at| Scales::ALL.get(at).copied())
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
        let built = FusedLinear::build(spec, &comm.comm()?.comm).map_err(built_in_c)?;
        let made = {
            let scaled = if options.scales == 0 { 0 } else { SCALED };
            let norm = match scales(options.norm_scales) {
                Some(Scales::Tensor) => STATIC_NORM,
                Some(Scales::Row | Scales::Block) => QUANTIZED_NORM,
                Some(Scales::None) | None => 0,
            };
            let flags = options.flags | scaled | norm;
            OPS.keep(Op { op: built, flags, max_m: options.max_m, comm })
        };
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
        op.op.prepare(rows).map_err(in_c)
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
    unsafe { part(op, rank, first, count, |op, rank| op.rows(m, rank).map_err(in_c)) }
}

/// The columns of all `n` that a rank has: the rows of its `w`, and the columns of its `y`, of
/// which it has half with gates. All but of FLUX_ALL_GATHER_GEMM. There they are split in groups of
/// 8, of which the first ranks may have one more. Of several weights those of the first.
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
/// FLUX_ALL_GATHER_GEMM. Of others they are split in groups of 8, of which the first ranks may have
/// one more.
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
    unsafe { op.op.run(&operands, stream) }.map_err(in_c)
}

/// The error of a call, by the names of this interface where the Rust ones differ.
fn in_c(error: CallError) -> Error {
    match error {
        CallError::Captured => Error::operand(
            "the stream is in capture, and the op was created without FLUX_OP_CAPTURES: create it \
             with that",
        ),
        CallError::NotPrepared { m } => Error::operand(format!(
            "a call with m = {m} cannot be captured yet: call flux_op_prepare with it before the \
             capture"
        )),
        error @ CallError::Shape { .. } => {
            const NAMES: [(&str, &str); 4] = [
                ("op.columns(rank)", "flux_op_columns"),
                ("op.inner(rank)", "flux_op_inner"),
                ("op.weight_columns(weight, rank)", "flux_op_weight_columns"),
                ("an op built with weights(WeightLayout::Kn)", "an op with FLUX_OP_WEIGHTS_KN"),
            ];
            let words = error.to_string();
            Error::operand(NAMES.iter().fold(words, |words, (rust, c)| words.replace(rust, c)))
        }
        error => error.into(),
    }
}

/// The error of a build, by the names of this interface where the Rust ones differ.
fn built_in_c(error: BuildError) -> Error {
    match error {
        BuildError::GatedWeights { .. } => Error::operand(
            "weights of gates and ups are read as [n, k]: create the op without FLUX_OP_WEIGHTS_KN",
        ),
        // A weight's columns have the name of their option.
        BuildError::Problem(
            ref problem @ (ProblemError::Alignment { name, .. }
            | ProblemError::TooSmall { name, .. }),
        ) if name.len() > 1 => {
            Error::operand(problem.to_string().replace(name, &name.replace('n', "options.columns")))
        }
        BuildError::Problem(ProblemError::OneWeight { what }) => {
            Error::operand(format!("{what} takes one weight: give zeros in options.columns"))
        }
        BuildError::SeveralWeights { .. } => Error::operand(
            "several weights are read as [n, k]: create the op without FLUX_OP_WEIGHTS_KN",
        ),
        BuildError::NoInvariantPlan { problem, transport } => Error::new(
            flux_status::FLUX_ERROR_BUILD,
            format!(
                "no plan of {problem} over the {transport} transport adds up alike for every m: \
                 create the op without FLUX_OP_BATCH_INVARIANT, or connect over another transport"
            ),
        ),
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::flux_last_error_message;
    use flux_ops::{DType, Problem, WorldSize};
    use flux_transport::TransportKind;
    use std::ffi::CStr;

    #[test]
    fn an_op_that_has_no_invariant_plan_names_the_flag() {
        let problem =
            Problem::new(OpKind::GemmAllReduce, 8, 16, 16, DType::Bf16, WorldSize::new(2).unwrap())
                .unwrap();
        let error = BuildError::NoInvariantPlan { problem, transport: TransportKind::Mixed };
        assert_eq!(guard(|| Err(built_in_c(error))), flux_status::FLUX_ERROR_BUILD);
        // SAFETY: the message of this thread, which makes no call meanwhile.
        let said = unsafe { CStr::from_ptr(flux_last_error_message()) }.to_str().unwrap();
        assert!(
            said.ends_with(
                "create the op without FLUX_OP_BATCH_INVARIANT, or connect over another transport"
            ),
            "{said}"
        );
    }
}
