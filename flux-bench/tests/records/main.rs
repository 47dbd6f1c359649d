//! What README and docs say, and what the committed results have.
#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod documents;
mod environment;
mod published;
mod reads;
mod simulated;
