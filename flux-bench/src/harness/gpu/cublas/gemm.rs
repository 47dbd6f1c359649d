//! One GEMM of the baseline: descriptors and algorithm are made once, and a call only launches.
//!
//! Invariant: `y[m, n] = x[m, k] * transpose(w[n, k])`, row-major and dense, with fp32
//! accumulation. cuBLASLt is column-major, so it computes `transpose(y) = w * transpose(x)`.

use super::library::{Algo, Candidate, CublasError, Library, check, library};
use flux_core::{DType, Problem};
use flux_cuda::{CudaDevice, DeviceBlock};
use std::ffi::{c_int, c_void};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// What an algorithm may use; cuBLAS itself recommends 32 MiB on Hopper.
const WORKSPACE: usize = 64 << 20;
/// `CUBLAS_OP_T` of `cublasOperation_t`.
const OP_T: c_int = 1;
/// `CUBLASLT_MATMUL_DESC_TRANSA` of `cublasLtMatmulDescAttributes_t`.
const DESC_TRANSA: c_int = 3;
/// `CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES` of `cublasLtMatmulPreferenceAttributes_t`.
const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
/// Algorithms that the heuristic is asked for.
const CANDIDATES: c_int = 16;
/// The same where every algorithm is wanted: more than it has.
const ALL_CANDIDATES: c_int = 512;

/// Whether the library can run it in our workspace.
fn is_usable(candidate: &Candidate) -> bool {
    candidate.state == 0 && candidate.workspace <= WORKSPACE
}

/// Types of a GEMM, as the library numbers them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    /// Of `cudaDataType`: operands and result.
    pub(super) element: c_int,
    /// Of `cublasComputeType_t`.
    pub(super) compute: c_int,
    /// Of `cudaDataType`: alpha and beta.
    pub(super) scale: c_int,
}

impl Types {
    /// With fp32 accumulation: `CUDA_R_16BF` or `CUDA_R_16F`, `CUBLAS_COMPUTE_32F`, `CUDA_R_32F`.
    pub(super) const fn of(dtype: DType) -> Self {
        let element = match dtype {
            DType::Bf16 => 14,
            DType::F16 => 2,
        };
        Self { element, compute: 68, scale: 0 }
    }
}

/// Extents of a GEMM.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "extents of the GEMM, as everywhere")]
pub struct GemmShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

impl GemmShape {
    /// Of a problem of one rank.
    pub(crate) const fn of(alone: &Problem) -> Self {
        Self { m: alone.m(), n: alone.n(), k: alone.k() }
    }
}

/// A GEMM of one shape on one device.
#[derive(Debug)]
pub struct Gemm {
    pub(super) library: &'static Library,
    // Destroyed in `Drop`, in the order in which they were made.
    pub(super) handle: usize,
    pub(super) desc: usize,
    pub(super) w_layout: usize,
    pub(super) x_layout: usize,
    pub(super) y_layout: usize,
    pub(super) types: Types,
    workspace: DeviceBlock,
    candidates: Vec<Candidate>,
    chosen: Algo,
}

impl Gemm {
    /// Prepares the GEMM and asks the heuristic for its candidates; the first is chosen.
    ///
    /// # Errors
    /// No cuBLASLt, no algorithm for the shape, or a refusal.
    pub fn new(device: &CudaDevice, shape: GemmShape, dtype: DType) -> Result<Self, CublasError> {
        let library = library()?;
        let _current = device.enter()?;
        let workspace = DeviceBlock::new(device, WORKSPACE)?;
        let mut gemm = Self {
            library,
            handle: 0,
            desc: 0,
            w_layout: 0,
            x_layout: 0,
            y_layout: 0,
            types: Types::of(dtype),
            workspace,
            candidates: Vec::new(),
            chosen: [0; 8],
        };
        gemm.describe(shape)?;
        gemm.candidates = gemm.ask(CANDIDATES)?;
        gemm.choose_first(shape)?;
        Ok(gemm)
    }

    fn describe(&mut self, shape: GemmShape) -> Result<(), CublasError> {
        let (lt, Types { compute, scale, .. }) = (self.library, self.types);
        // SAFETY: a place for the result.
        check("cublasLtCreate", unsafe { (lt.create)(&raw mut self.handle) })?;
        // SAFETY: a place for the result.
        check("cublasLtMatmulDescCreate", unsafe {
            (lt.desc_create)(&raw mut self.desc, compute, scale)
        })?;
        let transpose = OP_T;
        // SAFETY: the attribute is an int, and the descriptor exists.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            (lt.desc_set)(
                self.desc,
                DESC_TRANSA,
                (&raw const transpose).cast::<c_void>(),
                size_of::<c_int>(),
            )
        })?;
        self.lay_out(shape)
    }

    /// Describes the operands, in place of others where there are some.
    fn lay_out(&mut self, GemmShape { m, n, k }: GemmShape) -> Result<(), CublasError> {
        self.forget_layouts();
        let (lt, element) = (self.library, self.types.element);
        let (m, n, k) = (u64::from(m), u64::from(n), u64::from(k));
        for (layout, rows, cols) in
            [(&mut self.w_layout, k, n), (&mut self.x_layout, k, m), (&mut self.y_layout, n, m)]
        {
            // SAFETY: a place for the result.
            check("cublasLtMatrixLayoutCreate", unsafe {
                (lt.layout_create)(layout, element, rows, cols, rows.cast_signed())
            })?;
        }
        Ok(())
    }

    fn forget_layouts(&mut self) {
        for layout in [&mut self.y_layout, &mut self.x_layout, &mut self.w_layout] {
            let made = std::mem::take(layout);
            if made != 0 {
                // SAFETY: made by this object, destroyed once; a launch has read it when it
                // returns.
                unsafe { (self.library.layout_destroy)(made) };
            }
        }
    }

    /// Makes it the GEMM of another shape, by the heuristic's first algorithm.
    ///
    /// # Errors
    /// No algorithm for the shape, or a refusal.
    pub(crate) fn reshape(&mut self, shape: GemmShape) -> Result<(), CublasError> {
        self.lay_out(shape)?;
        self.candidates = self.ask(1)?;
        self.choose_first(shape)
    }

    fn choose_first(&mut self, GemmShape { m, n, k }: GemmShape) -> Result<(), CublasError> {
        self.chosen = self.candidates.first().ok_or(CublasError::NoAlgorithm { m, n, k })?.algo;
        Ok(())
    }

    /// The heuristic's best algorithms, at most `most`.
    fn ask(&self, most: c_int) -> Result<Vec<Candidate>, CublasError> {
        let lt = self.library;
        let mut candidates = vec![Candidate::default(); most.unsigned_abs() as usize];
        let mut preference = 0;
        // SAFETY: a place for the result.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            (lt.preference_create)(&raw mut preference)
        })?;
        let limit = WORKSPACE;
        // SAFETY: the attribute is a size_t, and the preference exists.
        let set = unsafe {
            (lt.preference_set)(
                preference,
                PREF_MAX_WORKSPACE_BYTES,
                (&raw const limit).cast::<c_void>(),
                size_of::<usize>(),
            )
        };
        let mut found: c_int = 0;
        // SAFETY: all descriptors exist; there is room for `most` results.
        let asked = unsafe {
            (lt.heuristic)(
                self.handle,
                self.desc,
                self.w_layout,
                self.x_layout,
                self.y_layout,
                self.y_layout,
                preference,
                most,
                candidates.as_mut_ptr(),
                &raw mut found,
            )
        };
        // SAFETY: made above, destroyed once.
        unsafe { (lt.preference_destroy)(preference) };
        check("cublasLtMatmulPreferenceSetAttribute", set)?;
        check("cublasLtMatmulAlgoGetHeuristic", asked)?;
        candidates.truncate(found.unsigned_abs() as usize);
        candidates.retain(is_usable);
        Ok(candidates)
    }

    /// Takes every algorithm of the library for the shape as a candidate: those of the heuristic,
    /// and all others that compute it in one pass over k.
    ///
    /// # Errors
    /// A refusal of the library.
    pub(crate) fn take_all(&mut self) -> Result<(), CublasError> {
        self.candidates = self.ask(ALL_CANDIDATES)?;
        self.candidates.extend(self.configurations()?.into_iter().filter(is_usable));
        Ok(())
    }

    /// Keeps the candidates whose place in `kept` is true.
    pub(crate) fn retain(&mut self, kept: &[bool]) {
        let mut kept = kept.iter();
        self.candidates.retain(|_| kept.next().copied().unwrap_or(false));
    }

    /// Number of candidates, the same on equal devices.
    pub fn candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Uses candidate `index` from now on.
    ///
    /// # Panics
    /// When there is no such candidate.
    pub fn choose(&mut self, index: usize) {
        self.chosen = self.candidates[index].algo;
    }

    /// Launches the GEMM on `stream` and returns.
    ///
    /// # Safety
    /// `x`, `w` and `y` are device addresses of dense operands of the GEMM's shape until the stream
    /// is past the call. `stream` is a `CUstream` of the device, and the only one that uses this
    /// GEMM at a time.
    pub unsafe fn launch(&self, x: u64, w: u64, y: u64, stream: usize) -> Result<(), CublasError> {
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        let source = |address: u64| with_exposed_provenance::<c_void>(address as usize);
        let target = |address: u64| with_exposed_provenance_mut::<c_void>(address as usize);
        // SAFETY: the caller's promise for the operands; all else is this object's.
        let status = unsafe {
            (self.library.matmul)(
                self.handle,
                self.desc,
                (&raw const alpha).cast(),
                source(w),
                self.w_layout,
                source(x),
                self.x_layout,
                (&raw const beta).cast(),
                source(y),
                self.y_layout,
                target(y),
                self.y_layout,
                &raw const self.chosen,
                target(self.workspace.address()),
                self.workspace.bytes(),
                stream,
            )
        };
        check("cublasLtMatmul", status)
    }
}

impl Drop for Gemm {
    fn drop(&mut self) {
        self.forget_layouts();
        let lt = self.library;
        if self.desc != 0 {
            // SAFETY: made by this object, destroyed once.
            unsafe { (lt.desc_destroy)(self.desc) };
        }
        if self.handle != 0 {
            // SAFETY: made by this object, destroyed once.
            unsafe { (lt.destroy)(self.handle) };
        }
    }
}
