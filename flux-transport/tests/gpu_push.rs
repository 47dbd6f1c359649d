//! Pushes: rows and signals arrive, in the right half, in the order of calls, and a captured push is carried by a mover.

mod gpu_support;

use cudarc::driver::sys;
use flux_core::Rank;
use flux_core::layout::{WorkspaceSize, control, signal_offset};
use flux_core::program::Transfer;
use flux_core::signal::Epoch;
use flux_transport::cuda::SideStream;
use flux_transport::nvlink::{CaptureMover, MoverJob};
use flux_transport::{Options, Push, TransportError, WorkspaceView};
use gpu_support::{Buffer, RankUnderTest, devices, linked_devices, pattern, read_words, stream_of, with_ranks};
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};

const ROWS: u32 = 64;
const CHUNK: u32 = 32;
const CHUNKS: u32 = ROWS / CHUNK;
/// Words of a row that are sent, and between rows where they are strided.
const ROW: usize = 64;
const STRIDE: usize = 80;
const PLACE: u64 = ROWS as u64 * ROW as u64 * 4;

fn options(world: u32, first_epoch: u32) -> Options {
    let reserve = WorkspaceSize { half_bytes: u64::from(world - 1) * PLACE, signals: (world - 1) * CHUNKS, counters: 0 };
    Options { reserve, first_epoch: Epoch::new(first_epoch), ..Options::default() }
}

/// The transfers of an AllGather, by steps, as a tile program lists them.
fn transfers(rank: u32, world: u32) -> Vec<Transfer> {
    let mut list = Vec::new();
    for step in 1..world {
        let dest = (rank + world - step) % world;
        let place = Rank::new(rank).place_at(Rank::new(dest)).unwrap();
        for chunk in 0..CHUNKS {
            list.push(Transfer { dest, place, row: chunk * CHUNK, rows: CHUNK, raise: place * CHUNKS + chunk, step });
        }
    }
    list
}

fn shard(rank: u32, epoch: u32, stride: usize) -> Vec<u32> {
    pattern(rank + 1, ROWS as usize * stride).into_iter().map(|word| word ^ epoch).collect()
}

fn push<'a>(x: &Buffer, stride: usize, transfers: &'a [Transfer]) -> Push<'a> {
    Push { x: x.address, row_stride: 4 * stride as u64, row_bytes: 4 * ROW as u64, place_bytes: PLACE, transfers }
}

/// What every peer sent in call `epoch` is in this rank's half, and its signals say so.
fn assert_arrived(this: &RankUnderTest, view: &WorkspaceView, epoch: u32, stride: usize) {
    let (rank, own) = (this.rank(), this.rank() as usize);
    let half = view.data[own] + u64::from(epoch & 1) * view.size.half_stride();
    for peer in (0..this.world()).filter(|&peer| peer != rank) {
        let place = Rank::new(peer).place_at(Rank::new(rank)).unwrap();
        let sent = shard(peer, epoch, stride);
        let expected: Vec<u32> = sent.chunks(stride).flat_map(|row| row[..ROW].to_vec()).collect();
        let seen = read_words(&this.device, half + u64::from(place) * PLACE, expected.len());
        assert_eq!(seen, expected, "call {epoch}: rank {rank} reads what rank {peer} sent");
        for chunk in 0..CHUNKS {
            let signal = view.pads[own] + signal_offset(place * CHUNKS + chunk);
            assert_eq!(read_words(&this.device, signal, 1), [epoch], "call {epoch}: rank {rank} reads the signal of rank {peer}");
        }
    }
}

fn calls_arrive(this: &RankUnderTest, first: u32) {
    let (rank, world) = (this.rank(), this.world());
    let list = transfers(rank, world);
    let second = SideStream::new(&this.device).unwrap();
    for i in 0..6 {
        let epoch = first.wrapping_add(i);
        let stride = if i % 3 == 1 { STRIDE } else { ROW };
        let x = Buffer::from_words(&this.device, &shard(rank, epoch, stride));
        let stream = if i % 2 == 0 { this.stream() } else { stream_of(&second) };
        let mut call = this.comm.begin(stream).unwrap();
        assert!(!call.capturing());
        assert!(call.copy_engine_usable());
        let view = call.memory().clone();
        let Push { x: address, row_stride, row_bytes, place_bytes, .. } = push(&x, stride, &list);
        // SAFETY: `x` lives past the synchronisation below.
        unsafe { call.push(address, row_stride, row_bytes, place_bytes, &list) }.unwrap();
        assert!(call.pushes());
        assert_eq!(call.mover_sms(), 0);
        call.finish().unwrap();
        this.device.synchronize().unwrap();
        assert_eq!(this.control(), [epoch, 0, 0, epoch]);
        this.comm.barrier().unwrap();
        assert_arrived(this, &view, epoch, stride);
        this.close_call(epoch);
        // A call that is given up before it hands anything out does not count.
        drop(this.comm.begin(this.stream()).unwrap());
        this.comm.barrier().unwrap();
    }
    this.comm.status().unwrap();
}

#[test]
fn rows_and_signals_arrive_in_the_half_of_each_call() {
    let Some(world) = linked_devices("gpu_push", 2) else { return };
    for world in [2, world] {
        let first = u32::MAX - 2;
        with_ranks(world, options(world, first), |this| calls_arrive(&this, first));
    }
}

#[test]
fn ranks_on_one_device_push_to_each_other() {
    let Some(_) = devices("gpu_push", 1) else { return };
    for world in [2, 3] {
        let shared = Options { shared_device: true, device: Some(0), ..options(world, 1) };
        with_ranks(world, shared, |this| calls_arrive(&this, 1));
    }
}

#[test]
fn a_bad_transfer_is_refused_before_anything_moves() {
    let Some(_) = devices("gpu_push", 1) else { return };
    let shared = Options { shared_device: true, device: Some(0), ..options(2, 1) };
    with_ranks(2, shared, |this| {
        let mut list = transfers(this.rank(), 2);
        list.push(Transfer { raise: 1000, ..list[0] });
        let x = Buffer::from_words(&this.device, &shard(this.rank(), 1, ROW));
        let mut call = this.comm.begin(this.stream()).unwrap();
        // SAFETY: nothing is enqueued.
        let error = unsafe { call.push(x.address, 4 * ROW as u64, 4 * ROW as u64, PLACE, &list) }.unwrap_err();
        assert!(matches!(error, TransportError::BadTransfer { index: 2, .. }), "{error}");
        drop(call);
        this.comm.barrier().unwrap();
        assert_eq!(this.control(), [1, 0, 0, 0]);
        this.comm.status().unwrap();
    });
}

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
    let Some(_) = devices("gpu_push", 1) else { return };
    let shared = Options { shared_device: true, device: Some(0), ..options(2, 1) };
    with_ranks(2, shared, |this| {
        let (rank, list) = (this.rank(), transfers(this.rank(), 2));
        let x = Buffer::from_words(&this.device, &shard(rank, 1, ROW));
        let mover = CopyMover { half: 1, launches: AtomicU32::new(0) };
        let stream = this.stream.raw() as sys::CUstream;
        this.device.bind().unwrap();
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
        // Nothing has run yet.
        assert_eq!(this.control(), [1, 0, 0, 0]);
        this.comm.barrier().unwrap();
        for epoch in [1, 3] {
            gpu_support::write_words(&this.device, x.address, &shard(rank, epoch, ROW));
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
        gpu_support::write_words(&this.device, x.address, &shard(rank, 5, ROW));
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
        gpu_support::write_words(&this.device, view.control + control::EPOCH, &[7]);
        gpu_support::write_words(&this.device, x.address, &shard(rank, 7, ROW));
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
