//! Variables of NCCL, and of ours, that messages depend on.

use super::sharing::{LANES, MOST_LANES};
use std::ffi::OsStr;

/// Bytes of the pieces in which NCCL sends over a network; where ranks differ, what one sends
/// another does not receive.
pub(super) const PIECES: &str = "NCCL_P2P_NET_CHUNKSIZE";
/// Whether communicators that are split from another share what it has, whatever they are told.
pub(super) const SHARE: &str = "NCCL_COMM_SPLIT_SHARE_RESOURCES";
/// Pieces with which sends over sockets carry about what NCCL's collectives do
/// (docs/transports.md); NCCL's own are a quarter.
const GOOD_PIECES: u64 = 512 << 10;

/// What the variable of channels for messages beside a kernel says.
pub(super) fn lanes(variable: Option<&OsStr>) -> Result<u32, String> {
    let Some(value) = variable.filter(|value| !value.is_empty()) else { return Ok(LANES) };
    let lanes = value.to_str().and_then(|text| text.parse().ok());
    let refused = || {
        format!(
            "FLUX_NCCL_CTAS = {}: it must be a power of two up to {MOST_LANES}",
            value.display()
        )
    };
    lanes.filter(|lanes: &u32| lanes.is_power_of_two() && *lanes <= MOST_LANES).ok_or_else(refused)
}

/// Whether communicators that are split from another share its flag for aborts, as they are told
/// to: NCCL's variable for that overrides it, and takes all but 1 for 0.
pub(super) fn shared(variable: Option<&OsStr>) -> Result<(), String> {
    match variable.filter(|value| !value.is_empty()) {
        Some(value) if number(Some(value)) != Some(1) => Err(format!(
            "{SHARE} = {}: a call that waits for a peer that is gone could not be ended; unset it",
            value.display()
        )),
        _ => Ok(()),
    }
}

pub(super) fn advice(hosts: u32, pieces: u64) -> String {
    if hosts < 2 || pieces != 0 {
        return String::new();
    }
    format!(
        "; {PIECES} is not set: {GOOD_PIECES} in every rank's environment carries more over sockets"
    )
}

/// What a variable says, as NCCL reads it (`ncclLoadParam`: `strtoll` with base 0): decimal, octal
/// after a 0, hexadecimal after a 0x, as far as there are digits. Nothing where there are none, and
/// for a number that is negative or too large.
pub(super) fn number(variable: Option<&OsStr>) -> Option<u64> {
    let text = variable.and_then(OsStr::to_str)?.trim_ascii_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    let after_0x = text
        .strip_prefix("0x")
        .or_else(|| text.strip_prefix("0X"))
        .filter(|digits| digits.starts_with(|c: char| c.is_ascii_hexdigit()));
    let (digits, base) = match after_0x {
        Some(digits) => (digits, 16),
        None if text.starts_with('0') => (text, 8),
        None => (text, 10),
    };
    let end = digits.find(|c: char| !c.is_digit(base)).unwrap_or(digits.len());
    i64::from_str_radix(&digits[..end], base).ok().map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_would_keep_messages_from_being_ended_is_an_error() {
        let shared = |value: &str| shared(Some(OsStr::new(value)));
        assert!(
            super::shared(None).is_ok()
                && ["", "1", "0x1"].into_iter().all(|value| shared(value).is_ok())
        );
        for value in ["0", "2", "-1", "no"] {
            assert!(
                shared(value)
                    .unwrap_err()
                    .starts_with(&format!("NCCL_COMM_SPLIT_SHARE_RESOURCES = {value}: "))
            );
        }
    }

    #[test]
    fn the_variable_is_a_number_of_lanes_or_an_error() {
        let parse = |value: &str| lanes(Some(OsStr::new(value)));
        assert_eq!((lanes(None), parse(""), parse("8")), (Ok(LANES), Ok(LANES), Ok(8)));
        for wrong in ["0", "3", "64", "many", "-1"] {
            assert!(parse(wrong).unwrap_err().contains(wrong));
        }
    }

    #[test]
    fn variables_are_read_as_nccl_reads_them() {
        let parse = |value: &str| number(Some(OsStr::new(value)));
        assert_eq!((number(None), parse(""), parse("many"), parse("-1")), (None, None, None, None));
        assert!(advice(2, 0).contains("NCCL_P2P_NET_CHUNKSIZE is not set: 524288 in every"));
        assert_eq!((advice(1, 0), advice(2, 1 << 17)), (String::new(), String::new()));
        assert_eq!(
            (parse("524288"), parse("0x80000"), parse(" 1048576 ")),
            (Some(GOOD_PIECES), Some(GOOD_PIECES), Some(1 << 20))
        );
        // As `strtoll` with base 0 does.
        for (text, read) in [
            ("02000000", 1 << 19),
            ("0X80000", 1 << 19),
            ("+17", 17),
            ("512K", 512),
            ("08", 0),
            ("0x", 0),
            ("0", 0),
            ("0xg", 0),
            ("\t7 8", 7),
        ] {
            assert_eq!(parse(text), Some(read), "{text}");
        }
        assert_eq!((parse("9223372036854775808"), parse("+-1"), parse("++1")), (None, None, None));
    }
}
