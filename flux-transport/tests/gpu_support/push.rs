//! Calls that push, and what every rank must find after them.

use super::{Buffer, RankUnderTest, pattern, read_words, stream_of};
use flux_core::Rank;
use flux_core::layout::{WorkspaceSize, signal_offset};
use flux_core::program::Transfer;
use flux_core::signal::Epoch;
use flux_cuda::SideStream;
use flux_transport::{Job, Options, RowTransfers, WorkspaceView};

pub(crate) const ROWS: u32 = 64;
/// Calls of [`calls_arrive`].
pub(crate) const CALLS: u32 = 6;
pub(crate) const CHUNK: u32 = 32;
pub(crate) const CHUNKS: u32 = ROWS / CHUNK;
/// Words of a row that are sent, and between rows where they are strided.
pub(crate) const ROW: usize = 64;
pub(crate) const STRIDE: usize = 80;
pub(crate) const PLACE: u64 = ROWS as u64 * ROW as u64 * 4;

pub(crate) fn options(world: u32, first_epoch: u32) -> Options {
    let reserve = WorkspaceSize {
        half_bytes: u64::from(world - 1) * PLACE,
        signals: (world - 1) * CHUNKS,
        counters: 0,
    };
    Options { reserve, first_epoch: Epoch::new(first_epoch), ..Options::default() }
}

/// The transfers of an AllGather, by steps, as a tile program lists them.
pub(crate) fn transfers(rank: u32, world: u32) -> Vec<Transfer> {
    let mut list = Vec::new();
    for step in 1..world {
        let dest = (rank + world - step) % world;
        let place = Rank::new(rank).place_at(Rank::new(dest)).unwrap();
        for chunk in 0..CHUNKS {
            list.push(Transfer {
                dest,
                place,
                row: chunk * CHUNK,
                rows: CHUNK,
                col: 0,
                cols: ROW as u32,
                raise: place * CHUNKS + chunk,
                step,
            });
        }
    }
    list
}

pub(crate) fn shard(rank: u32, epoch: u32, stride: usize) -> Vec<u32> {
    pattern(rank + 1, ROWS as usize * stride).into_iter().map(|word| word ^ epoch).collect()
}

pub(crate) fn push<'a>(x: &Buffer, stride: usize, transfers: &'a [Transfer]) -> Job<'a> {
    Job::Rows(RowTransfers {
        x: x.address,
        row_stride: 4 * stride as u64,
        row_bytes: 4 * ROW as u64,
        element_bytes: 4,
        rows: 1,
        place_bytes: PLACE,
        full_places: u32::MAX,
        transfers,
        forwards: &[],
    })
}

/// What every peer sent in call `epoch` is in this rank's half, and its signals say so.
pub(crate) fn assert_arrived(
    this: &RankUnderTest,
    view: &WorkspaceView,
    epoch: u32,
    stride: usize,
) {
    let (rank, own) = (this.rank(), this.rank() as usize);
    let half = view.data[own] + u64::from(epoch & 1) * view.size.half_stride();
    for peer in (0..this.world()).filter(|&peer| peer != rank) {
        let place = Rank::new(peer).place_at(Rank::new(rank)).unwrap();
        let sent = shard(peer, epoch, stride);
        let expected: Vec<u32> = sent.chunks(stride).flat_map(|row| row[..ROW].to_vec()).collect();
        let seen = read_words(&this.device, half + u64::from(place) * PLACE, expected.len());
        assert_eq!(seen, expected, "call {epoch}: rank {rank} reads what rank {peer} sent");
        for chunk in 0..CHUNKS {
            let signal =
                view.pads[own] + signal_offset(place * CHUNKS + chunk, (epoch & 1) as usize);
            assert_eq!(
                read_words(&this.device, signal, 1),
                [epoch],
                "call {epoch}: rank {rank} reads the signal of rank {peer}"
            );
        }
    }
}

pub(crate) fn calls_arrive(this: &RankUnderTest, first: u32) {
    let (rank, world) = (this.rank(), this.world());
    let list = transfers(rank, world);
    let second = SideStream::new(&this.device).unwrap();
    for i in 0..CALLS {
        let epoch = first.wrapping_add(i);
        let stride = if i % 3 == 1 { STRIDE } else { ROW };
        let x = Buffer::from_words(&this.device, &shard(rank, epoch, stride));
        let stream = if i % 2 == 0 { this.stream() } else { stream_of(&second) };
        let mut call = this.comm.begin(stream).unwrap();
        assert!(!call.capturing());
        // SAFETY: `x` lives past the synchronisation below.
        let started = unsafe { call.start(&push(&x, stride, &list)) }.unwrap();
        assert!(started.pushes);
        call.finish().unwrap();
        this.device.synchronize().unwrap();
        assert_eq!(this.control(), [epoch, 0, 0, epoch]);
        this.comm.barrier().unwrap();
        assert_arrived(this, &started.view, epoch, stride);
        this.close_call(epoch);
        // A call that is given up before it hands anything out does not count.
        drop(this.comm.begin(this.stream()).unwrap());
        this.comm.barrier().unwrap();
    }
    this.comm.status().unwrap();
}
