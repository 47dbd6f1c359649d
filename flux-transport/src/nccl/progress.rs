//! How far the messages of a call are.

/// Where a call stands; it only goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing was asked for.
    Begun,
    /// The side streams are forked, the executor has its view.
    Staged,
    /// The messages were handed out.
    Carried,
}
