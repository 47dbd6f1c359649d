//! Compiling with a real NVRTC.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod compiler;
mod skipped;

use flux_kernels::Source;
use flux_kernels::nvrtc::{Arch, CompileError, KernelSource, Nvrtc};
use std::path::Path;

fn nvrtc() -> Option<&'static Nvrtc> {
    compiler::nvrtc("nvrtc")
}

const SOURCE: KernelSource<'_> = KernelSource {
    name: "test",
    text: "",
    headers: &[
        ("folder/one.cuh", "#pragma once\n#include \"two.cuh\"\n"),
        ("two.cuh", "constexpr int kTwo = 2;\n"),
    ],
    options: KernelSource::OPTIONS,
    arch: Arch::Sm90a,
};

#[test]
fn headers_come_from_memory_and_the_report_from_the_compilation() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "#include \"folder/one.cuh\"\n\
                extern \"C\" __global__ void f(float* p) {\n\
                __shared__ float s[64]; s[threadIdx.x] = p[threadIdx.x]; __syncthreads(); \
                p[threadIdx.x] = s[63 - threadIdx.x] * kTwo;\n}\n";
    let compiled = nvrtc.compile(&KernelSource { text, ..SOURCE }).unwrap();
    assert!(compiled.cubin.starts_with(b"\x7fELF"));
    let [f] = &compiled.report.functions[..] else { panic!("{:?}", compiled.report) };
    assert_eq!(
        (f.function.as_str(), f.shared_bytes, f.stack_bytes, f.serialized),
        ("f", 256, 0, false)
    );
    assert!((4..32).contains(&f.registers) && (8..512).contains(&f.instructions), "{f:?}");
    assert_eq!(compiled.report.defects(), [""; 0]);
    // ptxas states the registers too: the image's attribute is the same number.
    assert!(compiled.log.contains(&format!("Used {} registers", f.registers)), "{}", compiled.log);
}

#[test]
fn the_same_source_gives_the_same_image() {
    let Some(nvrtc) = nvrtc() else { return };
    let source = Source::links();
    let source = KernelSource::ours(&source, Arch::Sm90a);
    let (first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| nvrtc.compile(&source).unwrap());
        (nvrtc.compile(&source).unwrap(), other.join().unwrap())
    });
    assert!(first.cubin == second.cubin);
}

#[test]
fn the_release_begins_with_the_version() {
    let Some(nvrtc) = nvrtc() else { return };
    let (release, version) = (nvrtc.release().unwrap(), nvrtc.version());
    assert!(release.starts_with(&format!("{version}.")), "{release}");
}

#[test]
fn spills_are_found() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "extern \"C\" __global__ void __launch_bounds__(1024, 2) f(float* p, int n) {\n\
                float v[64];\n\
                _Pragma(\"unroll\") for (int i = 0; i < 64; i++) v[i] = p[i * n + threadIdx.x];\n\
                _Pragma(\"unroll\") for (int i = 0; i < 64; i++) p[i * n + threadIdx.x + (v[63 - \
                i] != 0.f)] = v[(i * 7) % 64] * v[i];\n}\n";
    let report = nvrtc.compile(&KernelSource { text, ..SOURCE }).unwrap().report;
    let f = &report.functions[0];
    assert!(f.spill_store_bytes > 0 && f.spill_load_bytes > 0 && f.stack_bytes > 0, "{f:?}");
    let defects = report.defects();
    assert!(
        defects.len() == 2 && defects[0].starts_with("test: f: spills registers: "),
        "{defects:?}"
    );
}

#[test]
fn serialized_wgmma_is_found() {
    let Some(nvrtc) = nvrtc() else { return };
    // An accumulator is touched between two instructions of one group.
    let text = "extern \"C\" __global__ void __launch_bounds__(128) f(float* p, unsigned long long \
                a, unsigned long long b, int n) {\n\
                float d[4] = {0, 0, 0, 0};\n\
                for (int i = 0; i < n; i++) {\n\
                asm volatile(\"wgmma.fence.sync.aligned;\");\n\
                asm volatile(\"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, \
                %4, %5, 1, 1, 1, 0, 0;\"\n\
                : \"+f\"(d[0]), \"+f\"(d[1]), \"+f\"(d[2]), \"+f\"(d[3]) : \"l\"(a), \"l\"(b));\n\
                d[0] += 1.f;\n\
                asm volatile(\"wgmma.commit_group.sync.aligned;\");\n\
                }\n\
                asm volatile(\"wgmma.wait_group.sync.aligned 0;\");\n\
                for (int i = 0; i < 4; i++) p[threadIdx.x * 4 + i] = d[i];\n}\n";
    let report = nvrtc.compile(&KernelSource { text, ..SOURCE }).unwrap().report;
    assert!(report.functions[0].serialized);
    assert_eq!(report.defects(), ["test: f: its wgmma instructions are serialized"]);
    assert_eq!(report.warnings.len(), 1);
}

#[test]
fn an_error_in_the_source_comes_back_with_its_line() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = nvrtc.compile(&KernelSource { text: "\n\nnonsense;\n", ..SOURCE }).unwrap_err();
    assert!(matches!(error, CompileError::Rejected { .. }));
    assert!(error.to_string().contains("test.cu(3)"), "{error}");
    let error = nvrtc.compile(&KernelSource { text: "a\0b", ..SOURCE }).unwrap_err();
    assert!(matches!(error, CompileError::Nul { .. }));
}

#[test]
fn a_log_without_resources_is_not_taken_for_one_without_spills() {
    let Some(nvrtc) = nvrtc() else { return };
    let text = "extern \"C\" __global__ void f() {}";
    let error =
        nvrtc.compile(&KernelSource { text, options: &["--std=c++20"], ..SOURCE }).unwrap_err();
    assert!(matches!(error, CompileError::Image { .. }), "{error}");
}

#[test]
fn a_file_that_is_no_nvrtc_is_named() {
    let error = Nvrtc::open(Path::new("/nonexistent/libnvrtc.so.13")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/libnvrtc.so.13"), "{error}");
    assert!(error.to_string().contains("pip install 'nvidia-cuda-nvrtc==13.0.*'"), "{error}");
}
