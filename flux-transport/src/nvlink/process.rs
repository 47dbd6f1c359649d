//! Which ranks are in one process.
//!
//! Invariant: two ranks have the same token exactly when they share an address space. A process number would not do: ranks may be in
//! containers that count their processes alike.

use super::error::NvLinkError;
use std::sync::OnceLock;

/// This process's token.
pub(super) fn token() -> Result<[u8; 16], NvLinkError> {
    static TOKEN: OnceLock<Result<[u8; 16], NvLinkError>> = OnceLock::new();
    TOKEN.get_or_init(make).clone()
}

fn make() -> Result<[u8; 16], NvLinkError> {
    let mut token = [0; 16];
    let no_token = |reason: String| NvLinkError::Control { reason: format!("no random bytes for this process's token: {reason}") };
    match rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(token),
        Ok(_) => Err(no_token("too few".to_owned())),
        Err(error) => Err(no_token(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_has_one_token() {
        assert_eq!(super::token(), std::thread::spawn(super::token).join().unwrap());
        assert_ne!(super::token().unwrap(), [0; 16]);
    }
}
