//! One GEMM of the baseline: descriptors and algorithm are made once, and a call only launches.
//!
//! Invariant: `y[m, n] = x[m, k] * transpose(w[n, k])`, row-major and dense, with fp32
//! accumulation. cuBLASLt is column-major, so it computes `transpose(y) = w * transpose(x)`.
//!
//! Operands of 8 bits have the scales of their numerics: one of each, of each row, or of 1 x 128 of
//! `x` with 128 x 128 of `w`. Sums leave the tensor cores unless the numerics say otherwise.

use super::available;
use super::library::{Algo, Candidate, CublasError, Library, check, loaded};
use flux_core::{DType, Numerics, Problem, Rank, Scales};
use flux_cuda::{CudaDevice, DeviceBlock};
use std::ffi::{c_int, c_void};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

/// What an algorithm may use; cuBLAS itself recommends 32 MiB on Hopper.
const WORKSPACE: usize = 64 << 20;
/// `CUBLAS_OP_T` of `cublasOperation_t`.
const OP_T: c_int = 1;
/// `cublasLtMatmulDescAttributes_t`; A is `w`, and B is `x`.
mod desc {
    pub(super) const TRANSA: i32 = 3;
    pub(super) const A_SCALE_POINTER: i32 = 17;
    pub(super) const B_SCALE_POINTER: i32 = 18;
    pub(super) const FAST_ACCUM: i32 = 25;
    pub(super) const A_SCALE_MODE: i32 = 31;
    pub(super) const B_SCALE_MODE: i32 = 32;
}
/// `cublasLtMatmulMatrixScale_t`, which libraries since 12.9 have beside a scale of a tensor.
mod scale_mode {
    pub(super) const OUTER_VEC_32F: i32 = 3;
    pub(super) const VEC128_32F: i32 = 4;
    pub(super) const BLK128X128_32F: i32 = 5;
}
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
    /// Of `cudaDataType`: operands.
    pub(super) operand: c_int,
    /// Of `cudaDataType`: the result.
    pub(super) output: c_int,
    /// Of `cublasComputeType_t`.
    pub(super) compute: c_int,
    /// Of `cudaDataType`: alpha and beta.
    pub(super) scale: c_int,
}

impl Types {
    /// With fp32 accumulation: `CUBLAS_COMPUTE_32F`, `CUDA_R_32F`.
    pub(super) const fn of(numerics: Numerics) -> Self {
        // `CUDA_R_16BF`, `CUDA_R_16F`, `CUDA_R_8F_E4M3`.
        const fn data(dtype: DType) -> c_int {
            match dtype {
                DType::Bf16 => 14,
                DType::F16 => 2,
                DType::E4m3 => 28,
            }
        }
        let (operand, output) = (data(numerics.operand), data(numerics.output));
        Self { operand, output, compute: 68, scale: 0 }
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
    /// Of a rank's part of a problem, with all rows.
    pub(crate) const fn of(problem: &Problem, rank: Rank) -> Self {
        Self { m: problem.m(), n: problem.n_local(rank), k: problem.k_local(rank) }
    }
}

/// Device addresses of a GEMM's operands.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "operands of the GEMM, as everywhere")]
pub struct GemmOperands {
    pub x: u64,
    pub w: u64,
    pub y: u64,
    /// Of `x` and of `w`, as cuBLASLt lays them out, where operands have some.
    pub scales: Option<[u64; 2]>,
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
    /// No cuBLASLt, no algorithm for the shape, `CublasError::Scales` where it has none with such
    /// scales, or a refusal.
    pub fn new(
        device: &CudaDevice,
        shape: GemmShape,
        numerics: Numerics,
    ) -> Result<Self, CublasError> {
        let scales = numerics.scales;
        Self::prepared(device, shape, numerics).map_err(|why| match why {
            CublasError::Call { .. } | CublasError::NoAlgorithm { .. }
                if scales != Scales::None =>
            {
                let version = available().map_or(0, |(_, version)| version);
                CublasError::Scales { scales, version, why: Box::new(why) }
            }
            why => why,
        })
    }

    fn prepared(
        device: &CudaDevice,
        shape: GemmShape,
        numerics: Numerics,
    ) -> Result<Self, CublasError> {
        let (_, library) = loaded()?;
        let _current = device.enter()?;
        let workspace = DeviceBlock::new(device, WORKSPACE)?;
        let mut gemm = Self {
            library,
            handle: 0,
            desc: 0,
            w_layout: 0,
            x_layout: 0,
            y_layout: 0,
            types: Types::of(numerics),
            workspace,
            candidates: Vec::new(),
            chosen: [0; 8],
        };
        gemm.describe(shape, numerics)?;
        gemm.candidates = gemm.ask(CANDIDATES)?;
        gemm.choose_first(shape)?;
        Ok(gemm)
    }

    fn describe(&mut self, shape: GemmShape, numerics: Numerics) -> Result<(), CublasError> {
        let (lt, Types { compute, scale, .. }) = (self.library, self.types);
        // SAFETY: a place for the result.
        check("cublasLtCreate", unsafe { (lt.create)(&raw mut self.handle) })?;
        // SAFETY: a place for the result.
        check("cublasLtMatmulDescCreate", unsafe {
            (lt.desc_create)(&raw mut self.desc, compute, scale)
        })?;
        // SAFETY: the attribute is an int.
        unsafe { self.set(desc::TRANSA, OP_T) }?;
        if numerics.scales != Scales::None {
            // SAFETY: the attribute is an `i8`.
            unsafe { self.set(desc::FAST_ACCUM, i8::from(numerics.fast_accumulation)) }?;
            // The heuristic asks for addresses, and reads nothing there.
            self.point_at_scales([self.workspace.address(); 2])?;
        }
        let modes = match numerics.scales {
            // The default, which libraries before 12.8 have alone.
            Scales::None | Scales::Tensor => None,
            Scales::Row => Some([scale_mode::OUTER_VEC_32F; 2]),
            Scales::Block => Some([scale_mode::VEC128_32F, scale_mode::BLK128X128_32F]),
        };
        if let Some([x, w]) = modes {
            for (attribute, mode) in [(desc::A_SCALE_MODE, w), (desc::B_SCALE_MODE, x)] {
                // SAFETY: the attributes are ints.
                unsafe { self.set(attribute, mode) }?;
            }
        }
        self.lay_out(shape)
    }

    fn point_at_scales(&self, [x, w]: [u64; 2]) -> Result<(), CublasError> {
        for (attribute, address) in [(desc::A_SCALE_POINTER, w), (desc::B_SCALE_POINTER, x)] {
            // SAFETY: the attributes are addresses.
            unsafe { self.set(attribute, address) }?;
        }
        Ok(())
    }

    /// Sets an attribute of the descriptor, which exists.
    ///
    /// # Safety
    /// The attribute is of this type.
    unsafe fn set<T: Copy>(&self, attribute: c_int, value: T) -> Result<(), CublasError> {
        let from = (&raw const value).cast();
        // SAFETY: the caller's promise; the library copies the value.
        check("cublasLtMatmulDescSetAttribute", unsafe {
            (self.library.desc_set)(self.desc, attribute, from, size_of::<T>())
        })
    }

    /// Describes the operands, in place of others where there are some.
    fn lay_out(&mut self, GemmShape { m, n, k }: GemmShape) -> Result<(), CublasError> {
        self.forget_layouts();
        let (lt, Types { operand, output, .. }) = (self.library, self.types);
        let (m, n, k) = (u64::from(m), u64::from(n), u64::from(k));
        for (layout, element, rows, cols) in [
            (&mut self.w_layout, operand, k, n),
            (&mut self.x_layout, operand, k, m),
            (&mut self.y_layout, output, n, m),
        ] {
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
        let Self { library: lt, handle, desc, w_layout: w, x_layout: x, y_layout: y, .. } = *self;
        let mut candidates = vec![Candidate::default(); most.unsigned_abs() as usize];
        let mut preference = 0;
        // SAFETY: a place for the result.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            (lt.preference_create)(&raw mut preference)
        })?;
        let (limit, bytes) = (WORKSPACE, size_of::<usize>());
        let from = (&raw const limit).cast();
        // SAFETY: the attribute is a size_t, and the preference exists.
        let set = unsafe { (lt.preference_set)(preference, PREF_MAX_WORKSPACE_BYTES, from, bytes) };
        let (into, mut found) = (candidates.as_mut_ptr(), 0);
        // SAFETY: all descriptors exist; there is room for `most` results.
        let asked = unsafe {
            (lt.heuristic)(handle, desc, w, x, y, y, preference, most, into, &raw mut found)
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
    /// The operands are dense, of the GEMM's shape, until the stream is past the call, and have
    /// scales if its numerics do. `stream` is a `CUstream` of the device, and the only one that
    /// uses this GEMM at a time.
    pub unsafe fn launch(&self, operands: GemmOperands, stream: usize) -> Result<(), CublasError> {
        let GemmOperands { x, w, y, scales } = operands;
        if let Some(scales) = scales {
            self.point_at_scales(scales)?;
        }
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
