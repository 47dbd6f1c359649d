//! Plans against the records `results/timed-plans.csv` and `results/frozen-medians.csv`.

#![allow(clippy::unwrap_used, reason = "what fails in a helper fails its test")]

mod bound;
mod choice;
mod fixture;
mod model;
mod sum_order;
