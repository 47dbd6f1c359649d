//! What host and kernels share: each constant, enum and struct is declared once, in Rust.
//!
//! Invariant: the kernels take these declarations from the generated header `abi.cuh`, so no number
//! or layout that both sides use stands in CUDA by hand.

mod gathered_rows;
mod harness;
mod header;
mod links;
mod params;
mod rms_norm;
mod stamps;

pub(crate) use gathered_rows::GatheredRowsParams;
pub use harness::{Fill, RAW_END};
pub(crate) use harness::{FillParams, InterleaveParams, RawReport, VerifyParams};
pub(crate) use header::header;
pub use links::{BulkCopy, Exchange, PingPong};
pub(crate) use params::{MAPS_OF_WEIGHT, Params, Weight};
pub(crate) use rms_norm::{QuantizeParams, RmsNormParams, UnfusedEpilogueParams};
pub use stamps::{ItemStamps, Stamps, WorkerStamps};

use std::fmt::Write as _;

/// Bytes of a piece of a partial tile.
pub(crate) const SENT_BYTES: u32 = 4096;

/// A struct as the kernels see it.
pub(crate) struct Mirror {
    name: &'static str,
    bytes: usize,
    fields: &'static [Field],
}

struct Field {
    docs: &'static [&'static str],
    /// In C++: type and name.
    declaration: &'static str,
}

/// Declares a `repr(C)` struct and its [`Mirror`]. `= "..."` gives a field's C++ declaration where
/// its type is not named as in Rust.
macro_rules! mirrored {
    (@declaration $field:ident: $type:ty) => { concat!(stringify!($type), " ", stringify!($field)) };
    (@declaration $field:ident: $type:ty = $cuda:literal) => { $cuda };
    ($(#[$attribute:meta])* $vis:vis struct $name:ident {
        $($(#[doc = $doc:literal])* $fvis:vis $field:ident: $type:ty $(= $cuda:literal)?,)*
    }) => {
        $(#[$attribute])*
        #[repr(C)]
        $vis struct $name { $($(#[doc = $doc])* $fvis $field: $type,)* }

        impl $name {
            pub(in $crate::abi) const MIRROR: $crate::abi::Mirror = $crate::abi::Mirror {
                name: stringify!($name),
                bytes: size_of::<$name>(),
                fields: &[$($crate::abi::Field {
                    docs: &[$($doc),*],
                    declaration: mirrored!(@declaration $field: $type $(= $cuda)?),
                }),*],
            };
        }
    };
}
use mirrored;

impl Mirror {
    /// The C++ declaration.
    fn declare(&self) -> String {
        let mut text = format!("struct {} {{\n", self.name);
        for field in self.fields {
            for doc in field.docs {
                let _infallible = writeln!(text, "    //{doc}");
            }
            let _infallible = writeln!(text, "    {};", field.declaration);
        }
        let Self { name, bytes, .. } = self;
        text + &format!("}};\nstatic_assert(sizeof({name}) == {bytes});\n\n")
    }
}

/// A struct of 32-bit words at these offsets, with padding between them.
fn declare_words(name: &str, bytes: usize, words: &[(&str, usize)]) -> String {
    let (mut text, mut end) = (format!("struct {name} {{\n"), 0);
    let pad = |text: &mut String, from: usize, to: usize| {
        if to > from {
            let _infallible = writeln!(text, "    u32 pad_{from}[{}];", (to - from) / 4);
        }
    };
    for &(word, offset) in words {
        pad(&mut text, end, offset);
        let _infallible = writeln!(text, "    u32 {word};");
        end = offset + 4;
    }
    pad(&mut text, end, bytes);
    text + &format!("}};\nstatic_assert(sizeof({name}) == {bytes});\n\n")
}
