//! Parsers of options that have limits.
//!
//! Invariant: what is within the limits fits memory and the clock's range.

use clap::builder::{RangedI64ValueParser, RangedU64ValueParser};
use clap::value_parser;
use flux_core::rank::MAX_WORLD;
use std::str::FromStr;

/// Rounds at one shape: every rank keeps the times of all ranks, 400 MiB of 16. Also calls of a
/// trace.
pub(crate) fn samples() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=100_000)
}

/// Calls in a row.
pub(crate) fn calls() -> RangedU64ValueParser<u64> {
    value_parser!(u64).range(1..=1_000_000)
}

/// Faults of a kind; all are put in order before the first.
pub(crate) fn faults() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(..=10_000)
}

/// Seconds after which something is ended, from `least` to a day.
pub(crate) fn seconds(least: u64) -> RangedU64ValueParser<u64> {
    value_parser!(u64).range(least..=86_400)
}

/// Milliseconds of a deadline, to an hour.
pub(crate) fn deadline_ms() -> RangedU64ValueParser<u64> {
    value_parser!(u64).range(1..=3_600_000)
}

/// Ranks that share a GPU, as no world has more.
pub(crate) fn ranks_per_gpu() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=MAX_WORLD.cast_signed() as i64)
}

/// A finite number of 0 and more.
pub(crate) fn not_negative<T: FromStr + Copy + Into<f64>>(word: &str) -> Result<T, String> {
    let number = word.parse::<T>().ok();
    number
        .filter(|&number| (0.0..f64::INFINITY).contains(&number.into()))
        .ok_or_else(|| format!("{word:?} is no number of 0 and more, as in 1e-6"))
}

/// A length above 0 in some unit, which an error names.
pub(crate) fn length(
    unit: &'static str,
    most: f64,
) -> impl Fn(&str) -> Result<f64, String> + Clone + Send + Sync {
    move |word| match word.parse() {
        Ok(number) if 0.0 < number && number <= most => Ok(number),
        _ => Err(format!("{word:?} is no number of {unit} above 0 and up to {most}")),
    }
}
