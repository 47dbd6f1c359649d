//! Activations as bindings name and number them.
//!
//! Invariant: names and numbers are those of the list of activations in flux-kernels.

use flux_kernels::{Activation, GateLayout, GatedNames};

/// Names of all activations.
const COUNT: usize = {
    let (mut count, mut at) = (0, 0);
    while at < Activation::ALL.len() {
        count += if Activation::ALL[at].of_gates().is_some() { 3 } else { 1 };
        at += 1;
    }
    count
};

/// An activation with a name of its own, with or without gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are named after the methods of Builder")]
pub struct NamedActivation {
    pub name: &'static str,
    pub activation: Activation,
    pub gates: Option<GateLayout>,
}

impl NamedActivation {
    /// Every one, at the place of its number.
    pub const ALL: [Self; COUNT] = {
        let mut all = [Self { name: "", activation: Activation::None, gates: None }; COUNT];
        let mut at = 0;
        while at < Activation::ALL.len() {
            let activation = Activation::ALL[at];
            all[activation.number()] = Self { name: activation.name(), activation, gates: None };
            if let Some(GatedNames { concatenated, interleaved }) = activation.of_gates() {
                all[concatenated.1] =
                    Self::gated(concatenated.0, activation, GateLayout::Concatenated);
                all[interleaved.1] =
                    Self::gated(interleaved.0, activation, GateLayout::Interleaved);
            }
            at += 1;
        }
        all
    };

    const fn gated(name: &'static str, activation: Activation, layout: GateLayout) -> Self {
        Self { name, activation, gates: Some(layout) }
    }

    /// The one with this number.
    pub fn numbered(number: usize) -> Option<Self> {
        Self::ALL.get(number).copied()
    }

    /// Columns of `y` for `n` rows of `w`.
    pub const fn columns(&self, n: usize) -> usize {
        if self.gates.is_some() { n / 2 } else { n }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_activation_has_a_name_alone_and_all_but_none_with_both_gates() {
        let has = |activation, gates| {
            NamedActivation::ALL
                .iter()
                .filter(|named| (named.activation, named.gates) == (activation, gates))
                .count()
        };
        for activation in Activation::ALL {
            assert_eq!(has(activation, None), 1, "{activation}");
            let expected = usize::from(activation != Activation::None);
            assert!(
                GateLayout::ALL.iter().all(|&layout| has(activation, Some(layout)) == expected),
                "{activation}"
            );
        }
        assert_eq!(
            [0, 5].map(|number| NamedActivation::numbered(number).unwrap().columns(32)),
            [32, 16]
        );
        assert_eq!(NamedActivation::numbered(COUNT), None);
        assert!(NamedActivation::ALL.iter().all(|named| !named.name.is_empty()), "a number twice");
    }
}
