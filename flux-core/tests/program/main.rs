//! Tile programs over random problems, tiles, chunks, rasters and worlds: those that are built
//! satisfy every rule, and each rule is needed: broken on purpose, it is the one that is reported.

#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

mod mutations;
mod mutations_along_k;
mod mutations_flattened;
mod mutations_grid;
mod mutations_in_mainloop;
mod nodes;
mod properties;
#[allow(dead_code, reason = "flux-kernels draws whole schedules from it")]
#[path = "../schedules/mod.rs"]
mod schedules;
mod simulated;
mod strategies;
