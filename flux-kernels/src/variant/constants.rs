//! Constants of a kernel: computed here, declared in its translation unit.
//!
//! Invariant: a kernel's constant is its field's name in camel case behind a `k`, so a formula
//! stands in one place.

use flux_core::DType;

/// A type of constants.
pub(super) trait Constant: Copy {
    /// Its name in CUDA.
    const CUDA: &'static str;
    /// Its value in CUDA.
    fn text(self) -> String;
}

impl Constant for u32 {
    const CUDA: &'static str = "flux::u32";
    fn text(self) -> String {
        format!("{self}")
    }
}

impl Constant for bool {
    const CUDA: &'static str = "bool";
    fn text(self) -> String {
        format!("{self}")
    }
}

/// The declaration of a constant, of this name in Rust.
pub(super) fn declaration<T: Constant>(field: &str, value: T) -> String {
    let mut name = String::from("k");
    for word in field.split('_') {
        let word = if word == "ab" { "AB" } else { word };
        let (first, rest) = word.split_at(1);
        name += &first.to_ascii_uppercase();
        name += rest;
    }
    format!("    static constexpr {} {name} = {};\n", T::CUDA, value.text())
}

/// The name of an element type in CUDA.
pub(super) fn element(alias: &str, dtype: DType) -> String {
    format!("    using {alias} = flux::{dtype:?};\n")
}

/// A struct of constants with their declarations.
macro_rules! constants {
    ($(#[$meta:meta])* struct $name:ident {
        $($(#[$field_meta:meta])* $field:ident: $type:ty,)*
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name {
            $($(#[$field_meta])* pub(super) $field: $type,)*
        }

        impl $name {
            /// The members of the kernel's `Config`.
            pub(super) fn declare(&self) -> String {
                use $crate::variant::constants::declaration;
                [$(declaration(stringify!($field), self.$field)),*].concat()
            }
        }
    };
}

pub(super) use constants;
