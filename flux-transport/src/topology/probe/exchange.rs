//! Data between two devices, written by one and looked for by its owner.
//!
//! - Store: the writer copies a pattern and then a flag; the owner awaits the flag and reads the
//!   pattern.
//! - Ping-pong: each writes the round's number to the other and awaits it in its own memory.
//!
//! Invariant: only the owner's reading proves a direction; every wait ends. Stream memory
//! operations and copy engines cross the same links, bridges and translations as a kernel's stores,
//! and need no kernel. A driver call that does not return is why a probe is a process of its own.

use flux_cuda::{
    Allocation, CudaDevice, CudaError, DeviceBlock, DeviceInfo, Handles, Mapping, SideStream,
    WordOp, copy_async, fill_words, read, round_up, words_async,
};
use std::time::{Duration, Instant};

const WORDS: usize = 1 << 14;
const BYTES: usize = 4 * WORDS;
/// Behind the pattern: the flag, and on a line of its own the word of the ping-pong.
const FLAG: u64 = BYTES as u64;
const BALL: u64 = FLAG + 128;
const ROOM: u64 = BALL + 128;
/// Round trips, and how many are handed to a stream at once, so that its queue never fills up.
pub(super) const ROUNDS: u32 = 1000;
const AT_ONCE: u32 = 50;
/// How long one exchange may take; it takes microseconds, unless the devices are busy.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

pub(super) struct Side {
    pub(super) device: CudaDevice,
    lane: SideStream,
    /// Lets go of what the lane waits for.
    rescue: SideStream,
    outbox: DeviceBlock,
    pub(super) memory: Allocation,
}

impl Side {
    pub(super) fn new(info: &DeviceInfo) -> Result<Self, CudaError> {
        let device = CudaDevice::open(info.ordinal)?;
        let (lane, rescue) = (SideStream::new(&device)?, SideStream::new(&device)?);
        let outbox = DeviceBlock::new(&device, BYTES)?;
        let unsupported = CudaError::Unsupported {
            ordinal: info.ordinal,
            device: info.name.clone(),
            what: "virtual memory management",
        };
        let granularity = Allocation::granularity(&device, Handles::None)?;
        let memory = Allocation::new(
            &device,
            round_up(ROOM, granularity).ok_or(unsupported)?,
            Handles::None,
        )?;
        Ok(Self { device, lane, rescue, outbox, memory })
    }

    /// Sets the own memory, mapped at `at`, to 0.
    fn clear(&self, at: &Mapping) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        // SAFETY: the memory is this long and mapped for its owner; nobody else uses it now.
        unsafe { fill_words(&self.device, at.address(), 0, (ROOM / 4) as usize, self.lane.raw()) }?;
        self.lane.synchronize()
    }

    fn words(&self, ops: impl IntoIterator<Item = WordOp>, rescue: bool) -> Result<(), CudaError> {
        let _current = self.device.enter()?;
        let stream = if rescue { &self.rescue } else { &self.lane };
        // SAFETY: the words are mapped for this device until the streams are idle.
        unsafe { words_async(&self.device, ops, stream.raw()) }
    }

    fn word(&self, address: u64) -> Result<u32, CudaError> {
        let mut word = [0; 4];
        // SAFETY: the callers name words of this device's memory.
        unsafe { read(&self.device, &mut word, address) }?;
        Ok(u32::from_le_bytes(word))
    }
}

/// Whether both lanes are through in time.
fn idle(sides: [&Side; 2]) -> Result<bool, CudaError> {
    let end = Instant::now() + PATIENCE;
    loop {
        if sides[0].lane.is_idle()? && sides[1].lane.is_idle()? {
            return Ok(true);
        }
        if Instant::now() >= end {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}

/// Writes a pattern and a flag into `to`'s memory at `at`; returns the fault if its owner does not
/// find them.
pub(super) fn store(
    from: &Side,
    to: &Side,
    at: &Mapping,
    nonce: u32,
    veto: bool,
) -> Result<Option<String>, CudaError> {
    to.clear(at)?;
    {
        let _current = from.device.enter()?;
        // SAFETY: both ranges are this long and mapped for the writer until both lanes are idle.
        unsafe {
            fill_words(&from.device, from.outbox.address(), nonce, WORDS, from.lane.raw())?;
            copy_async(&from.device, at.address(), from.outbox.address(), BYTES, from.lane.raw())?;
        }
    }
    let flag = at.address() + FLAG;
    from.words([WordOp::Write { address: flag, value: 1 }], false)?;
    to.words([WordOp::Await { address: flag, value: 1 }], false)?;
    let came = idle([from, to])?;
    if !came {
        to.words([WordOp::Write { address: flag, value: 1 }], true)?;
        idle([from, to])?;
    }
    let mut bytes = vec![0; BYTES];
    // SAFETY: the pattern's place in the owner's memory, read by its own device.
    unsafe { read(&to.device, &mut bytes, at.address()) }?;
    if veto {
        bytes.fill(0);
    }
    Ok(judge(came, &bytes, nonce))
}

/// What is wrong with what the owner has.
fn judge(came: bool, bytes: &[u8], nonce: u32) -> Option<String> {
    let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
    let wrong: Vec<(usize, u32)> = words.enumerate().filter(|&(_, word)| word != nonce).collect();
    match (wrong.first(), came) {
        (Some(&(at, seen)), _) => Some(format!(
            "its owner reads {seen:#010x} where {nonce:#010x} was written, in {} of {} words, the \
             first at {at}",
            wrong.len(),
            bytes.len() / 4
        )),
        (None, false) => {
            Some(format!("data came, and the flag behind it was not seen in {PATIENCE:?}"))
        }
        (None, true) => None,
    }
}

/// A write that did not come: the first side's or the second's, in this round.
pub(super) struct Lost {
    pub(super) first: bool,
    pub(super) round: u32,
}

/// Both sides write and await at once, round by round.
pub(super) fn ping_pong(
    a: &Side,
    at_a: &Mapping,
    b: &Side,
    at_b: &Mapping,
) -> Result<Result<Duration, Lost>, CudaError> {
    a.clear(at_a)?;
    b.clear(at_b)?;
    let (ball_a, ball_b) = (at_a.address() + BALL, at_b.address() + BALL);
    let began = Instant::now();
    for done in (0..ROUNDS).step_by(AT_ONCE as usize) {
        let rounds = done + 1..=done + AT_ONCE;
        let serve = |value| {
            [WordOp::Write { address: ball_b, value }, WordOp::Await { address: ball_a, value }]
        };
        let answer = |value| {
            [WordOp::Await { address: ball_b, value }, WordOp::Write { address: ball_a, value }]
        };
        a.words(rounds.clone().flat_map(serve), false)?;
        b.words(rounds.flat_map(answer), false)?;
        if !idle([a, b])? {
            let lost = lost(a.word(ball_a)?, b.word(ball_b)?);
            // Each lets go of its own, by its own memory.
            a.words([WordOp::Write { address: ball_a, value: ROUNDS }], true)?;
            b.words([WordOp::Write { address: ball_b, value: ROUNDS }], true)?;
            idle([a, b])?;
            return Ok(Err(lost));
        }
    }
    Ok(Ok(began.elapsed()))
}

/// Whose write is missing, after the first side saw `at_a` and the second `at_b`.
fn lost(at_a: u32, at_b: u32) -> Lost {
    if at_b > at_a {
        Lost { first: false, round: at_b }
    } else {
        Lost { first: true, round: at_a + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_says_what_is_there_instead() {
        let whole = 7_u32.to_le_bytes().repeat(8);
        assert_eq!(judge(true, &whole, 7), None);
        assert!(judge(false, &whole, 7).unwrap().contains("flag"));
        let mut torn = whole.clone();
        torn[12..16].fill(0);
        for came in [true, false] {
            let fault = judge(came, &torn, 7).unwrap();
            assert!(
                fault.contains(
                    "reads 0x00000000 where 0x00000007 was written, in 1 of 8 words, the first at 3"
                ),
                "{fault}"
            );
        }
    }

    #[test]
    fn the_side_whose_write_is_missing_is_found() {
        // Round 5 went there and did not come back; it did not even go there.
        assert!(matches!(lost(4, 5), Lost { first: false, round: 5 }));
        assert!(matches!(lost(4, 4), Lost { first: true, round: 5 }));
        assert!(matches!(lost(0, 0), Lost { first: true, round: 1 }));
    }
}
