//! What commands print.
//!
//! Invariant: printing ends nothing: what was measured is still written and what is asked for still
//! done when nobody reads, or can keep, what is printed. A reader that has gone has seen enough;
//! any other failure is said once, at the end, and fails the command ([`end`]).

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;

/// Why the standard output takes nothing more.
static FAILED: OnceLock<io::Error> = OnceLock::new();

/// Prints `what` to the standard output as it is.
pub(crate) fn print(what: &impl Display) {
    keep(write!(io::stdout(), "{what}"));
}

/// Prints `what` to the standard output, and ends the line.
pub(crate) fn line(what: &impl Display) {
    keep(writeln!(io::stdout(), "{what}"));
}

/// Writes a line to the standard error as a whole: processes that share it would else write into
/// each other's lines.
pub(crate) fn note(words: &str) {
    // There is nobody else to tell.
    let _ = io::stderr().write_all(format!("{words}\n").as_bytes());
}

/// Sees all that was printed out, and says whether all of it could be.
///
/// # Errors
/// The first failure, unless it was that nobody reads any more.
pub(crate) fn end() -> anyhow::Result<()> {
    keep(io::stdout().flush());
    match FAILED.get() {
        Some(why) if why.kind() != ErrorKind::BrokenPipe => anyhow::bail!("the standard output cannot be written: {why}"),
        _ => Ok(()),
    }
}

/// Keeps the first failure.
fn keep(done: io::Result<()>) {
    if let Err(why) = done {
        let _ = FAILED.set(why);
    }
}
