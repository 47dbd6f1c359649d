//! Names of the kernels that a library launches, read from a captured graph.
//!
//! Invariant: what is captured is never run.

use anyhow::{Context, ensure};
use flux_cuda::{CudaDevice, SideStream, library};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: other threads may do as they like meanwhile.
const RELAXED: c_int = 2;
/// `CU_GRAPH_NODE_TYPE_KERNEL`.
const KERNEL: c_int = 0;

/// `CUDA_KERNEL_NODE_PARAMS` of version 2.
#[repr(C)]
#[derive(Debug)]
struct KernelNode {
    function: usize,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    /// Where `function` is null.
    kernel: usize,
    context: usize,
}

flux_cuda::table! {
    /// The driver's entry points for graphs; names are read from CUDA 12.3 on.
    struct Entries {
        begin_capture = "cuStreamBeginCapture_v2" (usize, c_int) -> c_int;
        end_capture = "cuStreamEndCapture" (usize, *mut usize) -> c_int;
        graph_destroy = "cuGraphDestroy" (usize) -> c_int;
        graph_nodes = "cuGraphGetNodes" (usize, *mut usize, *mut usize) -> c_int;
        node_type = "cuGraphNodeGetType" (usize, *mut c_int) -> c_int;
        kernel_node = "cuGraphKernelNodeGetParams_v2" (usize, *mut KernelNode) -> c_int;
        function_name = "cuFuncGetName" (*mut *const c_char, usize) -> c_int;
        kernel_name = "cuKernelGetName" (*mut *const c_char, usize) -> c_int;
    }
}

fn entries() -> anyhow::Result<&'static Entries> {
    static ENTRIES: OnceLock<Result<Entries, String>> = OnceLock::new();
    let load = || {
        let (_, library) =
            library::first(vec!["libcuda.so.1".into()]).map_err(|none| none.to_string())?;
        bind(library)
    };
    ENTRIES
        .get_or_init(load)
        .as_ref()
        .map_err(|why| anyhow::anyhow!("kernels' names cannot be read: {why}"))
}

fn bind(library: library::Library) -> Result<Entries, String> {
    // SAFETY: the entries are declared as in cuda.h.
    unsafe { Entries::bind(library) }.map_err(|missing| {
        format!("the driver has no {}, which came with CUDA 12.3", missing.symbol)
    })
}

fn check(call: &str, code: c_int) -> anyhow::Result<()> {
    ensure!(code == 0, "{call} failed with code {code}");
    Ok(())
}

/// Names of the kernels that `enqueue` puts on a stream of the device, in no particular order. The
/// kernels must have run before, as a first launch may load code, which a capture does not allow.
pub(crate) fn of_captured(
    device: &CudaDevice,
    enqueue: impl FnOnce(usize) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<String>> {
    let driver = entries()?;
    device.bind()?;
    let stream = SideStream::new(device)?;
    // SAFETY: the stream exists and nothing is on it.
    check("cuStreamBeginCapture", unsafe { (driver.begin_capture)(stream.raw(), RELAXED) })?;
    let enqueued = enqueue(stream.raw());
    let mut graph = Graph { driver, handle: 0 };
    // SAFETY: the capture was begun above; a place for the result.
    let ended = unsafe { (driver.end_capture)(stream.raw(), &raw mut graph.handle) };
    enqueued?;
    check("cuStreamEndCapture", ended)?;
    graph.nodes()?.into_iter().filter_map(|node| graph.name_of(node).transpose()).collect()
}

/// A captured graph, destroyed when dropped.
struct Graph {
    driver: &'static Entries,
    handle: usize,
}

impl Graph {
    fn nodes(&self) -> anyhow::Result<Vec<usize>> {
        let mut count = 0;
        // SAFETY: the graph exists; without room the number is told.
        check("cuGraphGetNodes", unsafe {
            (self.driver.graph_nodes)(self.handle, null_mut(), &raw mut count)
        })?;
        let mut nodes = vec![0; count];
        // SAFETY: there is room for `count` nodes.
        check("cuGraphGetNodes", unsafe {
            (self.driver.graph_nodes)(self.handle, nodes.as_mut_ptr(), &raw mut count)
        })?;
        nodes.truncate(count);
        Ok(nodes)
    }

    /// The kernel's name; none of another node.
    fn name_of(&self, node: usize) -> anyhow::Result<Option<String>> {
        let driver = self.driver;
        let mut kind = KERNEL;
        // SAFETY: the node is of the graph; a place for the result.
        check("cuGraphNodeGetType", unsafe { (driver.node_type)(node, &raw mut kind) })?;
        if kind != KERNEL {
            return Ok(None);
        }
        let mut launch = KernelNode {
            function: 0,
            grid: [0; 3],
            block: [0; 3],
            shared_bytes: 0,
            params: null_mut(),
            extra: null_mut(),
            kernel: 0,
            context: 0,
        };
        // SAFETY: the node is a kernel's; a place for the result.
        check("cuGraphKernelNodeGetParams", unsafe {
            (driver.kernel_node)(node, &raw mut launch)
        })?;
        let mut name: *const c_char = null();
        let code = match launch.function {
            // SAFETY: the kernel is of a loaded library; a place for the result.
            0 => unsafe { (driver.kernel_name)(&raw mut name, launch.kernel) },
            // SAFETY: the function is of a loaded module; a place for the result.
            function => unsafe { (driver.function_name)(&raw mut name, function) },
        };
        check("cuFuncGetName", code)?;
        ensure!(!name.is_null(), "the driver has no name for a kernel");
        // SAFETY: a terminated string that lives as long as the module.
        let name = unsafe { CStr::from_ptr(name) };
        Ok(Some(name.to_str().context("a kernel's name")?.to_owned()))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.handle != 0 {
            // SAFETY: made by the capture, destroyed once.
            unsafe { (self.driver.graph_destroy)(self.handle) };
        }
    }
}

/// Whether a GEMM of these kernels is made of instructions that compute capability 8.0 has, by the
/// names that NVIDIA's libraries give.
pub(crate) fn is_of_sm80(kernels: &[String]) -> bool {
    const OF_SM80: [&str; 3] = ["sm80", "ampere", "cutlass_80"];
    let any_of = |words: &[&str]| {
        kernels.iter().any(|kernel| words.iter().any(|word| kernel.contains(word)))
    };
    any_of(&OF_SM80) && !any_of(&["sm90", "hopper", "cutlass_90", "nvjet", "sm100"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_is_told_by_the_names_of_all_kernels() {
        let of = |names: &[&str]| {
            is_of_sm80(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        assert!(of(&["sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4"]));
        assert!(of(&["ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_tn"]));
        assert!(of(&[
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_64x3_tn_align4>"
        ]));
        assert!(of(&[
            "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn",
            "splitKreduce_kernel"
        ]));
        assert!(
            !of(&["nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT"])
                && !of(&["sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"])
        );
        assert!(!of(&["sm75_xmma_gemm_f16f16"]) && !of(&["splitKreduce_kernel"]) && !of(&[]));
    }

    #[test]
    fn a_driver_without_an_entry_point_is_told_by_it() {
        let (_, library) = library::first(vec!["libc.so.6".into()]).unwrap();
        let why = bind(library).unwrap_err();
        assert_eq!(why, "the driver has no cuStreamBeginCapture_v2, which came with CUDA 12.3");
    }
}
