//! Element types of the operands on the host.
//!
//! Invariant: every [`Element`] is plain data, and converts as in the kernels: exactly
//! to fp32, to nearest even from it.

use bytemuck::Pod;
use float8::F8E4M3;
use flux_core::{DType, ElementType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt::Debug;

/// The largest number of E4M3.
pub(crate) const E4M3_MOST: f32 = 448.0;
/// Least scale of quantised numbers: the least normal number, whose reciprocal is finite.
pub(crate) const LEAST_SCALE: f32 = f32::MIN_POSITIVE;

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
    impl Sealed for float8::F8E4M3 {}
    impl Sealed for f32 {}
}

/// An element of an operand's memory: an [`Element`], or `f32`.
pub trait TensorElement: Pod + sealed::Sealed {
    /// The type's name.
    const TYPE: ElementType;
}

impl TensorElement for f32 {
    const TYPE: ElementType = ElementType::F32;
}

/// An element of `x` and `w`: [`half::bf16`], [`half::f16`], which `y` has, too, or
/// [`float8::F8E4M3`].
pub trait Element: TensorElement + Debug + PartialEq + Send + Sync {
    /// The type's name in a [`Problem`](flux_core::Problem).
    const DTYPE: DType;

    /// The same value, in fp32.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even; beyond the type's range an infinity, or the largest value
    /// of a type that has none.
    fn from_f32(value: f32) -> Self;

    /// [`Self::to_f32`] of a slice.
    ///
    /// # Panics
    /// When the lengths differ.
    fn widen(from: &[Self], to: &mut [f32]);

    /// [`Self::from_f32`] of a slice.
    ///
    /// # Panics
    /// When the lengths differ.
    fn narrow(from: &[f32], to: &mut [Self]);
}

/// An [`Element`] of 8 bits, of operands that have scales: [`float8::F8E4M3`].
pub trait QuantizedElement: Element {}

impl QuantizedElement for F8E4M3 {}

macro_rules! element {
    (
        $type:ty,
        $dtype:expr,
        |$value:ident| $wider:expr,
        |$wide_from:ident, $wide_to:ident| $widen:expr,
        |$narrow_from:ident, $narrow_to:ident| $narrow:expr
    ) => {
        impl TensorElement for $type {
            const TYPE: ElementType = ElementType::Matrix($dtype);
        }

        impl Element for $type {
            const DTYPE: DType = $dtype;

            fn to_f32(self) -> f32 {
                let $value = self;
                $wider
            }

            fn from_f32(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn widen($wide_from: &[Self], $wide_to: &mut [f32]) {
                $widen;
            }

            fn narrow($narrow_from: &[f32], $narrow_to: &mut [Self]) {
                $narrow;
            }
        }
    };
}

element!(
    bf16,
    DType::Bf16,
    |value| value.to_f32(),
    |from, to| from.convert_to_f32_slice(to),
    |from, to| {
        to.convert_from_f32_slice(from);
    }
);
element!(
    f16,
    DType::F16,
    |value| value.to_f32(),
    |from, to| from.convert_to_f32_slice(to),
    |from, to| {
        to.convert_from_f32_slice(from);
    }
);
element!(
    F8E4M3,
    DType::E4m3,
    |value| Self::to_f32(&value),
    |from, to| each(from, to, Element::to_f32),
    |from, to| {
        each(from, to, F8E4M3::from_f32);
    }
);

/// Converts elements one by one.
fn each<A: Copy, B>(from: &[A], to: &mut [B], convert: fn(A) -> B) {
    assert_eq!(from.len(), to.len(), "a value for each");
    for (to, &from) in to.iter_mut().zip(from) {
        *to = convert(from);
    }
}

/// An expression with the [`Element`] of a [`DType`].
///
/// ```
/// use flux_core::{DType, ElementType};
/// let bytes = |dtype| flux_kernels::with_element!(dtype, T, size_of::<T>());
/// assert_eq!(DType::ALL.map(bytes), DType::ALL.map(DType::bytes));
/// ```
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $element:ident, $body:expr) => {
        match $dtype {
            $crate::DType::Bf16 => {
                type $element = $crate::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $element = $crate::f16;
                $body
            }
            $crate::DType::E4m3 => {
                type $element = $crate::F8E4M3;
                $body
            }
        }
    };
}

/// An expression with the [`Element`] of operands and that of outputs.
///
/// ```
/// use flux_core::{DType, Numerics, Scales}; let bytes = |of: Numerics|
/// flux_kernels::with_elements!(of, X, Y, (size_of::<X>(), size_of::<Y>()));
/// assert_eq!(bytes(Numerics::e4m3(Scales::Row, DType::F16)), (1, 2));
/// ```
///
/// # Panics
/// Where no problem has such numbers.
#[macro_export]
macro_rules! with_elements {
    ($numerics:expr, $x:ident, $y:ident, $body:expr) => {{
        let numerics: $crate::Numerics = $numerics;
        match (numerics.operand, numerics.output) {
            ($crate::DType::Bf16, $crate::DType::Bf16) => {
                type $x = $crate::bf16;
                type $y = $crate::bf16;
                $body
            }
            ($crate::DType::F16, $crate::DType::F16) => {
                type $x = $crate::f16;
                type $y = $crate::f16;
                $body
            }
            ($crate::DType::E4m3, $crate::DType::Bf16) => {
                type $x = $crate::F8E4M3;
                type $y = $crate::bf16;
                $body
            }
            ($crate::DType::E4m3, $crate::DType::F16) => {
                type $x = $crate::F8E4M3;
                type $y = $crate::f16;
                $body
            }
            ($crate::DType::Bf16, $crate::DType::F16)
            | ($crate::DType::F16, $crate::DType::Bf16)
            | (_, $crate::DType::E4m3) => {
                unreachable!("no problem has the element types {numerics}")
            }
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slices_convert_as_elements_do<T: Element>() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 1.37e-2).collect();
        let mut narrow = vec![T::from_f32(0.0); values.len()];
        T::narrow(&values, &mut narrow);
        let mut wide = vec![0.0; values.len()];
        T::widen(&narrow, &mut wide);
        for ((&v, &n), &w) in values.iter().zip(&narrow).zip(&wide) {
            assert_eq!(n, T::from_f32(v));
            assert_eq!(w.to_bits(), n.to_f32().to_bits());
            assert!(
                f64::from((w - v).abs()) <= T::DTYPE.unit_roundoff() * f64::from(v.abs()),
                "{v} became {w}"
            );
        }
    }

    #[test]
    fn slices_of_all_types_convert_as_elements_do() {
        slices_convert_as_elements_do::<F8E4M3>();
        slices_convert_as_elements_do::<bf16>();
        slices_convert_as_elements_do::<f16>();
    }

    #[test]
    fn codes_of_8_bits_are_read_back_and_values_saturate() {
        for code in 0..=u8::MAX {
            let value = F8E4M3::from_bits(code);
            if value.is_nan() {
                assert_eq!(code & 0x7f, 0x7f);
            } else {
                // Sign, exponent with a bias of 7, three bits; without an exponent subnormal.
                let (exponent, bits) = (i32::from(code >> 3 & 15), f32::from(code & 7));
                let magnitude = if exponent == 0 {
                    bits / 8.0 * 2_f32.powi(-6)
                } else {
                    (1.0 + bits / 8.0) * 2_f32.powi(exponent - 7)
                };
                let expected = if code < 128 { magnitude } else { -magnitude };
                assert_eq!(Element::to_f32(value).to_bits(), expected.to_bits());
                assert_eq!(<F8E4M3 as Element>::from_f32(expected).to_bits(), code);
            }
        }
        let most = [449.0, 1e30, f32::INFINITY].map(<F8E4M3 as Element>::from_f32);
        assert_eq!(most.map(Element::to_f32).map(f32::to_bits), [448.0_f32.to_bits(); 3]);
        assert!(Element::to_f32(<F8E4M3 as Element>::from_f32(f32::NAN)).is_nan());
    }

    #[test]
    fn ties_round_to_even() {
        // 1 + 2^-8 lies half way between two bf16, 1 + 3 * 2^-8 too.
        assert_eq!(<bf16 as Element>::from_f32(1.0 + 1.0 / 256.0), bf16::from_bits(0x3f80));
        assert_eq!(<bf16 as Element>::from_f32(1.0 + 3.0 / 256.0), bf16::from_bits(0x3f82));
    }
}
