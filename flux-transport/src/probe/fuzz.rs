//! What is read of a probe, and of its answers on disk, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::report::Answer;
use super::request::Request;

/// An answer or a request: there is one reading of it, and a report has every direction once.
pub fn answer(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Some(answer) = Answer::decode(text) {
        if let Answer::Report(report) = &answer {
            let count = report.devices.len();
            assert_eq!(report.directions.len(), count * count.saturating_sub(1));
        }
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
    }
    if let Some(request) = Request::decode(text) {
        assert_eq!(request.encode(), text);
    }
}
