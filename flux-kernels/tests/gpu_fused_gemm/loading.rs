//! How often a kernel is loaded.

use super::{OPS, TILE, problem, schedule};
use crate::common::{cubin, device, programs, target};
use cudarc::driver::sys;
use flux_core::program::Chunk;
use flux_core::{DType, Nodes};
use flux_kernels::Variant;
use flux_kernels::cuda::{LaunchError, loaded};
use std::sync::Arc;

/// A context of one's own, which goes with it.
struct Context(sys::CUcontext);

impl Context {
    fn new() -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out pointer is valid, no parameters are given, and the driver has a device 0,
        // whose context has been opened.
        unsafe { sys::cuCtxCreate_v4(&raw mut context, std::ptr::null_mut(), 0, 0) }
            .result()
            .expect("a context");
        Self(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once; nothing of it is used afterwards.
        let _ = unsafe { sys::cuCtxDestroy_v2(self.0) };
    }
}

#[test]
fn a_kernel_is_loaded_once_while_its_context_lives() {
    let Some(primary) = device("a_kernel_is_loaded_once_while_its_context_lives") else { return };
    let variants = [OPS[0], OPS[1]].map(|op| {
        let problem = problem(op, 128, 128, 64, DType::Bf16, 1);
        Variant::of(
            &programs(problem, &schedule(TILE, Chunk::Shard), Nodes::apart(problem.world()))[0],
            target(&primary),
        )
        .expect("a variant")
    });
    let mut loads = 0;
    let mut load = |variant: Variant| {
        loaded::<LaunchError>(variant, || {
            loads += 1;
            Ok(cubin(&primary, &variant.source()))
        })
        .expect("it loads")
    };
    // The second context may have the handle of the first, which is gone.
    for _ in 0..2 {
        let context = Context::new();
        let [first, other] = variants.map(&mut load);
        assert!(
            !Arc::ptr_eq(&first, &other)
                && first.variant() == variants[0]
                && other.variant() == variants[1]
        );
        let held = Arc::downgrade(&first);
        drop(first);
        assert!(
            held.upgrade().is_some_and(|first| Arc::ptr_eq(&first, &load(variants[0]))),
            "nobody needs to hold it"
        );
        drop(context);
    }
    primary.bind_to_thread().expect("the context that others use");
    assert_eq!(loads, 4);
}
