//! Captured pushes are carried by a mover kernel. A binary of its own: other tests would synchronise the context during the capture.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use cudarc::driver::sys;
use flux_core::layout::{WorkspaceSize, control, signal_offset};
use flux_transport::nvlink::{CaptureMover, MoverJob};
use flux_transport::{Options, TransportError};
use gpu_support::push::{PLACE, ROW, assert_arrived, options, push, shard, transfers};
use gpu_support::{Buffer, devices, with_ranks, write_words};
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};

/// Carries transfers by copies on the stream that it is given: right for the one half that it was made for.
struct CopyMover {
    half: u64,
    launches: AtomicU32,
}

impl CaptureMover for CopyMover {
    fn launch(&self, job: &MoverJob<'_>, stream: usize) -> Result<(), Box<dyn Error + Send + Sync>> {
        let stream = stream as sys::CUstream;
        let copy = |to: u64, from: u64, bytes: usize| {
            // SAFETY: addresses of the workspace and of the shard, which the transport has checked.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) }.result()
        };
        let push = job.push;
        for t in push.transfers {
            let (dest, row) = (t.dest as usize, u64::from(t.row));
            let to = job.data[dest] + self.half * job.half_stride + u64::from(t.place) * push.place_bytes + row * push.row_bytes;
            copy(to, push.x + row * push.row_stride, (u64::from(t.rows) * push.row_bytes) as usize)?;
            copy(job.pads[dest] + signal_offset(t.raise), job.control + control::EPOCH, 4)?;
        }
        copy(job.control + control::PUSHED, job.control + control::EPOCH, 4)?;
        self.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn sms(&self) -> u32 {
        8
    }
}

#[test]
fn a_captured_push_is_carried_by_the_mover_at_each_replay() {
    let Some(_) = devices("gpu_capture", 1) else { return };
    let shared = Options { shared_device: true, device: Some(0), ..options(2, 1) };
    with_ranks(2, shared, |this| {
        let (rank, list) = (this.rank(), transfers(this.rank(), 2));
        let x = Buffer::from_words(&this.device, &shard(rank, 1, ROW));
        let mover = CopyMover { half: 1, launches: AtomicU32::new(0) };
        let stream = this.stream.raw() as sys::CUstream;
        this.device.bind().unwrap();
        // The ranks have one context here, which nobody may synchronise while one of them captures.
        this.comm.barrier().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this test.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().unwrap();
        let mut call = this.comm.begin(this.stream()).unwrap();
        assert!(call.capturing());
        assert!(!call.copy_engine_usable());
        let view = call.memory().clone();
        let push = push(&x, ROW, &list);
        // SAFETY: nothing is enqueued.
        let refused = unsafe { call.push(push.x, push.row_stride, push.row_bytes, push.place_bytes, &list) };
        assert!(matches!(refused, Err(TransportError::MoverUnusable { .. })));
        // SAFETY: `x` lives past the last replay.
        unsafe { call.push_with(&push, &mover) }.unwrap();
        assert_eq!(call.mover_sms(), 8);
        call.finish().unwrap();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: places for the results; the capture was begun above.
        unsafe {
            sys::cuStreamEndCapture(stream, &raw mut graph).result().unwrap();
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).result().unwrap();
        }
        this.comm.barrier().unwrap();
        // Nothing has run yet.
        assert_eq!(this.control(), [1, 0, 0, 0]);
        for epoch in [1, 3] {
            write_words(&this.device, x.address, &shard(rank, epoch, ROW));
            this.comm.barrier().unwrap();
            // SAFETY: instantiated above.
            unsafe { sys::cuGraphLaunch(executable, stream) }.result().unwrap();
            this.device.synchronize().unwrap();
            this.comm.barrier().unwrap();
            assert_arrived(&this, &view, epoch, ROW);
            assert_eq!(this.control(), [epoch, 0, 0, epoch]);
            // The call between the replays had an even number and was somebody else's.
            this.close_call(epoch + 1);
            this.comm.barrier().unwrap();
        }
        // Eager again: the host does not know the half any more, the mover does.
        write_words(&this.device, x.address, &shard(rank, 5, ROW));
        let mut call = this.comm.begin(this.stream()).unwrap();
        assert!(!call.capturing() && !call.copy_engine_usable());
        // SAFETY: `x` lives past the synchronisation below.
        unsafe { call.push_with(&push, &mover) }.unwrap();
        call.finish().unwrap();
        this.device.synchronize().unwrap();
        this.comm.barrier().unwrap();
        assert_arrived(&this, &view, 5, ROW);
        assert_eq!(mover.launches.load(Ordering::Relaxed), 2);
        this.close_call(5);
        this.comm.barrier().unwrap();
        // The graph holds addresses of this workspace: it must outlive a growth.
        this.comm.reserve(WorkspaceSize { half_bytes: 64 * PLACE, ..view.size }).unwrap();
        write_words(&this.device, view.control + control::EPOCH, &[7]);
        write_words(&this.device, x.address, &shard(rank, 7, ROW));
        this.comm.barrier().unwrap();
        // SAFETY: instantiated above; its addresses are kept.
        unsafe { sys::cuGraphLaunch(executable, stream) }.result().unwrap();
        this.device.synchronize().unwrap();
        this.comm.barrier().unwrap();
        assert_arrived(&this, &view, 7, ROW);
        this.comm.barrier().unwrap();
        // SAFETY: not used after this.
        unsafe {
            sys::cuGraphExecDestroy(executable).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
        }
    });
}
