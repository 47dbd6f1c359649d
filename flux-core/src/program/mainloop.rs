//! In-mainloop accumulation: the steps along `k` at which partial tiles are added.
//!
//! Invariant: the steps follow from `k` and the number of partial tiles alone, so all ranks and the
//! kernel agree on them.

use crate::Problem;

/// Least steps from one added partial tile of the output's type to the next: a kernel adds a tile
/// in up to 4 pieces, with steps between them.
pub const IN_MAINLOOP_GAP: u32 = 4;

/// Least steps from one added partial tile of `problem` to the next; a wider element takes more
/// pieces.
pub(crate) const fn gap(problem: &Problem) -> u32 {
    let numerics = problem.numerics();
    IN_MAINLOOP_GAP * (numerics.partial_bytes() / numerics.output.bytes()) as u32
}

/// Steps between a kernel's consumers when they add, so that one multiplies meanwhile.
pub const IN_MAINLOOP_LAG: u32 = 2;

/// The steps at which the leading consumer adds, as first and count. They are the second half of a
/// tile: the worker's previous tile may be in flight during the first.
const fn steps(k_steps: u32) -> (u32, u32) {
    let first = k_steps / 2;
    (first, (k_steps - first).saturating_sub(IN_MAINLOOP_LAG))
}

/// Most partial tiles of `problem` that `k_steps` have room for.
pub(crate) const fn most_partials(problem: &Problem, k_steps: u32) -> u32 {
    steps(k_steps).1 / gap(problem)
}

/// The step before which the first partial tile is added, and the steps from one to the next.
pub(super) const fn accumulation_steps(k_steps: u32, in_mainloop: u32) -> (u32, u32) {
    let (first, count) = steps(k_steps);
    let Some(gap) = count.checked_div(in_mainloop) else { return (first, 0) };
    (first, gap)
}
