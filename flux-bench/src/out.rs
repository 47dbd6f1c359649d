//! What commands print.
//!
//! Invariant: a failure to print ends nothing. It is reported once, by [`end`], unless the reader
//! has gone. Where the standard output is [reserved](reserve), all else goes to the standard error.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why the standard output cannot be written.
static FAILED: OnceLock<io::Error> = OnceLock::new();
static RESERVED: AtomicBool = AtomicBool::new(false);

/// Keeps the standard output for [`reserved`].
pub(crate) fn reserve() {
    RESERVED.store(true, Ordering::Relaxed);
}

/// Prints what the standard output is reserved for.
pub(crate) fn reserved(what: &impl Display) {
    keep(write!(io::stdout(), "{what}"));
}

/// Prints `what` to the standard output as it is.
pub(crate) fn print(what: &impl Display) {
    if RESERVED.load(Ordering::Relaxed) {
        // There is nobody else to tell.
        let _ = write!(io::stderr(), "{what}");
    } else {
        reserved(what);
    }
}

/// Prints `what` to the standard output, and ends the line.
pub(crate) fn line(what: &impl Display) {
    print(&format_args!("{what}\n"));
}

/// Writes a line to the standard error in one call, as processes share it.
pub(crate) fn note(words: &str) {
    // There is nobody else to tell.
    let _ = io::stderr().write_all(format!("{words}\n").as_bytes());
}

pub(crate) fn end() -> anyhow::Result<()> {
    keep(io::stdout().flush());
    match FAILED.get() {
        Some(why) if why.kind() != ErrorKind::BrokenPipe => {
            anyhow::bail!("the standard output cannot be written: {why}")
        }
        _ => Ok(()),
    }
}

fn keep(done: io::Result<()>) {
    if let Err(why) = done {
        let _ = FAILED.set(why);
    }
}
