//! Files that are whole under their name, or not there.
//!
//! Invariant: a target's name leads to its previous content or to all of the new one. A writer that
//! is killed leaves nothing where the file system has `O_TMPFILE`. Elsewhere, and between the two
//! steps of replacing a file, it leaves a name that the next writer in the folder removes.

mod leftovers;
mod new_file;
mod target;

pub use new_file::NewFile;
pub use target::behind_links;

use std::io::{self, Write};
use std::path::Path;

/// Writes a whole file, or leaves the old one.
///
/// # Errors
/// The system's.
pub fn write(target: &Path, content: &[u8]) -> io::Result<()> {
    let file = NewFile::create(target)?;
    file.file().write_all(content)?;
    file.commit()
}
