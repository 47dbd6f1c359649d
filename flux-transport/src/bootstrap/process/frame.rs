//! Messages between ranks that have met: one header, one body of at most [`MAX_BODY`] bytes.
//!
//! Invariant: a frame is one message of its socket. Decoding borrows, never allocates and never
//! panics. The sequence number counts steps, so ranks in different steps find out.

use crate::bootstrap::control::{MAX_PAYLOAD, STEP_BYTES};

/// Most bytes of one rank's part of a step.
pub(crate) const MAX_BODY: usize = STEP_BYTES + MAX_PAYLOAD;
pub(crate) const HEADER_BYTES: usize = 20;
/// Room for any frame. Of a longer message the kernel says that it is cut.
pub(crate) const MAX_FRAME: usize = HEADER_BYTES + MAX_BODY;
const MAGIC: [u8; 4] = *b"flxc";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A rank's bytes in an exchange.
    Exchange,
    /// A rank's descriptors in an exchange of descriptors.
    Descriptors,
    /// The sender leaves on purpose; the end of its socket is no loss.
    Goodbye,
    /// The sender gives up a communicator; the body says which, and why.
    Abort,
    /// A wait of the sender passed its deadline; the body says which.
    GaveUp,
    /// The sender asks what the receiver does; the body numbers the question and the communicator.
    Ask,
    /// The sender's answer: the question's number, then what it does.
    Reply,
    /// The sender waits for a new group.
    Join,
    /// The sender waits for a new group no more: it has one, or gives up.
    Stopped,
    /// The sender goes on without the receiver.
    LeftOut,
    /// The new group: its members (bits), and a socket to each of the others in order.
    Welcome,
    /// The sender could not make the new group; the body is the system's error.
    Unable,
    /// The sender makes no more calls of a communicator; the body has its number and the last call.
    Depart,
    /// What the sender's transport tells the receiver's: a communicator's number and four words.
    Told,
}

impl Kind {
    const ALL: [Self; 14] = [
        Self::Exchange,
        Self::Descriptors,
        Self::Goodbye,
        Self::Abort,
        Self::GaveUp,
        Self::Ask,
        Self::Reply,
        Self::Join,
        Self::Stopped,
        Self::LeftOut,
        Self::Welcome,
        Self::Unable,
        Self::Depart,
        Self::Told,
    ];

    /// As a message names the step.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Exchange => "exchange",
            Self::Descriptors => "exchange of descriptors",
            Self::Goodbye => "goodbye",
            Self::Abort => "abort",
            Self::GaveUp => "giving up",
            Self::Ask => "question",
            Self::Reply => "answer",
            Self::Join => "joining",
            Self::Stopped => "end of waiting",
            Self::LeftOut => "leaving out",
            Self::Welcome => "welcome",
            Self::Unable => "inability",
            Self::Depart => "departure",
            Self::Told => "word",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) descriptors: u8,
    /// The step, counted from 0; 0 for what belongs to no step.
    pub(crate) sequence: u64,
}

impl Header {
    /// The header's bytes before a body of `length` bytes, at most [`MAX_BODY`].
    pub(crate) fn encode(&self, length: usize) -> [u8; HEADER_BYTES] {
        debug_assert!(length <= MAX_BODY, "the plane checks the length before it sends");
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.kind as u8;
        bytes[5] = self.descriptors;
        bytes[8..12].copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        bytes[12..].copy_from_slice(&self.sequence.to_le_bytes());
        bytes
    }
}

/// Splits a message into header and body.
///
/// # Errors
/// Says what is wrong with it.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Header, &[u8]), String> {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(format!(
            "a frame of {} bytes is shorter than its header of {HEADER_BYTES}",
            bytes.len()
        ));
    };
    let [m0, m1, m2, m3, kind, descriptors, z0, z1, l0, l1, l2, l3, sequence @ ..] = *header;
    if [m0, m1, m2, m3] != MAGIC || [z0, z1] != [0, 0] {
        return Err("a frame without the magic of one".to_owned());
    }
    let Some(&kind) = Kind::ALL.get(usize::from(kind)) else {
        return Err(format!("a frame of unknown kind {kind}"));
    };
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    if body.len() > MAX_BODY || body.len() != length as usize {
        return Err(format!(
            "a frame that says {length} bytes with a body of {}, limit {MAX_BODY}",
            body.len()
        ));
    }
    Ok((Header { kind, descriptors, sequence: u64::from_le_bytes(sequence) }, body))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_come_back(
            kind in 0..Kind::ALL.len(),
            descriptors: u8,
            sequence: u64,
            body in prop::collection::vec(any::<u8>(), 0..2000),
        ) {
            let header = Header { kind: Kind::ALL[kind], descriptors, sequence };
            let bytes = [&header.encode(body.len())[..], &body].concat();
            prop_assert_eq!(decode(&bytes), Ok((header, &body[..])));
        }

        #[test]
        fn any_bytes_decode_without_panic(
            tail in prop::collection::vec(any::<u8>(), 0..100),
            magic: bool,
        ) {
            let bytes = if magic { [&MAGIC[..], &tail].concat() } else { tail };
            if let Ok((header, body)) = decode(&bytes) {
                // Whatever is accepted is what encoding gives: there is no second reading of a
                // frame.
                prop_assert_eq!([&header.encode(body.len())[..], body].concat(), bytes);
            }
        }

        #[test]
        fn a_cut_or_stretched_frame_is_refused(
            body in prop::collection::vec(any::<u8>(), 1..100),
            cut in 1..100_usize,
        ) {
            let header = Header { kind: Kind::Exchange, descriptors: 0, sequence: 3 };
            let bytes = [&header.encode(body.len())[..], &body].concat();
            prop_assert!(decode(&bytes[..bytes.len() - cut.min(bytes.len())]).is_err());
            prop_assert!(decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_even_when_it_is_there() {
        let header = Header { kind: Kind::Exchange, descriptors: 0, sequence: 0 };
        let mut bytes = header.encode(0).to_vec();
        bytes[8..12].copy_from_slice(&(u32::try_from(MAX_BODY).unwrap() + 1).to_le_bytes());
        bytes.resize(HEADER_BYTES + MAX_BODY + 1, 0);
        assert!(decode(&bytes).unwrap_err().contains(&(MAX_BODY + 1).to_string()));
    }
}
