//! The epilogue of an output's fp32 value, before its one rounding: `y = act(v + bias)`.
//!
//! Invariant: whoever stores the element applies it once, to the complete sum; a partial sum has
//! neither bias nor activation. `flux-kernels/cuda/common/epilogue.cuh` has the same formulas.

use flux_core::OpKind;
use std::fmt;
use std::str::FromStr;

/// The names and numbers that faces for other languages give an activation of gates.
#[derive(Clone, Copy, Debug)]
pub struct GatedNames {
    /// Of gates before ups, and its number.
    pub concatenated: (&'static str, usize),
    /// Of each gate before its up, and its number.
    pub interleaved: (&'static str, usize),
}

/// Declares the activations, each with its word and its number in other languages, and those of its
/// gates: the enum, [`Activation::ALL`], the text and all faces agree.
macro_rules! activations {
    ($(
        $(#[$attribute:meta])*
        $name:ident = $word:literal $number:literal
            $(of gates $gates:literal $concatenated:literal $interleaved:literal)?,
    )*) => {
        /// The activation of AllGather-GEMM's result, in fp32, between bias and rounding.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Activation {
            $($(#[$attribute])* $name,)*
        }

        impl Activation {
            /// Every one, in the order of their numbers.
            pub const ALL: [Self; [$($word),*].len()] = [$(Self::$name),*];

            /// Its name in commands and errors.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $word,)*
                }
            }

            /// Its number in faces for other languages, which keeps its meaning.
            pub const fn number(self) -> usize {
                match self {
                    $(Self::$name => $number,)*
                }
            }

            /// How faces for other languages name it where it is applied to gates.
            pub const fn of_gates(self) -> Option<GatedNames> {
                match self {
                    $($(Self::$name => Some(GatedNames {
                        concatenated: ($gates, $concatenated),
                        interleaved: (concat!($gates, "_interleaved"), $interleaved),
                    }),)?)*
                    _ => None,
                }
            }

            /// The name in the kernels' `enum class Activation`.
            pub(crate) const fn cuda_name(self) -> &'static str {
                match self {
                    $(Self::$name => concat!("k", stringify!($name)),)*
                }
            }
        }
    };
}

activations! {
    /// Nothing.
    #[default]
    None = "none" 0,
    /// GELU in its tanh form: `0.5 v (1 + tanh(h))` with `h = sqrt(2/pi) (v + 0.044715 v^3)`
    /// (Hendrycks and Gimpel, "Gaussian error linear units", arXiv 1606.08415).
    Gelu = "gelu" 1 of gates "geglu" 4 7,
    /// SiLU, or swish: `v / (1 + exp(-v))` (Elfwing, Uchibe, Doya, "Sigmoid-weighted linear units",
    /// arXiv 1702.03118).
    Silu = "silu" 2 of gates "swiglu" 5 8,
    /// `max(v, 0)`; a NaN stays one.
    Relu = "relu" 3 of gates "reglu" 6 9,
}

/// `2 sqrt(2/pi)`.
pub(crate) const GELU_LINEAR: f32 = 1.595_769_121_605_730_8_f64 as f32;
/// `2 sqrt(2/pi) 0.044715`.
pub(crate) const GELU_CUBIC: f32 = 0.071_354_816_272_600_25_f64 as f32;

impl Activation {
    /// Those that an op's result can take: a sum that other ranks add to takes none.
    pub const fn of(op: OpKind) -> &'static [Self] {
        if op.gathers() { &Self::ALL } else { &[Self::None] }
    }

    /// The activation of `v`, off by at most [`Self::ERROR`]` * |v|`.
    ///
    /// GELU is computed as `v / (1 + exp(-2h))`, its equal since
    /// `1 + tanh(h) = 2 / (1 + exp(-2h))`: nothing cancels for negative `v`.
    pub fn apply(self, v: f32) -> f32 {
        match self {
            Self::Gelu => v / (1.0 + (v * (-GELU_LINEAR - GELU_CUBIC * (v * v))).exp()),
            Self::Silu => v / (1.0 + (-v).exp()),
            Self::Relu if v < 0.0 => 0.0,
            Self::None | Self::Relu => v,
        }
    }

    /// The activation by its definition, in fp64: what results are checked against.
    pub fn definition(self, v: f64) -> f64 {
        match self {
            Self::None => v,
            Self::Gelu => {
                0.5 * v
                    * (1.0
                        + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v * v * v))
                            .tanh())
            }
            Self::Silu => v / (1.0 + (-v).exp()),
            Self::Relu => v.max(0.0),
        }
    }

    /// Bound of the error of [`Self::apply`] and of the kernel's formula, in units of `|v|`.
    ///
    /// With `u = 2^-24` and `s` the logistic function, these errors add up: the exponential's
    /// argument `z` is off by at most `5 u |z|`, the exponential by `2 u` of itself, the sum by `u`
    /// and the quotient by `4 u`. An error `d` before the logistic function changes it by `s (1 -
    /// s) d`. As `s (1 - s) |z| < 0.225` and `s (1 - s) <= 0.25`, the result is off by at most `(5
    /// * 0.225 + 2 * 0.25 + 1 + 4) u |v| < 7 u |v|`.
    pub const ERROR: f64 = 7.0 / (1 << 24) as f64;

    /// Whether it rounds nothing.
    pub const fn is_exact(self) -> bool {
        match self {
            Self::None | Self::Relu => true,
            Self::Gelu | Self::Silu => false,
        }
    }

    /// Largest slope, by which an error of `v` grows: GELU's is 1.1290 (at 1.42), SiLU's 1.0999 (at
    /// 2.40).
    pub const fn slope(self) -> f64 {
        match self {
            Self::None | Self::Relu => 1.0,
            Self::Gelu => 1.13,
            Self::Silu => 1.1,
        }
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is no activation.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{word:?} is no activation: use {}", Activation::ALL.map(Activation::name).join(", "))]
pub struct NoSuchActivation {
    /// The word.
    pub word: String,
}

flux_core::debug_is_text!(NoSuchActivation);

/// From its word, as it is printed.
impl FromStr for Activation {
    type Err = NoSuchActivation;

    fn from_str(word: &str) -> Result<Self, NoSuchActivation> {
        Self::ALL
            .into_iter()
            .find(|activation| activation.name() == word)
            .ok_or_else(|| NoSuchActivation { word: word.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 2^11th float between the smallest normal number and 2^10, of both signs.
    fn floats() -> impl Iterator<Item = f32> {
        let (first, last) = (f32::MIN_POSITIVE.to_bits(), 1024f32.to_bits());
        (first..last).step_by(1 << 11).map(f32::from_bits).flat_map(|v| [v, -v])
    }

    #[test]
    fn activations_are_within_their_bound_of_the_definition() {
        for activation in Activation::ALL {
            for v in floats() {
                let (exact, found) =
                    (activation.definition(f64::from(v)), f64::from(activation.apply(v)));
                let bound = if activation.is_exact() {
                    0.0
                } else {
                    Activation::ERROR * f64::from(v.abs())
                };
                assert!(
                    (found - exact).abs() <= bound,
                    "{activation}({v:e}) = {found:e}, must be {exact:e} within {bound:e}"
                );
            }
        }
    }

    /// For positive values the gate is at least a half, so the error is a few ulp of the result.
    #[test]
    fn positive_values_are_within_three_ulp() {
        for activation in Activation::ALL.into_iter().filter(|activation| !activation.is_exact()) {
            let ulp = |v: f64| v * f64::from(f32::EPSILON);
            for v in floats().filter(|v| *v > 0.0) {
                let (exact, found) =
                    (activation.definition(f64::from(v)), f64::from(activation.apply(v)));
                assert!(
                    (found - exact).abs() <= 3.0 * ulp(exact),
                    "{activation}({v:e}) = {found:e}"
                );
            }
        }
    }

    /// Values of an independent implementation: Python's `decimal` with 50 digits.
    #[test]
    fn definitions_give_the_published_functions() {
        for (activation, v, expected) in [
            (Activation::None, -1.5, -1.5),
            (Activation::Gelu, 1.0, 0.841_191_990_608_276_7),
            (Activation::Gelu, -2.0, -0.045_402_305_912_224_98),
            (Activation::Silu, 1.0, 0.731_058_578_630_004_9),
            (Activation::Silu, -2.0, -0.238_405_844_044_235_12),
            (Activation::Relu, 1.5, 1.5),
            (Activation::Relu, -1.5, 0.0),
        ] {
            let found = activation.definition(v);
            assert!(
                (found - expected).abs() <= 1e-15,
                "{activation}({v}) = {found}, must be {expected}"
            );
        }
    }

    #[test]
    fn every_activation_is_read_as_it_is_printed() {
        for activation in Activation::ALL {
            assert_eq!(activation.to_string().parse(), Ok(activation));
        }
        let refused = "tanh".parse::<Activation>().unwrap_err();
        assert_eq!(refused.to_string(), "\"tanh\" is no activation: use none, gelu, silu, relu");
    }

    #[test]
    fn slopes_bound_every_difference() {
        for activation in Activation::ALL {
            let mut steepest: f64 = 0.0;
            for i in -8000..8000 {
                let v = f64::from(i) / 1000.0;
                steepest = steepest.max(
                    (activation.definition(v + 0.001) - activation.definition(v)).abs() / 0.001,
                );
            }
            assert!(
                steepest <= activation.slope() + 1e-9 && steepest > activation.slope() - 0.002,
                "{activation}: {steepest}"
            );
        }
    }

    #[test]
    fn what_is_no_number_stays_none_and_the_ends_are_right() {
        for activation in Activation::ALL {
            assert!(activation.apply(f32::NAN).is_nan(), "{activation}");
            let bits = |v: f32| activation.apply(v).abs().to_bits();
            assert_eq!((bits(0.0), bits(f32::MAX)), (0, f32::MAX.to_bits()), "{activation}");
            assert!(activation == Activation::None || bits(f32::MIN) == 0, "{activation}");
        }
    }
}
