//! Proves peer access: every rank writes a word into every peer's pad, and the owner reads it.
//!
//! Invariant: only the owner's reading counts; a writer may read back a buffered word.

use super::offer::DeviceIdentity;
use super::workspace::Workspace;
use crate::backends::device::lane::Lane;
use crate::topology::probe::vetoed;
use flux_core::layout::broken_offset;
use flux_core::rank::MAX_WORLD;
use flux_cuda::{CudaDevice, CudaError, DeviceBlock, copy_async, read, write_value_async};

const INITIAL: u32 = 0;

/// A word that did not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Missing {
    pub(super) peer: u32,
    pub(super) expected: u32,
    pub(super) seen: u32,
}

/// The word that `from` writes to `to`: unique for each pair and each life of the sender's process.
pub(super) fn nonce(sender: &DeviceIdentity, from: u32, to: u32) -> u32 {
    let [a, b, c, d, ..] = sender.process;
    let pair = (from << 16 | to).wrapping_mul(0x9e37_79b1);
    let word = u32::from_le_bytes([a, b, c, d]) ^ pair;
    // The word that is there before must not pass for it.
    if word == INITIAL { 1 } else { word }
}

/// Writes this rank's words and waits until the copies are done.
pub(super) fn send(
    device: &CudaDevice,
    lane: &Lane,
    at: &Workspace,
    rank: u32,
    identities: &[DeviceIdentity],
) -> Result<(), CudaError> {
    let staging = DeviceBlock::new(device, 4 * MAX_WORLD)?;
    let _current = device.enter()?;
    // Memory of other nodes has no address.
    for (to, pad) in
        at.pads().iter().enumerate().filter(|&(to, &pad)| to != rank as usize && pad != 0)
    {
        let from = staging.address() + 4 * to as u64;
        // By the lane, so that other work of the device is not waited for. SAFETY: a word of the
        // staging block, which outlives the synchronisation below, and this rank's word in the
        // peer's pad.
        unsafe {
            write_value_async(
                device,
                from,
                nonce(&identities[rank as usize], rank, index(to)),
                lane.raw(),
            )?;
            copy_async(device, pad + broken_offset(rank), from, 4, lane.raw())?;
        }
    }
    lane.synchronize()
}

/// Reads this rank's pad and returns the words that are not what their writers sent.
pub(super) fn check(
    device: &CudaDevice,
    at: &Workspace,
    rank: u32,
    identities: &[DeviceIdentity],
) -> Result<Vec<Missing>, CudaError> {
    let vetoed = vetoed();
    let mut missing = Vec::new();
    for (peer, identity) in identities
        .iter()
        .enumerate()
        .filter(|&(peer, _)| peer != rank as usize && at.pads()[peer] != 0)
    {
        let peer = index(peer);
        let mut word = [0; 4];
        // SAFETY: the peer's word in this rank's own pad.
        unsafe { read(device, &mut word, at.pads()[rank as usize] + broken_offset(peer)) }?;
        // A veto stands for peers whose writes vanish: the word is as it was.
        let seen = if vetoed { INITIAL } else { u32::from_le_bytes(word) };
        let expected = nonce(identity, peer, rank);
        if expected != seen {
            missing.push(Missing { peer, expected, seen });
        }
    }
    Ok(missing)
}

fn index(rank: usize) -> u32 {
    u32::try_from(rank).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flux_cuda::DeviceUuid;
    use std::collections::BTreeSet;

    #[test]
    fn no_two_pairs_share_a_word_and_none_is_what_was_there() {
        for process in [[0; 16], [0xff; 16], [7; 16]] {
            let sender = DeviceIdentity {
                process,
                uuid: DeviceUuid([0; 16]),
                ordinal: 0,
                posix_handles: true,
                shared_device: false,
                instance: false,
            };
            let words: BTreeSet<u32> =
                (0..16).flat_map(|from| (0..16).map(move |to| nonce(&sender, from, to))).collect();
            assert_eq!(words.len(), 256);
            assert!(!words.contains(&INITIAL));
        }
    }
}
