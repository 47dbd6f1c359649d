//! Sets of operands, and lists with a value for each operand of a call.

use super::Operand;
use flux_core::problem::MAX_WEIGHTS;
use std::fmt;

/// A set of operands.
///
/// ```
/// use flux_kernels::{Operand, OperandSet};
/// let set: OperandSet = [Operand::Residual, Operand::Bias].into_iter().collect();
/// assert_eq!((set.to_string(), set.has(Operand::Gain)), ("bias, residual".to_owned(), false));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct OperandSet {
    bits: u32,
}

impl OperandSet {
    /// No operand.
    pub const EMPTY: Self = Self { bits: 0 };

    const fn bit(operand: Operand) -> u32 {
        1 << operand as u32
    }

    /// Whether an operand is among them.
    pub const fn has(self, operand: Operand) -> bool {
        self.bits & Self::bit(operand) != 0
    }

    /// Adds an operand, or takes it out.
    pub const fn set(&mut self, operand: Operand, has: bool) {
        *self = self.with(operand, has);
    }

    /// The same with an operand, or without.
    #[must_use]
    pub const fn with(self, operand: Operand, has: bool) -> Self {
        let bits = self.bits & !Self::bit(operand);
        Self { bits: if has { bits | Self::bit(operand) } else { bits } }
    }

    /// The operands in the order of [`Operand::ALL`].
    pub fn iter(self) -> impl Iterator<Item = Operand> {
        Operand::ALL.into_iter().filter(move |&operand| self.has(operand))
    }
}

impl FromIterator<Operand> for OperandSet {
    fn from_iter<I: IntoIterator<Item = Operand>>(operands: I) -> Self {
        operands.into_iter().fold(Self::EMPTY, |set, operand| set.with(operand, true))
    }
}

impl fmt::Display for OperandSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(|operand| operand.name(0)).collect();
        f.write_str(&names.join(", "))
    }
}

/// An operand in a list.
#[derive(Clone, Copy)]
struct Slot {
    operand: Operand,
    weight: usize,
}

const SLOTS: usize = {
    let (mut count, mut row) = (0, 0);
    while row < Operand::ALL.len() {
        count += if Operand::ALL[row].is_of_weight() { MAX_WEIGHTS } else { 1 };
        row += 1;
    }
    count
};

/// The slots in the order of the operands, then of the weights.
const ALL: [Slot; SLOTS] = {
    let mut all = [Slot { operand: Operand::X, weight: 0 }; SLOTS];
    let (mut at, mut row) = (0, 0);
    while row < Operand::ALL.len() {
        let operand = Operand::ALL[row];
        let mut weight = 0;
        while weight < if operand.is_of_weight() { MAX_WEIGHTS } else { 1 } {
            all[at] = Slot { operand, weight };
            at += 1;
            weight += 1;
        }
        row += 1;
    }
    all
};

/// The first slot of each operand.
const FIRST: [usize; Operand::ALL.len()] = {
    let mut first = [0; Operand::ALL.len()];
    let mut at = SLOTS;
    while at > 0 {
        at -= 1;
        first[ALL[at].operand as usize] = at;
    }
    first
};

/// A value for each operand that a call brings, without allocation.
///
/// ```
/// use flux_kernels::{Operand, OperandList};
/// let mut rows = OperandList::new();
/// rows.set(Operand::Y, 1, 16);
/// rows.set(Operand::X, 0, 4);
/// let names: Vec<_> = rows.iter().map(|(operand, weight, _)| operand.name(weight)).collect();
/// assert_eq!((names, rows.get(Operand::Y, 0)), (vec!["x", "y[1]"], None));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct OperandList<V> {
    values: [Option<V>; SLOTS],
}

impl<V> OperandList<V> {
    /// No operand.
    pub const fn new() -> Self {
        Self { values: [const { None }; SLOTS] }
    }

    /// Puts in an operand: of a call, whose `weight` is 0, or of a weight.
    ///
    /// # Panics
    /// If no such operand has this weight.
    pub fn set(&mut self, operand: Operand, weight: usize, value: V) {
        assert!(weight == 0 || operand.is_of_weight() && weight < MAX_WEIGHTS, "{operand:?}");
        self.values[FIRST[operand as usize] + weight] = Some(value);
    }

    /// The operand of a weight, or with 0 of the call.
    pub fn get(&self, operand: Operand, weight: usize) -> Option<&V> {
        let is_slot = weight == 0 || operand.is_of_weight() && weight < MAX_WEIGHTS;
        self.values.get(FIRST[operand as usize] + weight)?.as_ref().filter(|_| is_slot)
    }

    /// Each operand with its weight, in the order of [`Operand::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Operand, usize, &V)> {
        ALL.into_iter().zip(&self.values).filter_map(|(slot, value)| {
            let Slot { operand, weight } = slot;
            Some((operand, weight, value.as_ref()?))
        })
    }

    /// Another value for each operand, unless one has none.
    ///
    /// # Errors
    /// The first error of `to`.
    pub fn try_map<'v, U, E>(
        &'v self,
        mut to: impl FnMut(Operand, usize, &'v V) -> Result<U, E>,
    ) -> Result<OperandList<U>, E> {
        let mut list = OperandList::new();
        for (operand, weight, value) in self.iter() {
            list.set(operand, weight, to(operand, weight, value)?);
        }
        Ok(list)
    }

    /// Another value for each operand.
    pub fn map<'v, U>(&'v self, mut to: impl FnMut(Operand, usize, &'v V) -> U) -> OperandList<U> {
        let mut list = OperandList::new();
        for (operand, weight, value) in self.iter() {
            list.set(operand, weight, to(operand, weight, value));
        }
        list
    }

    /// Whether each operand of weights is there for all of so many, or for none.
    pub fn is_of_all_or_none(&self, weights: usize) -> bool {
        let mut of_weights = Operand::ALL.into_iter().filter(|operand| operand.is_of_weight());
        of_weights.all(|operand| {
            let has = |weight| self.get(operand, weight).is_some();
            (0..weights).all(has) || !(0..weights).any(has)
        })
    }
}

impl<V> Default for OperandList<V> {
    fn default() -> Self {
        Self::new()
    }
}
