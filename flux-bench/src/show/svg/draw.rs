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
    Cross,
    Plus,
}

/// A place in the picture, in pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
}

/// How a curve is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) colour: &'static str,
    pub(super) mark: Mark,
}

/// The points and the line through them.
pub(super) fn curve(
    out: &mut String,
    Style { colour, mark }: Style,
    points: impl Iterator<Item = Point>,
) {
    let mut path = String::new();
    for Point { x, y } in points {
        let _ = write!(path, "{}{x:.1},{y:.1}", if path.is_empty() { "" } else { " " });
        let (left, above) = (x - 3.0, y - 4.0);
        let mark = match mark {
            Mark::Circle => {
                format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"/>")
            }
            Mark::Square => format!(
                "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"6\" height=\"6\" fill=\"{colour}\"/>",
                y - 3.0
            ),
            Mark::Triangle => format!("<path d=\"M{x:.1} {above:.1}l4 7h-8z\" fill=\"{colour}\"/>"),
            Mark::Cross => stroke(&format!("M{:.1} {:.1}l7 7m0 -7l-7 7", x - 3.5, y - 3.5), colour),
            Mark::Plus => stroke(&format!("M{:.1} {y:.1}h8m-4 -4v8", x - 4.0), colour),
            Mark::Diamond => {
                format!("<path d=\"M{x:.1} {above:.1}l4 4l-4 4l-4 -4z\" fill=\"{colour}\"/>")
            }
        };
        let _ = writeln!(out, "{mark}");
    }
    let _ = writeln!(
        out,
        "<polyline points=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
    );
}

fn stroke(path: &str, colour: &str) -> String {
    format!("<path d=\"{path}\" stroke=\"{colour}\" stroke-width=\"2\"/>")
}

/// A bar from its corner on the left above.
pub(super) fn bar(out: &mut String, at: Point, (width, height): (f64, f64), style: Style) {
    let Point { x, y } = at;
    let colour = style.colour;
    let _ = writeln!(
        out,
        "<path d=\"M{x:.1} {y:.1}h{width:.1}v{height:.1}h-{width:.1}z\" fill=\"{colour}\" \
         fill-opacity=\".7\"/>"
    );
}

/// A line to the right, up to `x2`.
pub(super) fn line(out: &mut String, from: Point, x2: f64, style: &str) {
    let Point { x, y } = from;
    let _ = writeln!(
        out,
        "<line x1=\"{x:.1}\" y1=\"{y:.1}\" x2=\"{x2:.1}\" y2=\"{y:.1}\" stroke=\"{GREY}\" \
         {style}/>"
    );
}

/// `content` is markup already.
pub(super) fn text(out: &mut String, at: Point, anchor: &str, content: &str) {
    let Point { x, y } = at;
    let _ =
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{content}</text>");
}

/// As text or as a quoted attribute of markup.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
