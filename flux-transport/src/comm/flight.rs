//! The flight record: a rank's last calls, for failure reports.
//!
//! Invariant: noting a call allocates nothing. The newest [`KEPT`] calls are there, in order.

use crate::sync::locked;
use flux_core::signal::Epoch;
use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

pub(super) const KEPT: usize = 64;
const NAME: usize = 48;

/// What a caller calls a call: an op, and its extents.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Label {
    name: [u8; NAME],
    extents: [u32; 3],
}

impl Label {
    /// The op's name, of which 48 bytes are kept, and its global extents.
    pub fn new(name: &str, extents: [u32; 3]) -> Self {
        let mut kept = [0; NAME];
        let length = name.len().min(NAME);
        kept[..length].copy_from_slice(&name.as_bytes()[..length]);
        Self { name: kept, extents }
    }

    /// The same name with other extents.
    #[must_use]
    pub const fn with_extents(self, extents: [u32; 3]) -> Self {
        Self { extents, ..self }
    }
}

/// In what holds one and is printed as a whole, its words too, not the bytes of them.
impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A peer's bytes go into messages for people: printable characters only.
        for &byte in self.name.iter().take_while(|&&byte| byte != 0) {
            write!(f, "{}", if byte.is_ascii_graphic() { char::from(byte) } else { '?' })?;
        }
        let [m, n, k] = self.extents;
        write!(f, " {m}x{n}x{k}")
    }
}

/// How far a call has come, as its rank's host knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallState {
    /// It is being made: on the host, executed; on a device, enqueued.
    Begun,
    /// It is on its stream.
    Launched,
    /// It has returned with its result.
    Done,
    /// It has failed.
    Failed,
    /// It was begun and given up before anything of it was handed out.
    GivenUp,
}

/// One call of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallRecord {
    /// Its number; `None` where only the device knows it, as for captured calls.
    pub epoch: Option<Epoch>,
    /// What it is, where the caller said it.
    pub label: Option<Label>,
    /// Calls [without rows](crate::Communicator::empty_call) before it, modulo 2^32.
    pub empty_calls: u32,
    /// How far it has come.
    pub state: CallState,
    /// When it began, after the communicator was made.
    pub begun: Duration,
    /// When it came to its state; of one that is being made, when this was told.
    pub noted: Duration,
}

impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.epoch {
            Some(epoch) => write!(f, "call {epoch}")?,
            None => f.write_str("a captured call")?,
        }
        self.label.map_or(Ok(()), |label| write!(f, " ({label})"))?;
        match self.empty_calls {
            0 => Ok(()),
            1 => f.write_str(" after 1 call without rows"),
            empty => write!(f, " after {empty} calls without rows"),
        }
    }
}

/// A communicator's calls on this rank.
#[derive(Debug)]
pub(super) struct Flight {
    start: Instant,
    calls: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    ring: [Option<CallRecord>; KEPT],
    made: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Noted(usize);

impl Flight {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), calls: Mutex::new(Ring { ring: [None; KEPT], made: 0 }) }
    }

    pub(super) fn begin(
        &self,
        epoch: Option<Epoch>,
        label: Option<Label>,
        empty_calls: u32,
    ) -> Noted {
        let now = self.start.elapsed();
        let mut calls = locked(&self.calls);
        let noted = Noted(calls.made);
        let state = CallState::Begun;
        calls.ring[noted.0 % KEPT] =
            Some(CallRecord { epoch, label, empty_calls, state, begun: now, noted: now });
        calls.made += 1;
        noted
    }

    pub(super) fn note(&self, call: Noted, state: CallState) {
        let now = self.start.elapsed();
        let mut calls = locked(&self.calls);
        if calls.made - call.0 <= KEPT
            && let Some(record) = &mut calls.ring[call.0 % KEPT]
        {
            (record.state, record.noted) = (state, now);
        }
    }

    pub(super) fn last(&self) -> Vec<CallRecord> {
        let now = self.start.elapsed();
        let as_told = |call: CallRecord| {
            if call.state == CallState::Begun { CallRecord { noted: now, ..call } } else { call }
        };
        let calls = locked(&self.calls);
        (calls.made.saturating_sub(KEPT)..calls.made)
            .filter_map(|at| calls.ring[at % KEPT])
            .map(as_told)
            .collect()
    }
}

const STATES: [CallState; 5] =
    [CallState::Begun, CallState::Launched, CallState::Done, CallState::Failed, CallState::GivenUp];
const RECORD: usize = 3 + 4 + NAME + 12 + 4 + 16;

pub(super) fn encode(calls: &[CallRecord]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(calls.len() * RECORD);
    for call in calls {
        let label = call.label.unwrap_or(Label { name: [0; NAME], extents: [0; 3] });
        bytes.extend([
            call.state as u8,
            u8::from(call.epoch.is_some()),
            u8::from(call.label.is_some()),
        ]);
        bytes.extend(call.epoch.map_or(0, Epoch::get).to_le_bytes());
        bytes.extend(label.name);
        label.extents.iter().for_each(|extent| bytes.extend(extent.to_le_bytes()));
        bytes.extend(call.empty_calls.to_le_bytes());
        for time in [call.begun, call.noted] {
            bytes.extend(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).to_le_bytes());
        }
    }
    bytes
}

/// The calls of a message; `None` for what [`encode`] does not write.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<CallRecord>> {
    let (records, rest) = bytes.as_chunks::<RECORD>();
    if !rest.is_empty() || records.len() > KEPT {
        return None;
    }
    records.iter().map(decode_one).collect()
}

fn decode_one(record: &[u8; RECORD]) -> Option<CallRecord> {
    let [state, has_epoch, has_label, rest @ ..] = record;
    if *has_epoch > 1 || *has_label > 1 {
        return None;
    }
    let (epoch, rest) = rest.split_first_chunk()?;
    let (name, rest) = rest.split_first_chunk()?;
    let (extents, rest) = rest.split_first_chunk::<12>()?;
    let (empty_calls, times) = rest.split_first_chunk()?;
    let mut label = Label { name: *name, extents: [0; 3] };
    for (extent, from) in label.extents.iter_mut().zip(extents.as_chunks().0) {
        *extent = u32::from_le_bytes(*from);
    }
    let mut times =
        times.as_chunks().0.iter().map(|time| Duration::from_nanos(u64::from_le_bytes(*time)));
    Some(CallRecord {
        epoch: (*has_epoch == 1).then(|| Epoch::new(u32::from_le_bytes(*epoch))),
        label: (*has_label == 1).then_some(label),
        empty_calls: u32::from_le_bytes(*empty_calls),
        state: *STATES.get(usize::from(*state))?,
        begun: times.next()?,
        noted: times.next()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> impl Strategy<Value = CallRecord> {
        let label = prop::option::of(
            ("[a-z_]{0,60}", any::<[u32; 3]>())
                .prop_map(|(name, extents)| Label::new(&name, extents)),
        );
        let epoch = prop::option::of(any::<u32>());
        (epoch, label, any::<u32>(), 0..STATES.len(), any::<[u64; 2]>()).prop_map(
            |(epoch, label, empty_calls, state, [begun, noted])| {
                let [begun, noted] = [begun, noted].map(Duration::from_nanos);
                CallRecord {
                    epoch: epoch.map(Epoch::new),
                    label,
                    empty_calls,
                    state: STATES[state],
                    begun,
                    noted,
                }
            },
        )
    }

    #[test]
    fn a_label_is_printed_in_words() {
        let label = Label::new("ag_gemm", [8, 64, 32]);
        assert_eq!(format!("{label:?}"), "\"ag_gemm 8x64x32\"");
    }

    #[test]
    fn a_call_that_is_being_made_is_told_with_how_long() {
        let flight = Flight::new();
        let (first, _) = (
            flight.begin(Some(Epoch::new(1)), None, 0),
            flight.begin(Some(Epoch::new(2)), None, 0),
        );
        flight.note(first, CallState::Launched);
        let took = |at: usize| flight.last()[at].noted.saturating_sub(flight.last()[at].begun);
        let (launched, made) = (took(0), took(1));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(took(0), launched);
        assert!(took(1) >= made + Duration::from_millis(20));
    }

    proptest! {
        #[test]
        fn calls_come_back(calls in prop::collection::vec(record(), 0..KEPT)) {
            prop_assert_eq!(decode(&encode(&calls)), Some(calls));
        }

        #[test]
        fn any_bytes_decode_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(calls) = decode(&bytes) {
                prop_assert!(calls.iter().all(|call| call.to_string().len() < 160));
            }
        }
    }

    #[test]
    fn a_call_is_noted_as_long_as_it_is_kept() {
        for (later, last) in
            [(KEPT - 1, [CallState::Failed, CallState::Done]), (KEPT, [CallState::Done; 2])]
        {
            let flight = Flight::new();
            let first = flight.begin(Some(Epoch::new(0)), None, 0);
            for number in 1..=u32::try_from(later).unwrap() {
                flight.note(flight.begin(Some(Epoch::new(number)), None, 0), CallState::Done);
            }
            flight.note(first, CallState::Failed);
            let calls = flight.last();
            assert_eq!(
                (calls.len(), [calls[0].state, calls[KEPT - 1].state]),
                (KEPT, last),
                "{later} later calls"
            );
        }
    }

    #[test]
    fn the_newest_calls_are_kept_in_order() {
        let flight = Flight::new();
        let first = flight.begin(Some(Epoch::new(0)), None, 0);
        for number in 1..=100 {
            let label = Label::new("ag_gemm+gelu", [4096, 49152, 12288]);
            let call = flight.begin(Some(Epoch::new(number)), Some(label), number / 100);
            flight.note(call, CallState::Done);
        }
        // It is kept no more, and must not be written over another.
        flight.note(first, CallState::Failed);
        let calls = flight.last();
        let numbers: Vec<u32> =
            calls.iter().filter_map(|call| call.epoch).map(Epoch::get).collect();
        assert_eq!(numbers, (37..=100).collect::<Vec<_>>());
        assert!(calls.iter().all(|call| call.state == CallState::Done));
        assert_eq!(
            calls[63].to_string(),
            "call 100 (ag_gemm+gelu 4096x49152x12288) after 1 call without rows"
        );
    }
}
