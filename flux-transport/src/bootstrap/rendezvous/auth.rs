//! Both ends of a TCP connection prove that they hold the launch's secret, and neither says it.
//!
//! ```text
//! listener                                     caller
//! challenge: magic, launch, 32 random bytes ->
//!     <- answer: 32 random bytes, proof(caller, challenge, these bytes, body), body
//! acceptance: proof(listener, challenge, those bytes, body) ->     or the denial
//! ```
//!
//! A proof is the HMAC-SHA256 of all that was said, under the secret, with the prover's role and
//! both ends' random bytes: it can be neither reflected nor replayed. The caller proves itself
//! first, so a listener keeps only a connection and a challenge for a stranger.
//!
//! Invariant: these layouts are the same in every version; the body states its version. The proof
//! covers the handshake, not the unencrypted traffic after it.

use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use rustix::io::Errno;
use sha2::Sha256;

use super::hello::HELLO_BYTES;
use super::roster::MAX_PAYLOAD;
use crate::bootstrap::connection::Connection;
use crate::bootstrap::random::random;
use crate::bootstrap::secret::Secret;
use crate::bootstrap::socket::Received;

const CHALLENGE_MAGIC: [u8; 8] = *b"fluxauth";
/// Answers a wrong proof. It is not authenticated, so it only explains why no group forms.
const DENIAL: [u8; 8] = *b"fluxdeny";
const NONCE_BYTES: usize = 32;
const PROOF_BYTES: usize = 32;
const CHALLENGE_BYTES: usize = 8 + 16 + NONCE_BYTES;
/// Most bytes of an answer's body.
const MAX_BODY: usize = HELLO_BYTES + MAX_PAYLOAD;
pub(crate) const MAX_RESPONSE: usize = NONCE_BYTES + PROOF_BYTES + MAX_BODY;

#[derive(Clone, Copy)]
enum Role {
    Listener,
    Caller,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Challenge([u8; CHALLENGE_BYTES]);

impl Challenge {
    pub(crate) fn new(launch: u128) -> Result<Self, Errno> {
        let mut bytes = [0; CHALLENGE_BYTES];
        bytes[..8].copy_from_slice(&CHALLENGE_MAGIC);
        bytes[8..24].copy_from_slice(&launch.to_le_bytes());
        bytes[24..].copy_from_slice(&random::<NONCE_BYTES>()?);
        Ok(Self(bytes))
    }

    pub(crate) const fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// `None` for what is no challenge.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        bytes.starts_with(&CHALLENGE_MAGIC).then_some(())?;
        bytes.try_into().ok().map(Self)
    }

    pub(crate) fn launch(&self) -> u128 {
        u128::from_le_bytes(std::array::from_fn(|at| self.0[8 + at]))
    }
}

/// A caller's answer, as it came.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Response<'a> {
    nonce: &'a [u8; NONCE_BYTES],
    proof: &'a [u8; PROOF_BYTES],
    body: &'a [u8],
}

impl<'a> Response<'a> {
    /// `None` for what is no answer.
    pub(crate) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (nonce, rest) = bytes.split_first_chunk()?;
        let (proof, body) = rest.split_first_chunk()?;
        (body.len() <= MAX_BODY).then_some(Self { nonce, proof, body })
    }

    /// The body and the listener's own proof, where the caller's is right.
    pub(crate) fn check(
        &self,
        secret: &Secret,
        challenge: &Challenge,
    ) -> Option<(&'a [u8], [u8; PROOF_BYTES])> {
        // Compared in constant time.
        mac(secret, Role::Caller, challenge, self.nonce, self.body)
            .verify_slice(self.proof)
            .ok()?;
        let proof =
            mac(secret, Role::Listener, challenge, self.nonce, self.body).finalize().into_bytes();
        Some((self.body, proof.into()))
    }
}

/// Tells a caller that its proof is wrong.
pub(crate) fn deny(link: &Connection, deadline: Instant) {
    let _ = link.send(&[&DENIAL], &[], deadline);
}

/// Why a caller is not connected.
#[derive(Debug)]
pub(crate) enum Miss {
    Unreached(Errno),
    /// Nobody there, or not any more, or not in time.
    Nobody,
    Stranger,
    OtherLaunch,
    /// The same launch, with another secret.
    Denied,
    System(Errno),
}

/// Whether one's own or another launch listens at the other end: its challenge.
pub(crate) fn greet(link: &Connection, launch: u128, deadline: Instant) -> Result<Challenge, Miss> {
    let mut buffer = [0; CHALLENGE_BYTES];
    match link.await_message(&mut buffer, deadline).map_err(Miss::System)? {
        Received::Message(message) => match Challenge::decode(&buffer[..message.length]) {
            Some(challenge) if challenge.launch() == launch => Ok(challenge),
            Some(_) => Err(Miss::OtherLaunch),
            None => Err(Miss::Stranger),
        },
        Received::Nothing | Received::End => Err(Miss::Nobody),
        // What other programs say first reads as some length.
        Received::Oversized => Err(Miss::Stranger),
    }
}

/// Answers a challenge: proves this end, with `body`, to the listener, and the listener to this
/// end.
pub(crate) fn prove(
    link: &Connection,
    secret: &Secret,
    challenge: &Challenge,
    body: &[u8],
    deadline: Instant,
) -> Result<(), Miss> {
    debug_assert!(body.len() <= MAX_BODY, "bodies are of fixed layouts");
    let nonce = random().map_err(Miss::System)?;
    let proof: [u8; PROOF_BYTES] =
        mac(secret, Role::Caller, challenge, &nonce, body).finalize().into_bytes().into();
    match link.send(&[&nonce, &proof, body], &[], deadline) {
        Ok(()) => {}
        Err(Errno::TIMEDOUT | Errno::PIPE) => return Err(Miss::Nobody),
        Err(errno) => return Err(Miss::System(errno)),
    }
    let mut buffer = [0; PROOF_BYTES];
    match link.await_message(&mut buffer, deadline).map_err(Miss::System)? {
        Received::Message(message) if buffer[..message.length] == DENIAL => Err(Miss::Denied),
        Received::Message(message) => mac(secret, Role::Listener, challenge, &nonce, body)
            .verify_slice(&buffer[..message.length])
            .map_err(|_| Miss::Stranger),
        Received::Nothing | Received::End => Err(Miss::Nobody),
        Received::Oversized => Err(Miss::Stranger),
    }
}

fn mac(
    secret: &Secret,
    role: Role,
    challenge: &Challenge,
    nonce: &[u8; NONCE_BYTES],
    body: &[u8],
) -> Hmac<Sha256> {
    // Of fixed length, as all that comes before the body.
    let role = match role {
        Role::Listener => b"flux listener",
        Role::Caller => b"flux caller  ",
    };
    let mac =
        Hmac::<Sha256>::new_from_slice(secret.bytes()).expect("HMAC takes keys of any length");
    mac.chain_update(role).chain_update(challenge.bytes()).chain_update(nonce).chain_update(body)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn secret(letter: &str) -> Secret {
        Secret::new(letter.repeat(32)).unwrap()
    }

    /// A right answer to the challenge.
    fn answer(secret: &Secret, challenge: &Challenge, body: &[u8]) -> Vec<u8> {
        let nonce = random().unwrap();
        let proof: [u8; 32] =
            mac(secret, Role::Caller, challenge, &nonce, body).finalize().into_bytes().into();
        [&nonce[..], &proof, body].concat()
    }

    proptest! {
        #[test]
        fn only_the_secret_and_every_bit_of_it_all_pass(
            body in prop::collection::vec(any::<u8>(), 0..256),
            at: prop::sample::Index,
            bit in 0..8,
        ) {
            let challenge = Challenge::new(7).unwrap();
            let said = answer(&secret("a"), &challenge, &body);
            let (heard, proof) = Response::decode(&said).unwrap().check(&secret("a"), &challenge).unwrap();
            prop_assert_eq!(heard, &body[..]);
            // A listener's proof is no caller's: what was heard cannot be said back.
            let reflected = [&said[..32], &proof, &body[..]].concat();
            prop_assert!(Response::decode(&reflected).unwrap().check(&secret("a"), &challenge).is_none());
            prop_assert!(Response::decode(&said).unwrap().check(&secret("b"), &challenge).is_none());
            prop_assert!(Response::decode(&said).unwrap().check(&secret("a"), &Challenge::new(7).unwrap()).is_none());
            let mut other = said.clone();
            other[at.index(said.len())] ^= 1_u8 << bit;
            prop_assert!(Response::decode(&other).unwrap().check(&secret("a"), &challenge).is_none());
        }

        #[test]
        fn any_bytes_decode_without_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..400),
            magic: bool,
        ) {
            let bytes = if magic { [&CHALLENGE_MAGIC[..], &bytes].concat() } else { bytes };
            if let Some(challenge) = Challenge::decode(&bytes) {
                prop_assert_eq!(challenge.bytes(), &bytes[..]);
            }
            if let Some(answer) = Response::decode(&bytes) {
                prop_assert_eq!([&answer.nonce[..], answer.proof, answer.body].concat(), &bytes[..]);
                prop_assert!(answer.check(&secret("a"), &Challenge::new(0).unwrap()).is_none());
            }
        }
    }

    #[test]
    fn a_challenge_names_its_launch_and_never_comes_twice() {
        let challenges =
            [Challenge::new(u128::MAX - 5).unwrap(), Challenge::new(u128::MAX - 5).unwrap()];
        assert_ne!(challenges[0], challenges[1]);
        assert_eq!(Challenge::decode(challenges[0].bytes()).unwrap().launch(), u128::MAX - 5);
    }
}
