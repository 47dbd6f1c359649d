//! The numbers of an op: element types of operands, partial sums and outputs.
//!
//! Invariant: sizes, alignment and rounding bounds follow from here. Products are added in fp32,
//! whatever the types.

use std::fmt;
use std::str::FromStr;

/// Bytes of a vector: kernels move operands, partial sums and outputs in these.
pub const VECTOR_BYTES: u32 = 16;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16: 8 exponent bits, 8 significant bits.
    Bf16,
    /// IEEE 754 binary16: 5 exponent bits, 11 significant bits.
    F16,
}

impl DType {
    /// Every type.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::F16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
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
        }
    }

    /// Unit roundoff of a conversion from fp32, round to nearest: half the distance from 1 to the
    /// next number.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::Bf16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
        }
    }

    /// Half the distance between the smallest numbers: the error of a conversion next to 0.
    pub const fn least_roundoff(self) -> f64 {
        // 2^-134 and 2^-25.
        match self {
            Self::Bf16 => f64::from_bits((1023 - 134) << 52),
            Self::F16 => f64::from_bits((1023 - 25) << 52),
        }
    }

    /// The name used in reports and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
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

/// Element type in which ranks send partial sums to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Partials {
    /// The output's type: each rank's partial sum is rounded before it is sent.
    #[default]
    Output,
    /// fp32: no rounding before the sum of all ranks.
    F32,
}

/// Element types of an op. The text is the operand's name, `:` and the output's name if that is
/// another type, and `+f32` for partial sums in fp32.
///
/// ```
/// use flux_core::{DType, Numerics, Partials};
/// let numerics = Numerics::from(DType::Bf16);
/// assert_eq!((numerics.to_string(), numerics.partial_bytes()), ("bf16".to_owned(), 2));
/// let exact = numerics.with_partials(Partials::F32);
/// assert_eq!((exact.to_string().parse(), exact.partial_bytes()), (Ok(exact), 4));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Of `x` and `w`.
    pub operand: DType,
    /// Of partial sums between ranks. An AllGather-GEMM has none.
    pub partials: Partials,
    /// Of `y`, and of what is added to it or normalised from it.
    pub output: DType,
}

/// What stands behind the types in a text with fp32 partial sums.
const F32_PARTIALS: &str = "+f32";

impl Numerics {
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
    /// whole vectors.
    pub const fn row_multiple(self) -> u32 {
        let (operand, output) = (self.operand.per_vector(), self.output.per_vector());
        if operand > output { operand } else { output }
    }

    /// Divisor of `n` with gates, which is split in such groups: vectors of gates and of their ups.
    pub const fn gated_multiple(self) -> u32 {
        2 * self.row_multiple()
    }

    /// Whether an op with these numbers takes as long as one with `other`.
    pub fn takes_as_long_as(self, other: Self) -> bool {
        let sizes = |of: Self| (of.operand.bytes(), of.partial_bytes(), of.output.bytes());
        self.partials == other.partials && sizes(self) == sizes(other)
    }
}

/// Operands and outputs of one type, in which partial sums are sent, too.
impl From<DType> for Numerics {
    fn from(dtype: DType) -> Self {
        Self { operand: dtype, partials: Partials::Output, output: dtype }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operand, partials, output } = *self;
        write!(f, "{operand}")?;
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
    DType::ALL.map(DType::name).join(" or ")
}

impl FromStr for Numerics {
    type Err = NumericsError;

    fn from_str(text: &str) -> Result<Self, NumericsError> {
        let (types, partials) = text
            .strip_suffix(F32_PARTIALS)
            .map_or((text, Partials::Output), |types| (types, Partials::F32));
        let (operand, output) = types.split_once(':').unwrap_or((types, types));
        let named = |name| DType::ALL.into_iter().find(|dtype| dtype.name() == name);
        match (named(operand), named(output)) {
            (Some(operand), Some(output)) => Ok(Self { operand, partials, output }),
            _ => Err(NumericsError { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Numerics> {
        DType::ALL.into_iter().flat_map(|operand| {
            DType::ALL.into_iter().flat_map(move |output| {
                [Partials::Output, Partials::F32].map(|partials| Numerics {
                    operand,
                    partials,
                    output,
                })
            })
        })
    }

    #[test]
    fn every_text_is_read_back() {
        for numerics in all() {
            assert_eq!(numerics.to_string().parse(), Ok(numerics));
        }
        for text in ["", "f32", "bf16:", ":bf16", "bf16+f16", "bf16 +f32"] {
            let error = text.parse::<Numerics>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} names no element types: use bf16 or")));
        }
    }

    #[test]
    fn rows_of_the_least_extents_are_whole_vectors() {
        for numerics in all() {
            for bytes in [numerics.operand.bytes(), numerics.output.bytes()] {
                let row = numerics.row_multiple() * bytes as u32;
                assert!(row.is_multiple_of(VECTOR_BYTES), "{numerics}");
            }
        }
    }

    #[test]
    fn half_the_least_number_is_the_error_next_to_zero() {
        let bits = DType::ALL.map(|dtype| dtype.least_roundoff().to_bits());
        assert_eq!(bits, [-134, -25].map(|power| 2_f64.powi(power).to_bits()));
    }
}
