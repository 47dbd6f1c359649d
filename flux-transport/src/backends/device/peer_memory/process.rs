//! Which ranks are in one process.
//!
//! Invariant: equal tokens mean a common address space. Process ids may repeat across containers.

use super::error::PeerMemoryError;
use crate::bootstrap::random;
use std::sync::OnceLock;

pub(super) fn token() -> Result<[u8; 16], PeerMemoryError> {
    static TOKEN: OnceLock<[u8; 16]> = OnceLock::new();
    if let Some(token) = TOKEN.get() {
        return Ok(*token);
    }
    let what = "random bytes for a token of this process";
    let token = random().map_err(|errno| PeerMemoryError::Io { what, source: errno.into() })?;
    // Of two threads that come here at once, one's token stays.
    Ok(*TOKEN.get_or_init(|| token))
}

#[cfg(test)]
mod tests {
    use super::token;

    #[test]
    fn a_process_has_one_token() {
        let other = std::thread::spawn(|| token().unwrap()).join().unwrap();
        assert_eq!(token().unwrap(), other);
        assert_ne!(other, [0; 16]);
    }
}
