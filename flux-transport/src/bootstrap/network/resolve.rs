//! From a name to addresses.
//!
//! Invariant: ends by its deadline, though the system's resolver knows none: it works on a thread of its own, which is left behind then.

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::bootstrap::error::BootstrapError;

/// For one question; a name that is not known yet is asked for again.
const PATIENCE: Duration = Duration::from_secs(5);

/// The addresses of a host; none where its name is not known (yet).
pub(super) fn addresses(host: &str, deadline: Instant) -> Result<Vec<IpAddr>, BootstrapError> {
    if let Ok(address) = host.parse() {
        return Ok(vec![address]);
    }
    let (sender, answer) = mpsc::sync_channel(1);
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("flux-resolve".to_owned())
        .spawn(move || {
            // Nobody listens any more where the answer comes too late.
            let _ = sender.send((name.as_str(), 0).to_socket_addrs().map(|found| found.map(|address| address.ip()).collect::<Vec<_>>()));
        })
        .map_err(|source| BootstrapError::Io { step: "starting a thread to look up rank 0's address", source })?;
    let wait = deadline.saturating_duration_since(Instant::now()).min(PATIENCE);
    match answer.recv_timeout(wait) {
        Ok(Ok(mut addresses)) => {
            addresses.dedup();
            Ok(addresses)
        }
        Ok(Err(error)) => {
            tracing::debug!(host, %error, "rank 0's name is not known");
            Ok(Vec::new())
        }
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(Vec::new()),
    }
}

/// Whether other hosts cannot reach a host by these addresses of its name, though they can be meant to: some systems give their own name an address
/// of the loopback device.
pub(super) fn only_loopback(host: &str, addresses: &[IpAddr]) -> bool {
    let meant = host == "localhost" || host.parse::<IpAddr>().is_ok();
    !meant && !addresses.is_empty() && addresses.iter().all(IpAddr::is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_itself_and_a_name_is_looked_up() {
        let deadline = Instant::now() + Duration::from_secs(10);
        for address in ["127.0.0.1", "10.1.2.3", "::1"] {
            assert_eq!(addresses(address, deadline).unwrap(), [address.parse::<IpAddr>().unwrap()]);
        }
        assert!(addresses("localhost", deadline).unwrap().iter().all(IpAddr::is_loopback));
        assert!(addresses("no-such-host.invalid", deadline).unwrap().is_empty());
    }

    #[test]
    fn a_hosts_own_name_must_not_mean_the_loopback_device() {
        let loopback: [IpAddr; 1] = ["127.0.1.1".parse().unwrap()];
        assert!(only_loopback("node1", &loopback));
        assert!(!only_loopback("localhost", &loopback));
        assert!(!only_loopback("127.0.1.1", &loopback));
        assert!(!only_loopback("node1", &["10.0.0.1".parse().unwrap(), loopback[0]]));
        assert!(!only_loopback("node1", &[]));
    }
}
