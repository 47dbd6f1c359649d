//! What every rank of a fresh or grown workspace must see.

use super::{Buffer, RankUnderTest, copy, pattern, read_words};
use flux_core::layout::{WorkspaceSize, broken_offset, signal_offset};
use flux_core::signal::Epoch;
use flux_transport::Options;

pub(crate) const WORDS: usize = 1 << 10;
pub(crate) const SIZE: WorkspaceSize =
    WorkspaceSize { half_bytes: 16 * 4 * WORDS as u64, signals: 40, counters: 8 };

pub(crate) fn options(first_epoch: u32) -> Options {
    Options { reserve: SIZE, first_epoch: Epoch::new(first_epoch), ..Options::default() }
}

/// Every rank writes a block into both buffers of every data region, and reads the others' blocks.
pub(crate) fn exchange_blocks(this: &RankUnderTest) {
    let (rank, world, view) = (this.rank(), this.world(), this.view());
    let block = |from: u32| u64::from(from) * 4 * WORDS as u64;
    for half in [0, view.size.half_stride()] {
        for to in 0..world {
            let words = Buffer::from_words(&this.device, &pattern(rank * 16 + to + 1, WORDS));
            copy(
                &this.device,
                view.data[to as usize] + half + block(rank),
                words.address,
                4 * WORDS,
            );
        }
    }
    this.comm.barrier().unwrap();
    for half in [0, view.size.half_stride()] {
        for from in 0..world {
            let seen =
                read_words(&this.device, view.data[rank as usize] + half + block(from), WORDS);
            assert_eq!(
                seen,
                pattern(from * 16 + rank + 1, WORDS),
                "rank {rank} reads what rank {from} wrote"
            );
        }
    }
    this.comm.barrier().unwrap();
}

/// All words of the pad and the control block are as before call `epoch`.
pub(crate) fn assert_fresh(this: &RankUnderTest, epoch: u32) {
    let view = this.view();
    let before = epoch.wrapping_sub(1);
    let pad = view.pads[this.rank() as usize];
    for rank in 0..16 {
        assert_eq!(read_words(&this.device, pad + broken_offset(rank), 1), [0]);
    }
    for offset in
        (0..view.size.signals).flat_map(|signal| [0, 1].map(|half| signal_offset(signal, half)))
    {
        assert_eq!(read_words(&this.device, pad + offset, 1), [before]);
    }
    assert_eq!(this.control(), [epoch, 0, 0, before]);
}
