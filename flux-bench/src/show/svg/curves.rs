//! What is drawn of a row.

use super::draw::{Mark, Style};
use crate::report::{PeerRow, PeersReport};
use crate::report::{Report, Row};

/// One contender through all panels.
pub(super) struct Curve<'a> {
    pub(super) name: String,
    pub(super) style: Style,
    of: Of<'a>,
}

enum Of<'a> {
    Own(fn(&Row) -> f64),
    Peer(&'a PeersReport, fn(&PeerRow) -> Option<f64>),
}

/// So many curves are the report's own: the first ones.
pub(super) const OWN: usize = 2;

/// The curves, in the order of the legend.
pub(super) fn of<'a>(report: &Report, peers: Option<&'a PeersReport>) -> Vec<Curve<'a>> {
    let serial = if report.nccl.is_some() {
        "serial (NCCL + cuBLASLt)"
    } else {
        "serial (collective + GEMM)"
    };
    let mut curves = vec![
        Curve {
            name: "flux".to_owned(),
            style: Style { colour: "#2f81f7", mark: Mark::Circle },
            of: Of::Own(|r| r.t_op_ms.median),
        },
        Curve {
            name: serial.to_owned(),
            style: Style { colour: "#d9730d", mark: Mark::Square },
            of: Of::Own(|r| r.t_serial_ms.median),
        },
    ];
    if let Some(peers) = peers {
        let name = |what| format!("PyTorch {} {what}", short(&peers.torch));
        let (fused, in_turn) =
            (|r: &PeerRow| Some(r.async_tp_ms?.median), |r: &PeerRow| Some(r.serial_ms?.median));
        curves.push(Curve {
            name: name("async-TP"),
            style: Style { colour: "#8957e5", mark: Mark::Triangle },
            of: Of::Peer(peers, fused),
        });
        curves.push(Curve {
            name: name("serial (NCCL + torch.mm)"),
            style: Style { colour: "#2da44e", mark: Mark::Diamond },
            of: Of::Peer(peers, in_turn),
        });
        let (one_shot, two_shot) =
            (|r: &PeerRow| Some(r.one_shot_ms?.median), |r: &PeerRow| Some(r.two_shot_ms?.median));
        curves.push(Curve {
            name: name("one-shot"),
            style: Style { colour: "#bf3989", mark: Mark::Cross },
            of: Of::Peer(peers, one_shot),
        });
        curves.push(Curve {
            name: name("two-shot"),
            style: Style { colour: "#8a6d00", mark: Mark::Plus },
            of: Of::Peer(peers, two_shot),
        });
        // Others than these ran at none of the shapes.
        curves.retain(|curve| report.rows.iter().any(|row| curve.ratio(row).is_some()));
    }
    curves
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
            Of::Peer(peers, of) => of(peers.of(row)?)?,
        };
        Some(time / row.t_gemm_ms.median)
    }
}
