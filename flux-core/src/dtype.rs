//! Element types of the operands.
//!
//! Invariant: every type is two bytes wide and is multiplied with fp32 accumulation.

use std::fmt;

/// Element type of `x`, `w` and `y`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// bfloat16: 8 exponent bits, 8 significant bits.
    Bf16,
    /// IEEE 754 binary16: 5 exponent bits, 11 significant bits.
    F16,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        2
    }

    /// Unit roundoff of a conversion from fp32, round to nearest: half the distance from 1 to the
    /// next number.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::Bf16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
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

/// Element type in which ranks send partial sums to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Partials {
    /// The op's element type: each rank's partial sum is rounded before it is sent.
    #[default]
    OpDType,
    /// fp32: twice the bytes, and no rounding before the sum of all ranks.
    F32,
}

impl Partials {
    /// Bytes of one element, of an op of `dtype`.
    pub const fn bytes(self, dtype: DType) -> usize {
        match self {
            Self::OpDType => dtype.bytes(),
            Self::F32 => size_of::<f32>(),
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
