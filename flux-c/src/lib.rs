//! The C interface: `include/flux.h`, which `tests/header.rs` makes from the files of this crate.
//!
//! Invariant: no handle is an address, so an unknown one is an error and never read. No panic
//! leaves a function. Whatever C passes as an enumeration arrives as an integer.
#![allow(non_camel_case_types, reason = "C's names")]
#![allow(
    clippy::struct_field_names,
    reason = "a handle's value is the thing of that name and what it needs"
)]
#![allow(
    clippy::missing_safety_doc,
    reason = "the comments are those of the header: they say what each pointer is"
)]

mod comm;
mod error;
mod handle;
mod messages;
mod op;
mod options;
mod tensor;

pub use comm::{
    flux_comm, flux_comm_abort, flux_comm_barrier, flux_comm_check, flux_comm_destroy,
    flux_comm_explain, flux_comm_from_env, flux_comm_graphs, flux_comm_init_all,
    flux_comm_init_rank, flux_comm_memory, flux_comm_options, flux_comm_place, flux_comm_rebuild,
    flux_rebuild,
};
pub use error::{flux_last_error_message, flux_last_error_ranks, flux_status};
pub use op::{
    flux_op, flux_op_columns, flux_op_create, flux_op_destroy, flux_op_explain,
    flux_op_forward_cuda, flux_op_forward_host, flux_op_inner, flux_op_prepare, flux_op_rows,
    flux_op_weight_columns,
};
pub use options::{
    FLUX_MAX_WEIGHTS, FLUX_OP_BATCH_INVARIANT, FLUX_OP_BIAS, FLUX_OP_CAPTURES,
    FLUX_OP_F32_PARTIALS, FLUX_OP_FAST_ACCUMULATION, FLUX_OP_RESIDUAL, FLUX_OP_RMS_NORM,
    FLUX_OP_WEIGHTS_KN, flux_activation, flux_dtype, flux_op_kind, flux_op_options, flux_scales,
};
pub use tensor::{flux_operands, flux_tensor};

/// The version of this interface. It changes with any structure: use the header of the library's
/// own build.
pub const FLUX_ABI_VERSION: u32 = 3;

/// The version of the library: compare it with FLUX_ABI_VERSION of the header.
#[unsafe(no_mangle)]
pub extern "C" fn flux_abi_version() -> u32 {
    FLUX_ABI_VERSION
}
