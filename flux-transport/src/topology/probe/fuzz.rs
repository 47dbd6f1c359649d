//! What is read of a probe, and of its answers on disk, for any bytes.

#![expect(clippy::missing_panics_doc, reason = "a panic is what these are for")]

use super::report::ChildReport;
use super::request::Request;

/// An answer or a request: there is one reading of it, and a report has every direction once.
pub fn answer(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let (answer, request) = (ChildReport::decode(text), Request::decode(text));
    if let Some(answer) = &answer {
        if let ChildReport::Report(report) = answer {
            let count = report.devices.len();
            assert_eq!(report.directions.len(), count * count.saturating_sub(1));
        }
        assert_eq!(ChildReport::decode(&answer.encode()).as_ref(), Some(answer));
    }
    if let Some(request) = &request {
        assert_eq!(request.encode(), text);
    }
    answer.is_some() || request.is_some()
}

#[cfg(test)]
pub(crate) fn seeds() -> Vec<crate::fuzz::Seed> {
    use super::report::tests::{report, uuid};

    let report = ChildReport::Report(report(2, &[(1, 0)])).encode();
    let request = Request { devices: vec![uuid(1), uuid(2)], veto: false };
    vec![
        ("answer", "report", format!("a banner\n{report}").into_bytes()),
        (
            "answer",
            "cannot",
            ChildReport::Cannot("the NVIDIA driver shows no device".to_owned())
                .encode()
                .into_bytes(),
        ),
        ("answer", "request", request.encode().into_bytes()),
    ]
}
