//! Captured calls give a graph their order only. A binary of its own: other tests would synchronise
//! the context during the capture.
#![allow(clippy::unwrap_used, reason = "a test")]

mod gpu_support;

use cudarc::driver::sys;
use flux_core::layout::WorkspaceSize;
use flux_cuda::{Event, SideStream};
use flux_transport::{Job, Options, RowTransfers};
use gpu_support::push::{PLACE, ROW, options, push, shard, transfers};
use gpu_support::{Buffer, RankUnderTest, devices, read_words, stream_of, with_ranks, write_words};

/// Words that the three stand-ins for an executor write, in order, over the one before.
const WRITTEN: [u32; 3] = [11, 12, 13];

/// A call whose executor writes `word` to `address`.
fn call(this: &RankUnderTest, stream: &SideStream, captured: bool, address: u64, word: u32) {
    let mut call = this.comm.begin(stream_of(stream)).unwrap();
    assert_eq!(call.capturing(), captured);
    let list = transfers(this.rank(), this.world());
    let row = 4 * ROW as u64;
    let job = Job::Rows(RowTransfers {
        x: address,
        row_stride: row,
        row_bytes: row,
        element_bytes: 4,
        rows: 1,
        place_bytes: PLACE,
        full_places: u32::MAX,
        transfers: &list,
        forwards: &[],
    });
    // SAFETY: the rows are of the workspace, and none is looked at.
    let started = unsafe { call.start(&job) }.unwrap();
    assert!(!started.pushes, "the half that a copy engine would write to is not known");
    // SAFETY: an address of the workspace.
    unsafe { sys::cuMemsetD32Async(address, word, 1, stream.raw() as sys::CUstream) }
        .result()
        .unwrap();
    call.finish().unwrap();
}

/// The edges of a graph of three nodes.
fn edges(graph: sys::CUgraph) -> Vec<(sys::CUgraphNode, sys::CUgraphNode)> {
    let (mut from, mut to) = ([std::ptr::null_mut(); 16], [std::ptr::null_mut(); 16]);
    // SAFETY: numbers only.
    let mut data: [sys::CUgraphEdgeData; 16] = unsafe { std::mem::zeroed() };
    let (mut count, mut nodes) = (16, 0);
    // SAFETY: places for the results; three nodes have fewer than 16 edges.
    unsafe {
        sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut nodes).result().unwrap();
        assert_eq!(nodes, 3, "the executors' writes and nothing else");
        sys::cuGraphGetEdges_v2(
            graph,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            data.as_mut_ptr(),
            &raw mut count,
        )
        .result()
        .unwrap();
    }
    from.into_iter().zip(to).take(count).collect()
}

#[test]
fn captured_calls_on_two_streams_are_one_after_the_other_and_nothing_else() {
    let Some(_) = devices("gpu_graph", 1) else { return };
    let shared = Options { shared_device: true, device: Some(0), ..options(2, 1) };
    with_ranks(2, shared, |this| {
        let [second, outside] = [(); 2].map(|()| SideStream::new(&this.device).unwrap());
        let [forked, joined] = [(); 2].map(|()| Event::new(&this.device).unwrap());
        let x = Buffer::from_words(&this.device, &shard(this.rank(), 1, ROW));
        let view = this.view();
        let at = view.data[this.rank() as usize];
        let stream = this.stream.raw() as sys::CUstream;
        this.device.bind().unwrap();

        // Before any capture.
        let mut eager = this.comm.begin(this.stream()).unwrap();
        assert!(!eager.capturing());
        // SAFETY: there is nothing to move.
        assert!(!unsafe { eager.start(&push(&x, ROW, &[])) }.unwrap().pushes);
        eager.finish().unwrap();

        // The ranks have one context here, which nobody may synchronise while one of them captures.
        this.comm.barrier().unwrap();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of this test.
        unsafe { sys::cuStreamBeginCapture_v2(stream, mode) }.result().unwrap();
        // Nothing but the communicator orders the second stream's call after the first's.
        forked.record(this.stream.raw()).unwrap();
        forked.make_wait(second.raw()).unwrap();
        call(&this, &this.stream, true, at, WRITTEN[0]);
        call(&this, &outside, false, at + 4, 1);
        call(&this, &second, true, at, WRITTEN[1]);
        // One that is given up leaves no trace.
        drop(this.comm.begin(stream_of(&second)).unwrap());
        call(&this, &this.stream, true, at, WRITTEN[2]);
        joined.record(second.raw()).unwrap();
        joined.make_wait(this.stream.raw()).unwrap();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: places for the results; the capture was begun above.
        unsafe {
            sys::cuStreamEndCapture(stream, &raw mut graph).result().unwrap();
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).result().unwrap();
        }
        this.comm.barrier().unwrap();

        let edges = edges(graph);
        let first = edges
            .iter()
            .filter(|(from, _)| edges.iter().all(|(_, to)| to != from))
            .map(|(from, _)| *from);
        let last = edges
            .iter()
            .filter(|(_, to)| edges.iter().all(|(from, _)| from != to))
            .map(|(_, to)| *to);
        let (first, last): (Vec<_>, Vec<_>) = (first.collect(), last.collect());
        let middle: Vec<_> = edges
            .iter()
            .map(|(_, to)| *to)
            .filter(|node| edges.iter().any(|(from, _)| from == node))
            .collect();
        assert!(edges.len() >= 2 && !middle.is_empty(), "a chain: {edges:?}");
        assert!(
            first.iter().all(|node| *node == first[0]) && last.iter().all(|node| *node == last[0]),
            "a chain: {edges:?}"
        );

        // Eager calls go on, on any stream, without copy engines.
        call(&this, &second, false, at + 4, 2);
        call(&this, &this.stream, false, at + 4, 3);
        assert_eq!(read_words(&this.device, at + 4, 1), [3]);

        // The graph holds addresses of this workspace: it must outlive a growth.
        this.comm.barrier().unwrap();
        this.comm.reserve(WorkspaceSize { half_bytes: 64 * PLACE, ..view.size }).unwrap();
        write_words(&this.device, at, &[0]);
        this.device.bind().unwrap();
        // SAFETY: instantiated above; its addresses are kept.
        unsafe { sys::cuGraphLaunch(executable, stream) }.result().unwrap();
        assert_eq!(read_words(&this.device, at, 1), [WRITTEN[2]]);
        assert_eq!(this.control(), [1, 0, 0, 0]);
        // SAFETY: not used after this.
        unsafe {
            sys::cuGraphExecDestroy(executable).result().unwrap();
            sys::cuGraphDestroy(graph).result().unwrap();
        }
        this.comm.status().unwrap();
        this.comm.barrier().unwrap();
    });
}
