//! The epilogue of an output's fp32 value, before its one rounding: `y = act(v + bias)`.
//!
//! Invariant: whoever stores the element applies it once, to the complete sum; a partial sum has
//! neither bias nor activation. `flux-kernels/cuda/common/epilogue.cuh` has the same formulas.

use std::fmt;

/// The activation of AllGather-GEMM's result, in fp32, between bias and rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Activation {
    /// Nothing.
    #[default]
    None = 0,
    /// GELU in its tanh form: `0.5 v (1 + tanh(h))` with `h = sqrt(2/pi) (v + 0.044715 v^3)`
    /// (Hendrycks and Gimpel, "Gaussian error linear units", arXiv 1606.08415).
    Gelu = 1,
    /// SiLU, or swish: `v / (1 + exp(-v))` (Elfwing, Uchibe, Doya, "Sigmoid-weighted linear units",
    /// arXiv 1702.03118).
    Silu = 2,
    /// `max(v, 0)`; a NaN stays one.
    Relu = 3,
}

/// `2 sqrt(2/pi)`.
const GELU_LINEAR: f32 = 1.595_769_121_605_730_8_f64 as f32;
/// `2 sqrt(2/pi) 0.044715`.
const GELU_CUBIC: f32 = 0.071_354_816_272_600_25_f64 as f32;

impl Activation {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::None, Self::Gelu, Self::Silu, Self::Relu];

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
        matches!(self, Self::None | Self::Relu)
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
        f.write_str(match self {
            Self::None => "none",
            Self::Gelu => "gelu",
            Self::Silu => "silu",
            Self::Relu => "relu",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definitions, in fp64.
    fn reference(activation: Activation, v: f64) -> f64 {
        match activation {
            Activation::None => v,
            Activation::Gelu => 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044_715 * v * v * v)).tanh()),
            Activation::Silu => v / (1.0 + (-v).exp()),
            Activation::Relu => v.max(0.0),
        }
    }

    /// Every 2^11th float between the smallest normal number and 2^10, of both signs.
    fn floats() -> impl Iterator<Item = f32> {
        let (first, last) = (f32::MIN_POSITIVE.to_bits(), 1024f32.to_bits());
        (first..last).step_by(1 << 11).map(f32::from_bits).flat_map(|v| [v, -v])
    }

    #[test]
    fn activations_are_within_their_bound_of_the_definition() {
        for activation in Activation::ALL {
            for v in floats() {
                let (exact, found) = (reference(activation, f64::from(v)), f64::from(activation.apply(v)));
                let bound = match activation {
                    Activation::None | Activation::Relu => 0.0,
                    _ => Activation::ERROR * f64::from(v.abs()),
                };
                assert!((found - exact).abs() <= bound, "{activation}({v:e}) = {found:e}, must be {exact:e} within {bound:e}");
            }
        }
    }

    /// For positive values the gate is at least a half, so the error is a few ulp of the result.
    #[test]
    fn positive_values_are_within_three_ulp() {
        for activation in [Activation::Gelu, Activation::Silu] {
            let ulp = |v: f64| v * f64::from(f32::EPSILON);
            for v in floats().filter(|v| *v > 0.0) {
                let (exact, found) = (reference(activation, f64::from(v)), f64::from(activation.apply(v)));
                assert!((found - exact).abs() <= 3.0 * ulp(exact), "{activation}({v:e}) = {found:e}");
            }
        }
    }

    #[test]
    fn slopes_bound_every_difference() {
        for activation in Activation::ALL {
            let mut steepest: f64 = 0.0;
            for i in -8000..8000 {
                let v = f64::from(i) / 1000.0;
                steepest = steepest.max((reference(activation, v + 0.001) - reference(activation, v)).abs() / 0.001);
            }
            assert!(steepest <= activation.slope() + 1e-9 && steepest > activation.slope() - 0.002, "{activation}: {steepest}");
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
