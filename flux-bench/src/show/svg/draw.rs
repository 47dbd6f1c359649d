//! The strokes that a picture is made of.

use super::GREY;
use std::fmt::Write as _;

/// What a curve's points look like, so that curves are told apart without their colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Circle,
    Square,
    Triangle,
    Diamond,
}

/// The points and the line through them.
pub(super) fn curve(
    out: &mut String,
    (colour, mark): (&str, Mark),
    points: impl Iterator<Item = (f64, f64)>,
) {
    let mut path = String::new();
    for (x, y) in points {
        let _ = write!(path, "{}{x:.1},{y:.1}", if path.is_empty() { "" } else { " " });
        let _ = match mark {
            Mark::Circle => {
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>")
            }
            Mark::Square => {
                writeln!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\" fill=\"{colour}\"/>",
                    x - 3.0,
                    y - 3.0
                )
            }
            Mark::Triangle => {
                writeln!(out, "<path d=\"M{x:.1} {:.1}l4 7h-8z\" fill=\"{colour}\"/>", y - 4.0)
            }
            Mark::Diamond => writeln!(
                out,
                "<path d=\"M{x:.1} {:.1}l4 4l-4 4l-4 -4z\" fill=\"{colour}\"/>",
                y - 4.0
            ),
        };
    }
    let _ = writeln!(
        out,
        "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
    );
}

pub(super) fn line(out: &mut String, from: (f64, f64), to: (f64, f64), style: &str) {
    let ((x1, y1), (x2, y2)) = (from, to);
    let _ = writeln!(
        out,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{GREY}\" \
         {style}/>"
    );
}

/// `content` is markup already.
pub(super) fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
