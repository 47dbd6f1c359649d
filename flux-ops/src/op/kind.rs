//! The op kinds as types.
//!
//! Invariant: no type outside this crate is a kind, as the trait cannot be named there.

use flux_core::OpKind;

/// A type that stands for an op kind.
pub trait OpMarker: 'static {
    /// The kind.
    const OP: OpKind;
}

/// A kind whose result is a sum over ranks.
pub trait Reduces: OpMarker {}

/// AllGather, then GEMM.
#[derive(Debug)]
pub enum AllGather {}

/// GEMM, then ReduceScatter.
#[derive(Debug)]
pub enum ReduceScatter {}

/// GEMM, then AllReduce.
#[derive(Debug)]
pub enum AllReduce {}

impl OpMarker for AllGather {
    const OP: OpKind = OpKind::AllGatherGemm;
}

impl OpMarker for ReduceScatter {
    const OP: OpKind = OpKind::GemmReduceScatter;
}

impl OpMarker for AllReduce {
    const OP: OpKind = OpKind::GemmAllReduce;
}

impl Reduces for ReduceScatter {}

impl Reduces for AllReduce {}
