//! In-mainloop accumulation: the steps along `k` at which partial tiles are added.
//!
//! Invariant: the steps follow from `k` and the number of partial tiles alone, so all ranks and the
//! kernel agree on them.

/// Least steps along `k` from one partial tile that is added early to the next: a kernel takes one
/// in up to so many pieces, with steps between them.
pub(super) const GAP: u32 = 4;

/// Steps by which a kernel's consumers are apart when they add, so that one multiplies meanwhile.
const LAG: u32 = 2;

/// The steps along `k` in which partial tiles are added by the consumer that is ahead, as first and
/// count: the second half of a tile, as the worker's tile before may be on its way for the first.
const fn steps(k_steps: u32) -> (u32, u32) {
    let first = k_steps / 2;
    (first, (k_steps - first).saturating_sub(LAG))
}

/// Most partial tiles that there is room for along `k`.
pub(crate) const fn most_partials(k_steps: u32) -> u32 {
    steps(k_steps).1 / GAP
}

/// Of `k_steps`, the one before which the first of so many partial tiles is added, and the steps
/// from one to the next.
pub(super) const fn accumulation_steps(k_steps: u32, in_mainloop: u32) -> (u32, u32) {
    let (first, count) = steps(k_steps);
    let Some(gap) = count.checked_div(in_mainloop) else { return (first, 0) };
    (first, gap)
}
