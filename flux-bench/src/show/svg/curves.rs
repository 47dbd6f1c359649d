//! What is drawn of a row.

use super::draw::{Mark, Style};
use crate::harness::Times;
use crate::report::{PeerRow, PeersReport, Report, Row};

/// One contender through all panels.
pub(super) struct Curve<'a> {
    pub(super) name: String,
    pub(super) style: Style,
    of: Of<'a>,
}

enum Of<'a> {
    Own(fn(&Row) -> f64),
    Peer(&'a PeersReport, fn(&PeerRow) -> Option<Times>),
}

/// Name, colour and mark of a curve, and its time of a row.
type OwnWay<'a> = (&'a str, &'static str, Mark, fn(&Row) -> f64);
type PeersWay = (&'static str, &'static str, Mark, fn(&PeerRow) -> Option<Times>);

/// So many curves are the report's own: the first ones.
pub(super) const OWN: usize = 2;

/// The curves, in the order of the legend.
pub(super) fn of<'a>(report: &Report, peers: Option<&'a PeersReport>) -> Vec<Curve<'a>> {
    let serial = if report.nccl.is_some() {
        "serial (NCCL + cuBLASLt)"
    } else {
        "serial (collective + GEMM)"
    };
    let own: [OwnWay<'_>; OWN] = [
        ("flux", "#2f81f7", Mark::Circle, |r| r.t_op_ms.median),
        (serial, "#d9730d", Mark::Square, |r| r.t_serial_ms.median),
    ];
    let curve = |name, colour, mark, of| Curve { name, style: Style { colour, mark }, of };
    let own = own.map(|(name, colour, mark, of)| curve(name.to_owned(), colour, mark, Of::Own(of)));
    let Some(peers) = peers else { return own.into() };
    let ways: [PeersWay; 4] = [
        ("async-TP", "#8957e5", Mark::Triangle, |r| r.async_tp_ms),
        ("serial (NCCL + GEMM)", "#2da44e", Mark::Diamond, |r| r.serial_ms),
        ("one-shot", "#bf3989", Mark::Cross, |r| r.one_shot_ms),
        ("two-shot", "#8a6d00", Mark::Plus, |r| r.two_shot_ms),
    ];
    let theirs = ways.map(|(what, colour, mark, of)| {
        let name = format!("PyTorch {} {what}", short(&peers.torch));
        curve(name, colour, mark, Of::Peer(peers, of))
    });
    // Others than these ran at none of the shapes.
    let ran = |curve: &Curve<'_>| report.rows.iter().any(|row| curve.ratio(row).is_some());
    own.into_iter().chain(theirs).filter(ran).collect()
}

/// A version without what is local to its build.
fn short(version: &str) -> &str {
    version.split('+').next().unwrap_or(version)
}

impl Curve<'_> {
    /// Its time at a row's shape as a multiple of the row's GEMM; `None` where it did not run.
    pub(super) fn ratio(&self, row: &Row) -> Option<f64> {
        let time = match self.of {
            Of::Own(of) => of(row),
            Of::Peer(peers, of) => of(peers.of(row)?)?.median,
        };
        Some(time / row.t_gemm_ms.median)
    }
}
