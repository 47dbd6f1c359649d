//! Activations as bindings name and number them.
//!
//! Invariant: a number keeps its meaning, as callers in other languages are compiled with it.

use flux_kernels::{Activation, GateLayout};

/// An activation with a name of its own, with or without gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "fields are named after the methods of Builder")]
pub struct NamedActivation {
    pub name: &'static str,
    pub activation: Activation,
    pub gates: Option<GateLayout>,
}

impl NamedActivation {
    /// Every one, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::plain("none", Activation::None),
        Self::plain("gelu", Activation::Gelu),
        Self::plain("silu", Activation::Silu),
        Self::plain("relu", Activation::Relu),
        Self::gated("geglu", Activation::Gelu, GateLayout::Concatenated),
        Self::gated("swiglu", Activation::Silu, GateLayout::Concatenated),
        Self::gated("reglu", Activation::Relu, GateLayout::Concatenated),
        Self::gated("geglu_interleaved", Activation::Gelu, GateLayout::Interleaved),
        Self::gated("swiglu_interleaved", Activation::Silu, GateLayout::Interleaved),
        Self::gated("reglu_interleaved", Activation::Relu, GateLayout::Interleaved),
    ];

    const fn plain(name: &'static str, activation: Activation) -> Self {
        Self { name, activation, gates: None }
    }

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
        assert_eq!(NamedActivation::numbered(10), None);
    }
}
