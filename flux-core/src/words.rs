//! Lists as texts for people have them.

use std::fmt::Display;

/// The items with commas, and with this word before the last.
///
/// ```
/// let words = |items: &[&str]| flux_core::words::list(items, "or");
/// assert_eq!(words(&["tensor", "row", "block"]), "tensor, row or block");
/// assert_eq!(words(&["tensor"]), "tensor");
/// ```
pub fn list(items: impl IntoIterator<Item = impl Display>, word: &str) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    match items.split_last() {
        Some((last, others)) if !others.is_empty() => {
            format!("{} {word} {last}", others.join(", "))
        }
        _ => items.concat(),
    }
}
