//! Tile programs over random problems, tiles, chunks and worlds. Built programs satisfy every rule,
//! and a broken rule is the one that is reported.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

mod mutations;
mod mutations_along_k;
mod mutations_flattened;
mod mutations_grid;
mod mutations_in_mainloop;
mod nodes;
mod properties;
mod rounds;
mod simulated;
mod strategies;
