//! What a row is of: one head for the rows of every record.
//!
//! Invariant: its fields come first in a row, in this order.

use crate::shapes::{self, parse_op};
use flux_core::{DType, Numerics, Partials, Problem};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One op at one shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// `ag_gemm`, `gemm_rs` or `gemm_ar`.
    pub op: String,
    /// Whose layer the shape is.
    pub model: String,
    /// Global rows.
    pub m: u32,
    /// Global output columns.
    pub n: u32,
    /// Global length of the inner product.
    pub k: u32,
    /// Ranks of the world.
    pub tp: u32,
    /// The element types, as in `bf16` or `e4m3.row:bf16`; partial sums in fp32 are in the model's
    /// name. Files of first calls did not say it, when there were none but of `bf16`.
    #[serde(default = "bf16")]
    pub dtype: String,
}

fn bf16() -> String {
    DType::Bf16.name().to_owned()
}

impl Head {
    /// What stands above [`Self::cells`].
    pub(crate) const COLUMNS: [&str; 5] = ["op", "model", "m", "n", "k"];

    /// Of `problem`, a layer of `model`.
    pub fn new(model: &str, problem: &Problem) -> Self {
        Self {
            op: problem.op().name().to_owned(),
            model: model.to_owned(),
            m: problem.m(),
            n: problem.n(),
            k: problem.k(),
            tp: problem.world().get(),
            dtype: problem.numerics().with_partials(Partials::Output).to_string(),
        }
    }

    /// The problem that it names.
    pub(crate) fn problem(&self) -> anyhow::Result<Problem> {
        let [m, n, k] = [self.m, self.n, self.k].map(|extent| extent as usize);
        let op = parse_op(&self.op).map_err(anyhow::Error::msg)?;
        let numerics: Numerics = self.dtype.parse()?;
        Ok(Problem::new(op, m, n, k, numerics, shapes::world(self.tp)?)?)
    }

    /// Whether both are of one problem with one epilogue, whosever layers they call it.
    pub fn same_problem(&self, other: &Self) -> bool {
        let key = |head: &Self| (head.m, head.n, head.k, head.tp);
        key(self) == key(other)
            && self.op == other.op
            && self.dtype == other.dtype
            && self.epilogue() == other.epilogue()
    }

    /// The epilogue behind the model's name, as in `+residual+norm`. Partial sums in fp32 stand
    /// before it: peers have no name for them, and take the same problem.
    fn epilogue(&self) -> &str {
        let suffix = self.model.find('+').map_or("", |at| &self.model[at..]);
        suffix.strip_prefix("+f32").unwrap_or(suffix)
    }

    /// How a line of a table begins, cell by cell.
    pub(crate) fn cells(&self) -> Vec<String> {
        let extents = [self.m, self.n, self.k].map(|extent| extent.to_string());
        [self.op.clone(), self.model.clone()].into_iter().chain(extents).collect()
    }
}

/// How an error names the row.
impl fmt::Display for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} m {}", self.op, self.model, self.m)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_core::{OpKind, WorldSize};

    fn head() -> Head {
        let problem = Problem::new(
            OpKind::AllGatherGemm,
            512,
            49152,
            12288,
            DType::F16,
            WorldSize::new(8).unwrap(),
        )
        .unwrap();
        Head::new("gpt3", &problem)
    }

    #[test]
    fn a_row_without_its_type_is_of_bf16() {
        let mut json = serde_json::to_value(head()).unwrap();
        assert_eq!(serde_json::from_value::<Head>(json.clone()).unwrap(), head());
        json.as_object_mut().unwrap().remove("dtype").unwrap();
        assert_eq!(
            serde_json::from_value::<Head>(json).unwrap(),
            Head { dtype: "bf16".to_owned(), ..head() }
        );
    }

    #[test]
    fn a_problem_is_the_same_under_another_models_name_only() {
        let called = |model: &str| Head { model: model.to_owned(), ..head() };
        for (one, another) in [
            ("gpt3", "other"),
            ("gpt3+norm", "other+norm"),
            ("gpt3+f32", "other"),
            ("gpt3+f32+norm", "other+norm"),
        ] {
            assert!(called(one).same_problem(&called(another)), "{one} {another}");
        }
        for another in ["gpt3+norm", "gpt3+residual+norm", "gpt3+f32+norm"] {
            assert!(!head().same_problem(&called(another)), "{another}");
        }
        let others = [
            Head { op: "gemm_rs".to_owned(), ..head() },
            Head { m: 1, ..head() },
            Head { n: 1, ..head() },
            Head { k: 1, ..head() },
            Head { tp: 1, ..head() },
            Head { dtype: "bf16".to_owned(), ..head() },
        ];
        for other in others {
            assert!(!head().same_problem(&other), "{other:?}");
        }
    }

    #[test]
    fn a_row_is_named_by_its_problem() {
        assert_eq!(head().cells(), ["ag_gemm", "gpt3", "512", "49152", "12288"]);
        assert_eq!(head().to_string(), "ag_gemm gpt3 m 512");
    }

    #[test]
    fn a_head_is_the_problem_that_it_was_made_from() {
        let head = head();
        assert_eq!(Head::new("gpt3", &head.problem().unwrap()), head);
        for wrong in [
            Head { dtype: "fp8".to_owned(), ..head.clone() },
            Head { op: "gemm".to_owned(), ..head.clone() },
            Head { m: 0, ..head.clone() },
            Head { tp: 0, ..head.clone() },
            Head { n: 7, ..head },
        ] {
            assert!(wrong.problem().is_err(), "{wrong}");
        }
    }
}
