//! The operands of a call: one table of what is told of each, and lists with a value for each.
//!
//! Invariant: names, shapes, element types and options of operands are written here alone. Checks,
//! errors, both executors and the faces for other languages walk the table.

mod list;
mod quantized;
mod shapes;

pub use list::{OperandList, OperandSet};
pub use quantized::QuantizedRows;
pub use shapes::Shapes;

use flux_core::problem::MAX_WEIGHTS;
use flux_core::{DType, ElementType, Numerics, OpKind, Scales};

/// An operand of a call.
///
/// ```
/// use flux_kernels::Operand;
/// assert_eq!([0, 2].map(|weight| Operand::Bias.name(weight)), ["bias", "bias[2]"]);
/// assert_eq!(Operand::named("bias[2]"), Some((Operand::Bias, 2)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// This rank's part of `x`.
    X,
    /// This rank's part of a weight.
    W,
    /// Scales of this rank's part of `x`.
    ScaleX,
    /// Scales of this rank's part of a weight.
    ScaleW,
    /// One row, added to every row of a weight's result.
    Bias,
    /// Added to the result, which may be the same memory.
    Residual,
    /// One row of factors, of a norm.
    Gain,
    /// The given scale of all normalised rows.
    NormScale,
    /// The result of a weight.
    Y,
    /// The normalised rows of the result.
    YNorm,
    /// Where the scales of normalised rows or their blocks go, if not behind the rows.
    YNormScale,
    /// Where all rows of `x` go.
    XFull,
}

/// The extents of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Of the rank's `x`.
    X,
    /// Of the rank's part of a weight.
    W,
    /// The scales of the rank's `x`: one, one a row, or one for each block of a row.
    ScalesOfX,
    /// The scales of the rank's part of a weight: one, a row with one for each row of the weight,
    /// or one for each block.
    ScalesOfW,
    /// One row: a value for each row of the rank's weight as `[n, k]`.
    Columns,
    /// Of the rank's `y`.
    Result,
    /// Of the rank's normalised rows, with the scales behind each.
    Normalised,
    /// One number.
    One,
    /// The scales of the rank's normalised rows apart from these: a row for each group of columns.
    ScalesOfNormalised,
    /// All rows of `x`, with the scales behind each.
    Gathered,
}

impl Extent {
    /// Whether it is one row, whatever the rows of a call.
    pub const fn is_vector(self) -> bool {
        matches!(self, Self::Columns)
    }

    /// Whether it has a row for each of a call, or of this rank's share of them.
    pub const fn has_rows_of_call(self, numerics: Numerics) -> bool {
        match self {
            // Scales apart have a column for each row of a call.
            Self::W | Self::ScalesOfW | Self::Columns | Self::One | Self::ScalesOfNormalised => {
                false
            }
            Self::ScalesOfX => !matches!(numerics.scales, Scales::Tensor),
            Self::X | Self::Result | Self::Normalised | Self::Gathered => true,
        }
    }
}

/// When a call brings an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Always.
    Always,
    /// If operands have scales.
    Scales,
    /// If the op was built with the option of the operand's name: the epilogue reads it.
    Option,
    /// If the op was built with a norm.
    Norm,
    /// If normalised rows have one scale.
    NormScale,
    /// If normalised rows have scales of their own, and the caller wants them apart.
    NormScales,
    /// If this rank wants it.
    Wanted,
}

/// What is told of an operand.
struct Description {
    operand: Operand,
    names: [&'static str; MAX_WEIGHTS],
    /// Of the first of several weights, counted.
    counted: &'static str,
    of_weight: bool,
    output: bool,
    extent: Extent,
    element: fn(&Shapes<'_>) -> ElementType,
    presence: Presence,
    /// Whether ops of a kind have it.
    is_of: fn(OpKind) -> bool,
}

const X_AND_W: fn(&Shapes<'_>) -> ElementType = |of| of.problem.numerics().operand.into();
const OUTPUT: fn(&Shapes<'_>) -> ElementType = |of| of.problem.numerics().output.into();
const NORMAL: fn(&Shapes<'_>) -> ElementType = |of| {
    if of.norm.scales == Scales::None { OUTPUT(of) } else { DType::E4m3.into() }
};
const SCALE: fn(&Shapes<'_>) -> ElementType = |_| ElementType::F32;
const IN: bool = false;
const OUT: bool = true;
const EVERY: fn(OpKind) -> bool = |_| true;
const REDUCES: fn(OpKind) -> bool = OpKind::reduces;
const GATHERS: fn(OpKind) -> bool = OpKind::gathers;

/// A row of the table: `once` a call, or `each` weight.
macro_rules! row {
    ($operand:ident once $name:literal $($rest:ident)+) => {
        row!($operand, [$name; MAX_WEIGHTS], $name, false, $($rest)+)
    };
    ($operand:ident each $name:literal $($rest:ident)+) => {
        row!(
            $operand,
            [$name, concat!($name, "[1]"), concat!($name, "[2]"), concat!($name, "[3]")],
            concat!($name, "[0]"),
            true,
            $($rest)+
        )
    };
    ($operand:ident, $names:expr, $counted:expr, $of_weight:expr,
        $side:ident $extent:ident $element:ident $presence:ident $is_of:ident) => {
        Description {
            operand: Operand::$operand,
            names: $names,
            counted: $counted,
            of_weight: $of_weight,
            output: $side,
            extent: Extent::$extent,
            element: $element,
            presence: Presence::$presence,
            is_of: $is_of,
        }
    };
}

/// The operands in the order of the enum: inputs before outputs.
#[rustfmt::skip]
const TABLE: [Description; 12] = [
    row!(X          once "x"            IN  X                  X_AND_W Always     EVERY),
    row!(W          each "w"            IN  W                  X_AND_W Always     EVERY),
    row!(ScaleX     once "scale_x"      IN  ScalesOfX          SCALE   Scales     EVERY),
    row!(ScaleW     each "scale_w"      IN  ScalesOfW          SCALE   Scales     EVERY),
    row!(Bias       each "bias"         IN  Columns            OUTPUT  Option     EVERY),
    row!(Residual   once "residual"     IN  Result             OUTPUT  Option     REDUCES),
    row!(Gain       once "gain"         IN  Columns            OUTPUT  Norm       REDUCES),
    row!(NormScale  once "norm_scale"   IN  One                SCALE   NormScale  REDUCES),
    row!(Y          each "y"            OUT Result             OUTPUT  Always     EVERY),
    row!(YNorm      once "y_norm"       OUT Normalised         NORMAL  Norm       REDUCES),
    row!(YNormScale once "y_norm_scale" OUT ScalesOfNormalised SCALE   NormScales REDUCES),
    row!(XFull      once "x_full"       OUT Gathered           X_AND_W Wanted     GATHERS),
];

impl Operand {
    /// Every one, inputs before outputs.
    pub const ALL: [Self; TABLE.len()] = {
        let mut all = [Self::X; TABLE.len()];
        let mut row = 0;
        while row < all.len() {
            all[row] = TABLE[row].operand;
            assert!(all[row] as usize == row, "a row is at the place of its operand");
            row += 1;
        }
        all
    };

    const fn described(self) -> &'static Description {
        const ROWS: &[Description] = &TABLE;
        &ROWS[self as usize]
    }

    /// Those of the epilogue: an op has each by the option of its name.
    pub fn optional() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|operand| operand.presence() == Presence::Option)
    }

    /// Its name, of a further weight with the number.
    ///
    /// # Panics
    /// If `weight` is not below [`MAX_WEIGHTS`].
    pub const fn name(self, weight: usize) -> &'static str {
        self.described().names[weight]
    }

    /// Its name with the weight's number, from 0 on; of a call that of the operand.
    ///
    /// # Panics
    /// If `weight` is not below [`MAX_WEIGHTS`].
    pub const fn counted_name(self, weight: usize) -> &'static str {
        if weight == 0 { self.described().counted } else { self.name(weight) }
    }

    /// The operand with this name, counted or not, and its weight.
    pub fn named(name: &str) -> Option<(Self, usize)> {
        let weight = |row: &Description| {
            let is_counted = row.counted == name;
            if is_counted { Some(0) } else { row.names.iter().position(|known| *known == name) }
        };
        TABLE.iter().find_map(|row| Some((row.operand, weight(row)?)))
    }

    /// Whether each weight has its own.
    pub const fn is_of_weight(self) -> bool {
        self.described().of_weight
    }

    /// Whether the call writes it.
    pub const fn is_output(self) -> bool {
        self.described().output
    }

    /// Its extents.
    pub const fn extent(self) -> Extent {
        self.described().extent
    }

    /// When a call brings it.
    pub const fn presence(self) -> Presence {
        self.described().presence
    }

    /// Whether ops of this kind have it.
    pub fn is_of(self, op: OpKind) -> bool {
        (self.described().is_of)(op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_of_one_operand_and_weight() {
        for operand in Operand::ALL {
            let weights = if operand.is_of_weight() { MAX_WEIGHTS } else { 1 };
            for weight in 0..weights {
                for name in [operand.name(weight), operand.counted_name(weight)] {
                    assert_eq!(Operand::named(name), Some((operand, weight)));
                }
            }
        }
        for name in ["", "w[4]", "residual[0]", "residual[1]"] {
            assert_eq!(Operand::named(name), None, "{name}");
        }
    }

    #[test]
    fn inputs_come_before_outputs() {
        assert!(Operand::ALL.is_sorted_by_key(|operand| operand.is_output()));
    }
}
