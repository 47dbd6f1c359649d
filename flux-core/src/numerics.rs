//! The numbers of an op: element types of operands, partial sums and outputs.
//!
//! Invariant: sizes, alignment and rounding bounds follow from here. Products are added in fp32,
//! whatever the types.

use crate::words;
use std::fmt;
use std::str::FromStr;

/// Bytes of a vector: kernels move operands, partial sums and outputs in these.
pub const VECTOR_BYTES: u32 = 16;

/// Bytes of a cache line of a GPU. Loads of rows that begin within a sector of one take longer.
const LINE_BYTES: u32 = 128;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16: 8 exponent bits, 8 significant bits.
    Bf16,
    /// IEEE 754 binary16: 5 exponent bits, 11 significant bits.
    F16,
    /// E4M3 of the OCP 8-bit floating point specification: 4 exponent bits, 4 significant bits, no
    /// infinities, 448 at most. Of operands, which have [`Scales`], and of normalised rows for
    /// them.
    E4m3,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::Bf16, Self::F16, Self::E4m3];
    /// The types of outputs, each also of operands.
    pub const OUTPUTS: [Self; 2] = [Self::Bf16, Self::F16];
    /// The types of operands that have [`Scales`].
    pub const QUANTIZED: [Self; 1] = [Self::E4m3];

    /// Whether it is one of [`Self::QUANTIZED`].
    pub const fn is_quantized(self) -> bool {
        match self {
            Self::Bf16 | Self::F16 => false,
            Self::E4m3 => true,
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 => 1,
        }
    }

    /// Elements of a vector of [`VECTOR_BYTES`].
    pub const fn per_vector(self) -> u32 {
        VECTOR_BYTES / self.bytes() as u32
    }

    /// Operations of a tensor core in a cycle, relative to 16-bit operands.
    pub const fn relative_rate(self) -> u64 {
        match self {
            Self::Bf16 | Self::F16 => 1,
            Self::E4m3 => 2,
        }
    }

    /// Unit roundoff of a conversion from fp32, round to nearest: half the distance from 1 to the
    /// next number.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::Bf16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
            Self::E4m3 => 1.0 / 16.0,
        }
    }

    /// Half the distance between the smallest numbers: the error of a conversion next to 0.
    pub const fn least_roundoff(self) -> f64 {
        // 2^-134, 2^-25 and 2^-10.
        match self {
            Self::Bf16 => f64::from_bits((1023 - 134) << 52),
            Self::F16 => f64::from_bits((1023 - 25) << 52),
            Self::E4m3 => f64::from_bits((1023 - 10) << 52),
        }
    }

    /// The name used in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
            Self::E4m3 => "e4m3",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type of memory that a call reads or writes: one of matrices, or fp32, of which no op
/// multiplies operands.
///
/// ```
/// use flux_core::{DType, ElementType};
/// let types = [ElementType::from(DType::Bf16), ElementType::F32];
/// assert_eq!(types.map(ElementType::bytes), [2, 4]);
/// assert_eq!(types.map(|element| element.to_string()), ["bf16", "fp32"]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// Of `x`, `w` and `y`, and of what is added to `y`.
    Matrix(DType),
    /// IEEE 754 binary32.
    F32,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Matrix(dtype) => dtype.bytes(),
            Self::F32 => size_of::<f32>(),
        }
    }

    /// Elements of a vector of [`VECTOR_BYTES`].
    pub const fn per_vector(self) -> u32 {
        VECTOR_BYTES / self.bytes() as u32
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> Self {
        Self::Matrix(dtype)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Matrix(dtype) => dtype.fmt(f),
            Self::F32 => f.write_str("fp32"),
        }
    }
}

/// The fp32 factors of 8-bit operands: an element is its code times its scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Scales {
    /// None: operands of 16 bits.
    #[default]
    None,
    /// One of `x`, the same on all ranks that gather it, and one of each weight.
    Tensor,
    /// One of each row of `x` and of each row of `w`: per token and per output channel.
    Row,
    /// One of each 1 x 128 elements of `x` and of each 128 x 128 of `w`.
    Block,
}

/// Rows of `w`, and elements along `k`, that share a scale of [`Scales::Block`].
pub const SCALE_BLOCK: u32 = 128;

impl Scales {
    /// Every form.
    pub const ALL: [Self; 4] = [Self::None, Self::Tensor, Self::Row, Self::Block];
    /// Those of [`DType::QUANTIZED`].
    pub const OF_QUANTIZED: [Self; 3] = [Self::Tensor, Self::Row, Self::Block];

    /// The name used in texts and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Tensor => "tensor",
            Self::Row => "row",
            Self::Block => "block",
        }
    }

    /// Elements along `k` that share a scale, where a row has several.
    pub const fn along_k(self) -> Option<u32> {
        match self {
            Self::None | Self::Tensor | Self::Row => None,
            Self::Block => Some(SCALE_BLOCK),
        }
    }

    /// Whether sums over all of `k` are multiplied by them.
    pub const fn of_sums(self) -> bool {
        match self {
            Self::None | Self::Block => false,
            Self::Tensor | Self::Row => true,
        }
    }

    /// Scales of a row of `x` of `k` elements, of its own.
    pub const fn of_row(self, k: u32) -> u32 {
        match self {
            Self::None | Self::Tensor => 0,
            Self::Row => 1,
            Self::Block => k.div_ceil(SCALE_BLOCK),
        }
    }

    /// Bytes behind the `k` codes of a row that carries those scales: the scales, and what fills
    /// the last cache line. Each row begins with one where the first does.
    pub const fn bytes_behind_row(self, k: u32) -> u32 {
        let scales = self.of_row(k) * size_of::<f32>() as u32;
        if scales == 0 {
            return 0;
        }
        match k.saturating_add(scales).checked_next_multiple_of(LINE_BYTES) {
            Some(end) => end - k,
            None => u32::MAX - k,
        }
    }
}

impl fmt::Display for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Element type in which ranks send partial sums to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Partials {
    /// The output's type: each rank's partial sum is rounded before it is sent.
    #[default]
    Output,
    /// fp32: no rounding before the sum of all ranks.
    F32,
}

/// Element types of an op. The text is the operand's name with the form of its scales behind a
/// point, `:` and the output's name if that is another type, and `+f32` for partial sums in fp32.
///
/// ```
/// use flux_core::{DType, Numerics, Partials, Scales};
/// let numerics = Numerics::from(DType::Bf16);
/// assert_eq!((numerics.to_string(), numerics.partial_bytes()), ("bf16".to_owned(), 2));
/// let exact = numerics.with_partials(Partials::F32);
/// assert_eq!((exact.to_string().parse(), exact.partial_bytes()), (Ok(exact), 4));
/// let scaled = Numerics::e4m3(Scales::Row, DType::Bf16);
/// assert_eq!(scaled.to_string(), "e4m3.row:bf16");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Of `x` and `w`.
    pub operand: DType,
    /// Of operands in one of [`DType::QUANTIZED`].
    pub scales: Scales,
    /// Whether tensor cores add all products of 8-bit operands. They keep fewer bits than fp32, so
    /// sums leave for fp32 registers every 128 elements along `k` otherwise.
    pub fast_accumulation: bool,
    /// Of partial sums between ranks. An AllGather-GEMM has none.
    pub partials: Partials,
    /// Of `y`, and of what is added to it or normalised from it.
    pub output: DType,
}

/// What stands behind the types in a text with fp32 partial sums.
const F32_PARTIALS: &str = "+f32";
/// What stands behind the scales in a text with fast accumulation.
const FAST: &str = ".fast";

impl Numerics {
    /// Operands of this type with such scales, and outputs of that type.
    pub const fn scaled(operand: DType, scales: Scales, output: DType) -> Self {
        let partials = Partials::Output;
        Self { operand, scales, fast_accumulation: false, partials, output }
    }

    /// [`Self::scaled`] of [`DType::E4m3`].
    pub const fn e4m3(scales: Scales, output: DType) -> Self {
        Self::scaled(DType::E4m3, scales, output)
    }

    /// Whether ops have these types: outputs of 16 bits, operands of the same type or of 8 bits
    /// with scales. Where a row has several, sums leave the tensor cores for each.
    pub const fn is_supported(self) -> bool {
        let has_scales = !matches!(self.scales, Scales::None);
        let operands_fit = if self.operand.is_quantized() {
            has_scales && !self.output.is_quantized()
        } else {
            !has_scales && self.operand as u8 == self.output as u8
        };
        operands_fit && (self.scales.of_sums() || !self.fast_accumulation)
    }

    /// Whether sums leave the tensor cores every [`SCALE_BLOCK`] elements along `k`, for fp32
    /// registers.
    pub const fn promotes(self) -> bool {
        self.operand.is_quantized() && !self.fast_accumulation
    }

    /// The same with partial sums of another type.
    #[must_use]
    pub const fn with_partials(self, partials: Partials) -> Self {
        Self { partials, ..self }
    }

    /// Bytes of an element of a partial sum between ranks.
    pub const fn partial_bytes(self) -> usize {
        match self.partials {
            Partials::Output => self.output.bytes(),
            Partials::F32 => size_of::<f32>(),
        }
    }

    /// Unit roundoff of a partial sum that is sent: 0 in fp32.
    pub const fn partial_roundoff(self) -> f64 {
        match self.partials {
            Partials::Output => self.output.unit_roundoff(),
            Partials::F32 => 0.0,
        }
    }

    /// Divisor of `n` and `k`, which ranks split in such groups: rows of operands and outputs are
    /// whole vectors, and blocks with a scale are whole.
    pub const fn row_multiple(self) -> u32 {
        let (operand, output) = (self.operand.per_vector(), self.output.per_vector());
        match self.scales.along_k() {
            Some(elements) => elements,
            None if operand > output => operand,
            None => output,
        }
    }

    /// Divisor of `n` with gates, which is split in such groups: vectors of gates and of their ups.
    pub const fn gated_multiple(self) -> u32 {
        2 * self.row_multiple()
    }

    /// Whether an op with these numbers takes as long as one with `other`.
    pub fn takes_as_long_as(self, other: Self) -> bool {
        let sizes = |of: Self| (of.operand.bytes(), of.partial_bytes(), of.output.bytes());
        (self.partials, self.scales, self.fast_accumulation)
            == (other.partials, other.scales, other.fast_accumulation)
            && sizes(self) == sizes(other)
    }
}

/// Operands and outputs of one type, in which partial sums are sent, too. Of [`DType::QUANTIZED`] a
/// scale of a tensor, and outputs of bf16.
impl From<DType> for Numerics {
    fn from(dtype: DType) -> Self {
        if dtype.is_quantized() {
            Self::scaled(dtype, Scales::Tensor, DType::Bf16)
        } else {
            Self::scaled(dtype, Scales::None, dtype)
        }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operand, scales, fast_accumulation, partials, output } = *self;
        write!(f, "{operand}")?;
        if scales != Scales::None {
            write!(f, ".{scales}")?;
        }
        if fast_accumulation {
            f.write_str(FAST)?;
        }
        if output != operand {
            write!(f, ":{output}")?;
        }
        if partials == Partials::F32 { f.write_str(F32_PARTIALS) } else { Ok(()) }
    }
}

/// A text names no element types.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} names no element types: use {}, with {F32_PARTIALS} for fp32 partial sums",
    names()
)]
pub struct NumericsError {
    text: String,
}

crate::debug_is_text!(NumericsError);

fn names() -> String {
    let scaled = DType::QUANTIZED.into_iter().flat_map(|dtype| {
        Scales::OF_QUANTIZED.map(|scales| Numerics::scaled(dtype, scales, DType::Bf16))
    });
    words::list(DType::OUTPUTS.map(Numerics::from).into_iter().chain(scaled), "or")
}

impl FromStr for Numerics {
    type Err = NumericsError;

    fn from_str(text: &str) -> Result<Self, NumericsError> {
        let (types, partials) = text
            .strip_suffix(F32_PARTIALS)
            .map_or((text, Partials::Output), |types| (types, Partials::F32));
        let (operand, output) = types.split_once(':').unwrap_or((types, types));
        let (operand, fast_accumulation) =
            operand.strip_suffix(FAST).map_or((operand, false), |operand| (operand, true));
        let (operand, scales) = operand.split_once('.').unwrap_or((operand, Scales::None.name()));
        let named = |name| DType::ALL.into_iter().find(|dtype| dtype.name() == name);
        let scales = Scales::ALL.into_iter().find(|known| known.name() == scales);
        match (named(operand), scales, named(output)) {
            (Some(operand), Some(scales), Some(output)) => {
                Ok(Self { operand, scales, fast_accumulation, partials, output })
            }
            _ => Err(NumericsError { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantized_types_and_their_scales_are_those_without_exception() {
        assert!(DType::ALL.iter().all(|of| DType::QUANTIZED.contains(of) == of.is_quantized()));
        let scaled = Scales::ALL.into_iter().filter(|&of| of != Scales::None);
        assert!(scaled.eq(Scales::OF_QUANTIZED));
    }

    fn all() -> impl Iterator<Item = Numerics> {
        let operands = DType::ALL.into_iter().flat_map(|operand| {
            let scales = Scales::ALL.into_iter();
            scales.flat_map(move |of| [false, true].map(move |fast| (operand, of, fast)))
        });
        operands.flat_map(|(operand, scales, fast_accumulation)| {
            DType::ALL.into_iter().flat_map(move |output| {
                let of = move |partials| Numerics {
                    operand,
                    scales,
                    fast_accumulation,
                    partials,
                    output,
                };
                [Partials::Output, Partials::F32].map(of)
            })
        })
    }

    #[test]
    fn texts_of_supported_numbers_differ() {
        let texts: std::collections::BTreeSet<_> =
            all().filter(|of| of.is_supported()).map(|of| of.to_string()).collect();
        // Outputs, partial sums; of e4m3 also three forms of scales, two of them twice.
        assert_eq!(texts.len(), 2 * 2 + 2 * 2 * 5);
        for text in ["bf16:fp16", "fp16:bf16", "bf16.row:bf16", "e4m3:bf16", "e4m3.block.fast:bf16"]
        {
            assert!(!text.parse::<Numerics>().unwrap().is_supported(), "{text}");
        }
    }

    #[test]
    fn every_text_is_read_back() {
        for numerics in all().filter(|of| of.is_supported()) {
            assert_eq!(numerics.to_string().parse(), Ok(numerics));
        }
        for text in ["", "f32", "bf16:", ":bf16", "bf16+f16", "bf16 +f32"] {
            let error = text.parse::<Numerics>().unwrap_err().to_string();
            let use_those = "use bf16, fp16, e4m3.tensor:bf16, e4m3.row:bf16 or e4m3.block:bf16, \
                             with +f32 for fp32 partial sums";
            assert_eq!(error, format!("{text:?} names no element types: {use_those}"));
        }
    }

    #[test]
    fn rows_of_the_least_extents_are_whole_vectors() {
        for numerics in all().filter(|of| of.is_supported()) {
            for bytes in [numerics.operand.bytes(), numerics.output.bytes()] {
                let row = numerics.row_multiple() * bytes as u32;
                assert!(row.is_multiple_of(VECTOR_BYTES), "{numerics}");
            }
        }
    }

    #[test]
    fn half_the_least_number_is_the_error_next_to_zero() {
        let bits = DType::ALL.map(|dtype| dtype.least_roundoff().to_bits());
        assert_eq!(bits, [-134, -25, -10].map(|power| 2_f64.powi(power).to_bits()));
    }
}
