//! What an op is created for.

use crate::comm::OpDefaults;
use crate::error::Error;
use crate::handle::Structure;
use crate::tensor::dtype;
use flux_ops::binding::NamedActivation;
use flux_ops::{
    DType, ElementType, EpilogueSpec, MAX_WEIGHTS, NormSpec, Numerics, OpKind, OpSpec, Operand,
    Partials, Scales, WeightLayout,
};

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

/// Element types of operands. Products are added in fp32. Partial sums travel between ranks in the
/// type of `y`, or in fp32 with FLUX_OP_F32_PARTIALS.
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

/// The memory that each flux_dtype is of.
pub(crate) const ELEMENTS: [(flux_dtype, ElementType); 4] = [
    (flux_dtype::FLUX_BF16, ElementType::Matrix(DType::Bf16)),
    (flux_dtype::FLUX_FP16, ElementType::Matrix(DType::F16)),
    (flux_dtype::FLUX_E4M3, ElementType::Matrix(DType::E4m3)),
    (flux_dtype::FLUX_FP32, ElementType::F32),
];

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
/// Ranks send partial sums in fp32, in place of the result's type: the result is rounded once, and
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
pub(crate) const fn flag_of(operand: Operand) -> Option<(u32, &'static str)> {
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
    /// FLUX_SCALES_BLOCK of 128. Of others than FLUX_ALL_GATHER_GEMM at least as many for each
    /// rank.
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

impl flux_op_options {
    /// The op of these options, of a communicator with these defaults.
    pub(crate) fn spec(&self, defaults: OpDefaults) -> Result<OpSpec, Error> {
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

    /// The caller's flags, and those of operands that other fields ask for: see `flag_of`.
    pub(crate) fn operand_flags(&self) -> u32 {
        let scaled = if self.scales == 0 { 0 } else { SCALED };
        let norm = match scales(self.norm_scales) {
            Some(Scales::Tensor) => STATIC_NORM,
            Some(Scales::Row | Scales::Block) => QUANTIZED_NORM,
            Some(Scales::None) | None => 0,
        };
        self.flags | scaled | norm
    }

    /// Element types, with scales and outputs of 8-bit operands alone.
    fn numerics(&self) -> Result<Numerics, Error> {
        let dtype = dtype("options.dtype", self.dtype)?;
        let numerics = match (scales(self.scales), self.output) {
            (Some(scales), output) if dtype.is_quantized() => {
                Numerics::scaled(dtype, scales, self::dtype("options.output", output)?)
            }
            (Some(Scales::None), 0) => dtype.into(),
            // Refused below.
            _ => Numerics::scaled(dtype, Scales::None, DType::E4m3),
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
