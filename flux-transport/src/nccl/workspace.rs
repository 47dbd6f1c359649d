//! One generation of a rank's memory, none of which any other rank reaches.
//!
//! Invariant: what an executor stores for peer `p` lies in a place of its own of `stored`, and the signals that it raises at `p` are flags of `p`'s own
//! pad here; so a chunk whose flag is this call's epoch can be sent as it lies. Words come from peers into `words`, never straight into the pad.

use crate::WorkspaceView;
use crate::cuda::{CudaDevice, CudaError, DeviceBlock, SideStream, fill_words, host_size, read};
use flux_core::layout::{WorkspaceSize, control, pad_bytes, signal_offset};
use flux_core::signal::Epoch;
use flux_core::{Rank, WorldSize};

/// How far ahead of every epoch that is awaited flags are set to let go of what waits for them. Also how many calls old a flag may be: one more, and
/// the sign of a difference would say that it is ahead.
pub(super) const RELEASE: u32 = 1 << 30;

/// Memory of this rank's device.
#[derive(Debug)]
pub(super) struct Workspace {
    size: WorkspaceSize,
    rank: Rank,
    world: WorldSize,
    data: DeviceBlock,
    pad: DeviceBlock,
    control: DeviceBlock,
    /// What is on its way to the peers: as large as a half.
    stored: DeviceBlock,
    /// A pad for each rank: the flags of what is stored.
    flags: DeviceBlock,
    /// The words that came with chunks, by the signal that they are for, and one that this rank sends.
    words: DeviceBlock,
    device: CudaDevice,
}

impl Workspace {
    /// Makes and initialises it for calls from `epoch` on.
    pub(super) fn new(
        device: &CudaDevice,
        stream: &SideStream,
        (rank, world): (Rank, WorldSize),
        size: WorkspaceSize,
        epoch: Epoch,
    ) -> Result<Self, CudaError> {
        // The driver makes no block of nothing.
        let block = |bytes: u64| DeviceBlock::new(device, host_size(bytes.max(256)));
        let this = Self {
            size,
            rank,
            world,
            data: block(size.data_bytes())?,
            pad: block(pad_bytes(size.signals))?,
            control: block(control::bytes(size.counters))?,
            stored: block(size.half_bytes)?,
            flags: block(u64::from(world.get()) * pad_bytes(size.signals))?,
            words: block(4 * (u64::from(size.signals) + 1))?,
            device: device.clone(),
        };
        let before = epoch.before(1).get();
        for (block, value) in [(&this.pad, before), (&this.control, 0), (&this.flags, before), (&this.words, before)] {
            this.fill(block.address(), value, block.bytes() / 4, stream)?;
        }
        this.fill(this.control() + control::EPOCH, epoch.get(), 1, stream)?;
        this.fill(this.control() + control::PUSHED, before, 1, stream)?;
        stream.synchronize()?;
        Ok(this)
    }

    fn fill(&self, at: u64, value: u32, words: usize, stream: &SideStream) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        // SAFETY: the callers' ranges lie in blocks of this generation, which lives past the synchronisation of the stream.
        unsafe { fill_words(&self.device, at, value, words, stream.raw()) }
    }

    /// Brings all flags to the epoch before `epoch`, on the caller's stream: before the call's kernel raises any.
    pub(super) fn refresh(&self, stream: usize, epoch: Epoch) -> Result<(), CudaError> {
        let (address, words) = self.flags();
        let _current = self.device.enter()?;
        // SAFETY: the flags are this generation's, which lives until the device is drained.
        unsafe { fill_words(&self.device, address, epoch.before(1).get(), words, stream) }
    }

    pub(super) fn size(&self) -> &WorkspaceSize {
        &self.size
    }

    /// Device bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        let Self { data, pad, control, stored, flags, words, .. } = self;
        [data, pad, control, stored, flags, words].map(|block| block.bytes() as u64).iter().sum()
    }

    pub(super) fn data(&self) -> u64 {
        self.data.address()
    }

    pub(super) fn pad(&self) -> u64 {
        self.pad.address()
    }

    fn control(&self) -> u64 {
        self.control.address()
    }

    /// What is stored for `peer`.
    pub(super) fn stored(&self, peer: Rank, place_bytes: u64) -> u64 {
        self.stored.address() + u64::from(peer.place_at(self.rank).unwrap_or(0)) * place_bytes
    }

    /// The flag of what is stored for `peer` and announced by `signal` there.
    pub(super) fn flag(&self, peer: Rank, signal: u32) -> u64 {
        self.pad_of(peer) + signal_offset(signal)
    }

    /// All flags: their address, and how many words they take.
    pub(super) fn flags(&self) -> (u64, usize) {
        (self.flags.address(), self.flags.bytes() / 4)
    }

    /// Where the word lands that comes with the chunk of `signal`.
    pub(super) fn word(&self, signal: u32) -> u64 {
        self.words.address() + 4 * u64::from(signal)
    }

    /// The word that goes with what is there from the start.
    pub(super) fn own_word(&self) -> u64 {
        self.word(self.size.signals)
    }

    fn pad_of(&self, peer: Rank) -> u64 {
        if peer == self.rank { self.pad() } else { self.flags.address() + u64::from(peer.get()) * pad_bytes(self.size.signals) }
    }

    /// The workspace as an executor uses it that stores at place `place_bytes` of `half`; `place_bytes` is 0 where it stores nothing.
    pub(super) fn view(&self, place_bytes: u64, half: u64, fault: u64, deadline_ns: u64) -> WorkspaceView {
        let data = |peer: Rank| match self.rank.place_at(peer) {
            None => self.data(),
            // The executor adds its half and this rank's place there.
            Some(place) => {
                let before = half * self.size.half_stride() + u64::from(place) * place_bytes;
                self.stored(peer, place_bytes).wrapping_sub(before)
            }
        };
        WorkspaceView {
            data: self.world.ranks().map(data).collect(),
            pads: self.world.ranks().map(|peer| self.pad_of(peer)).collect(),
            control: self.control(),
            fault,
            size: self.size,
            deadline_ns,
        }
    }

    /// The epoch of the next call, read from the device, which must be idle.
    pub(super) fn read_epoch(&self) -> Result<Epoch, CudaError> {
        let mut word = [0; 4];
        // SAFETY: the epoch is a word of the control block.
        unsafe { read(&self.device, &mut word, self.control() + control::EPOCH) }?;
        Ok(Epoch::new(u32::from_le_bytes(word)))
    }
}
