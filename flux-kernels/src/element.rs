//! Element types of the operands on the host.
//!
//! Invariant: every [`Element`] is plain data, and converts as in the kernels: exactly
//! to fp32, to nearest even from it.

use bytemuck::Pod;
use flux_core::{DType, ElementType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::fmt::Debug;

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
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

/// An element of `x`, `w` and `y`: [`half::bf16`] or [`half::f16`].
pub trait Element: TensorElement + Debug + PartialEq + Send + Sync {
    /// The type's name in a [`Problem`](flux_core::Problem).
    const DTYPE: DType;

    /// The same value, in fp32.
    fn to_f32(self) -> f32;

    /// The nearest value, ties to even; beyond the type's range an infinity.
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

macro_rules! element {
    ($type:ty, $dtype:expr) => {
        impl TensorElement for $type {
            const TYPE: ElementType = ElementType::Matrix($dtype);
        }

        impl Element for $type {
            const DTYPE: DType = $dtype;

            fn to_f32(self) -> f32 {
                self.to_f32()
            }

            fn from_f32(value: f32) -> Self {
                Self::from_f32(value)
            }

            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }

            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    };
}

element!(bf16, DType::Bf16);
element!(f16, DType::F16);

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
        }
    };
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
    fn slices_of_both_types_convert_as_elements_do() {
        slices_convert_as_elements_do::<bf16>();
        slices_convert_as_elements_do::<f16>();
    }

    #[test]
    fn ties_round_to_even() {
        // 1 + 2^-8 lies half way between two bf16, 1 + 3 * 2^-8 too.
        assert_eq!(<bf16 as Element>::from_f32(1.0 + 1.0 / 256.0), bf16::from_bits(0x3f80));
        assert_eq!(<bf16 as Element>::from_f32(1.0 + 3.0 / 256.0), bf16::from_bits(0x3f82));
    }
}
