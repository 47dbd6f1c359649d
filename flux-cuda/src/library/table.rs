//! Tables of a library's entry points.

/// A library lacks an entry point: it is too old, or another library.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no `{symbol}`")]
pub struct MissingSymbol {
    /// The entry point, as the library names it.
    pub symbol: &'static str,
}

crate::error::debug_is_text!(MissingSymbol);

/// Declares a table of a library's entry points, and `bind`, which finds all of them.
///
/// Each entry is written as the library's header declares it, with opaque pointers as `usize` and
/// enums as integers, which have the same representation. The table keeps its library loaded for
/// the life of the process: libraries of CUDA have threads and destructors of their own.
///
/// ```
/// flux_cuda::table! {
///     /// Of the C library.
///     struct Libc {
///         absolute = "abs" (std::ffi::c_int) -> std::ffi::c_int;
///     }
/// }
/// let (_, library) = flux_cuda::library::first(vec!["libc.so.6".into()]).unwrap();
/// // SAFETY: the entries are declared as in the headers of the C library.
/// let libc = unsafe { Libc::bind(library) }.unwrap();
/// // SAFETY: any number but the smallest has an absolute value.
/// assert_eq!(unsafe { (libc.absolute)(-7) }, 7);
/// ```
#[macro_export]
macro_rules! table {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $table:ident {
            $($name:ident = $symbol:literal ($($type:ty),* $(,)?) -> $result:ty;)*
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug)]
        #[allow(clippy::struct_field_names, reason = "entries have the library's names")]
        $visibility struct $table {
            $($visibility $name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl $table {
            /// Finds all entry points in `library`, which stays loaded for ever.
            ///
            /// # Safety
            /// If the library has an entry point of such a name, it is declared as here.
            ///
            /// # Errors
            /// The first entry point that is missing.
            $visibility unsafe fn bind(
                library: $crate::library::Library,
            ) -> Result<Self, $crate::library::MissingSymbol> {
                let library = std::mem::ManuallyDrop::new(library);
                Ok(Self {
                    $($name: {
                        type Entry = unsafe extern "C" fn($($type),*) -> $result;
                        // SAFETY: the caller vouches for the declaration; the library is never
                        // unloaded.
                        let entry = unsafe { library.get::<Entry>($symbol.as_bytes()) };
                        *entry.map_err(|_| $crate::library::MissingSymbol { symbol: $symbol })?
                    },)*
                })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use crate::library::{MissingSymbol, first};

    crate::table! {
        #[expect(dead_code, reason = "it cannot be bound")]
        struct Strange {
            absolute = "abs" (std::ffi::c_int) -> std::ffi::c_int;
            nobodys = "flux_entry_of_nobody" () -> std::ffi::c_int;
        }
    }

    #[test]
    fn a_library_without_an_entry_point_is_refused_by_its_name() {
        let (_, library) = first(vec!["libc.so.6".into()]).unwrap();
        // SAFETY: `abs` is declared as in stdlib.h; there is no entry of the other name.
        let missing = unsafe { Strange::bind(library) }.unwrap_err();
        assert_eq!(missing, MissingSymbol { symbol: "flux_entry_of_nobody" });
    }
}
