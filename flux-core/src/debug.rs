//! What programs print of errors that nobody handles.

/// Makes the text of error types their `Debug`: by that `main` prints the error it returns, and
/// `unwrap` the one it finds. Each text holds those of its sources.
///
/// ```
/// #[derive(thiserror::Error)]
/// #[error("m = {0} is above 8: split the call")]
/// struct TooMany(u32);
/// flux_core::debug_is_text!(TooMany);
/// assert_eq!(format!("Error: {:?}", TooMany(9)), "Error: m = 9 is above 8: split the call");
/// ```
#[macro_export]
macro_rules! debug_is_text {
    ($($error:ty),+) => {$(
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    )+};
}
