//! `flux-bench run` on GPUs: the same input files as on the host give the same products.

#![allow(clippy::unwrap_used, reason = "a test panics where it fails")]

mod gpu_support;
mod run_support;

use flux_bench::{EpilogueArgs, RunArgs, run_file};
use flux_core::OpKind;
use flux_ops::binding::NamedActivation;
use flux_transport::Select;
use gpu_support::gpus;
use run_support::Case;
use safetensors::Dtype;

#[test]
fn both_ops_write_the_whole_product_in_both_types() {
    let Some(gpus) = gpus("both_ops_write_the_whole_product_in_both_types") else { return };
    // The input's extents divide by these.
    for ranks in [1, 2, 4, 8].into_iter().filter(|&ranks| ranks <= gpus) {
        for op in [OpKind::AllGatherGemm, OpKind::GemmReduceScatter] {
            for dtype in [Dtype::BF16, Dtype::F16] {
                let case = Case::new(dtype);
                run_file(&RunArgs {
                    op,
                    ranks,
                    epilogue: EpilogueArgs { activation: NamedActivation::ALL[0], norm: None },
                    batch_invariant: false,
                    transport: Select::NvLink,
                    input: case.input(),
                    output: case.output(),
                })
                .unwrap();
                case.assert_product(&format!("{op} {dtype:?} on {ranks} ranks"));
            }
        }
    }
}
