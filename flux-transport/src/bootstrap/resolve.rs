//! Resolves rank 0's host name.
//!
//! Invariant: ends by its deadline. The system's resolver has none, so it runs on a thread that is
//! left behind.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::environment::Address;
use super::error::BootstrapError;
use super::unblock::{LOOK, cancelled};

/// For one question; a name that is not known yet is asked for again.
const PATIENCE: Duration = Duration::from_secs(5);

/// The addresses of rank 0's host, or why its name is not known yet.
///
/// # Errors
/// [`BootstrapError::Address`] for a wildcard address, and where there are only link-local IPv6
/// addresses.
pub(super) fn addresses(
    address: &Address,
    deadline: Instant,
) -> Result<Result<Vec<IpAddr>, String>, BootstrapError> {
    addresses_by(address, deadline, |name| {
        Ok((name, 0).to_socket_addrs()?.map(|found| found.ip()).collect())
    })
}

fn addresses_by(
    address: &Address,
    deadline: Instant,
    resolve: impl FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send + 'static,
) -> Result<Result<Vec<IpAddr>, String>, BootstrapError> {
    let found = match address.host().parse() {
        Ok(said) => vec![said],
        Err(_) => match look_up(address.host(), deadline, resolve)? {
            Ok(found) => found,
            Err(why) => return Ok(Err(why)),
        },
    };
    let problem =
        |problem: String| BootstrapError::Address { address: address.to_string(), problem };
    if let Some(all) = found.iter().find(|found| found.to_canonical().is_unspecified()) {
        return Err(problem(format!(
            "{all} stands for all addresses of a host: give one of rank 0's host"
        )));
    }
    // A link-local address needs an interface, which differs from host to host.
    let (of_a_link, found): (Vec<_>, Vec<_>) = found.into_iter().partition(is_of_a_link);
    match of_a_link.first() {
        Some(only) if found.is_empty() => Err(problem(format!(
            "{only} is good on one link only: give another address of rank 0's host"
        ))),
        _ => Ok(Ok(without_loopback(address.host(), found))),
    }
}

/// What the resolver says, if it does in time.
fn look_up(
    host: &str,
    deadline: Instant,
    resolve: impl FnOnce(&str) -> io::Result<Vec<IpAddr>> + Send + 'static,
) -> Result<Result<Vec<IpAddr>, String>, BootstrapError> {
    let (sender, answer) = mpsc::sync_channel(1);
    let name = host.to_owned();
    std::thread::Builder::new()
        .name("flux-resolve".to_owned())
        .spawn(move || {
            // Nobody listens any more where the answer comes too late.
            let _ = sender.send(resolve(&name));
        })
        .map_err(|source| BootstrapError::Io {
            step: "starting a thread to look up rank 0's address",
            source,
        })?;
    let until = deadline.min(Instant::now() + PATIENCE);
    let answered = loop {
        let left = until.saturating_duration_since(Instant::now());
        match answer.recv_timeout(left.min(LOOK)) {
            Err(RecvTimeoutError::Timeout) if left > LOOK && !cancelled() => {}
            answered => break answered,
        }
    };
    match answered {
        Ok(Ok(mut addresses)) => {
            addresses.dedup();
            Ok(Ok(addresses))
        }
        Ok(Err(error)) => Ok(Err(format!("its name is not known: {error}"))),
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
            Ok(Err("the system's resolver does not answer".to_owned()))
        }
    }
}

/// Drops loopback addresses where there are others: some systems give their own name both.
fn without_loopback(host: &str, mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    if !means_loopback(host) && !addresses.iter().all(is_loopback) {
        addresses.retain(|address| !is_loopback(address));
    }
    addresses
}

/// Whether a name has loopback addresses only, though other hosts must reach it.
pub(super) fn only_loopback(host: &str, addresses: &[IpAddr]) -> bool {
    !means_loopback(host) && !addresses.is_empty() && addresses.iter().all(is_loopback)
}

/// Whether who says this may want the loopback device.
fn means_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok()
}

fn is_of_a_link(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

fn is_loopback(address: &IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::AMPLE;

    fn soon() -> Instant {
        Instant::now() + AMPLE
    }

    fn at(host: &str) -> Address {
        Address::derived(host.to_owned(), 0, None)
    }

    #[test]
    fn an_address_is_itself_and_a_name_is_looked_up() {
        for address in ["127.0.0.1", "10.1.2.3", "::1"] {
            assert_eq!(
                addresses(&at(address), soon()).unwrap().unwrap(),
                [address.parse::<IpAddr>().unwrap()]
            );
        }
        assert!(
            addresses(&at("localhost"), soon()).unwrap().unwrap().iter().all(IpAddr::is_loopback)
        );
        let unknown = addresses(&at("no-such-host.invalid"), soon()).unwrap().unwrap_err();
        assert!(unknown.starts_with("its name is not known: "), "{unknown}");
    }

    #[test]
    fn a_hosts_own_name_is_its_addresses_without_those_of_the_loopback_device() {
        let found = |host: &str, resolved: &[&str]| {
            let resolved: Vec<IpAddr> =
                resolved.iter().map(|address| address.parse().unwrap()).collect();
            let found = addresses_by(&at(host), soon(), |_| Ok(resolved)).unwrap().unwrap();
            found.iter().map(IpAddr::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            found("nodex", &["127.0.1.1", "10.0.0.1", "::1", "fd00::1", "::ffff:127.0.0.1"]),
            ["10.0.0.1", "fd00::1"]
        );
        // What is said of them is the caller's affair.
        assert_eq!(found("nodex", &["127.0.1.1"]), ["127.0.1.1"]);
        assert_eq!(found("localhost", &["::1", "127.0.0.1"]), ["::1", "127.0.0.1"]);
        assert_eq!(found("127.0.0.1", &[]), ["127.0.0.1"]);
    }

    #[test]
    fn what_stands_for_all_addresses_is_refused_under_any_name() {
        for said in ["0.0.0.0", "::", "::ffff:0.0.0.0"] {
            for (host, resolved) in [
                (said, Vec::new()),
                ("nodex", vec!["10.0.0.1".parse().unwrap(), said.parse().unwrap()]),
            ] {
                let error = addresses_by(&at(host), soon(), |_| Ok(resolved)).unwrap_err();
                assert!(
                    matches!(&error, BootstrapError::Address { .. })
                        && error.to_string().contains("all addresses"),
                    "{host}: {error}"
                );
            }
        }
    }

    #[test]
    fn addresses_of_a_link_are_passed_over_and_refused_where_there_are_no_others() {
        let of_a_link: IpAddr = "fe80::1".parse().unwrap();
        let found = |host: &str, others: &[&str]| {
            let resolved = [of_a_link]
                .into_iter()
                .chain(others.iter().map(|other| other.parse().unwrap()))
                .collect();
            addresses_by(&at(host), soon(), |_| Ok(resolved))
        };
        assert_eq!(
            found("nodex", &["10.0.0.1"]).unwrap().unwrap(),
            ["10.0.0.1".parse::<IpAddr>().unwrap()]
        );
        for host in ["nodex", "fe80::1"] {
            let error = found(host, &[]).unwrap_err().to_string();
            assert!(error.contains("fe80::1 is good on one link only"), "{error}");
        }
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
