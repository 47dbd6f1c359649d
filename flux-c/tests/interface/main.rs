//! The functions of the interface as C calls them: good calls, and each kind of bad one.
#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod calls;
mod communicators;
mod refusals;
mod support;
