//! TCP sockets between hosts.
//!
//! Invariant: only [`connect`] blocks, until its deadline. Every connection notices a silent peer
//! within [`SILENCE`], idle or not.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use super::socket;

/// How long a peer's host may be silent before its ranks count as lost. A process's end shows at
/// once.
pub(super) const SILENCE: Duration = Duration::from_secs(8);
/// Between two questions whether the other side is there.
const ASK: Duration = Duration::from_secs(2);
/// Connections that the kernel keeps for [`accept`]; the kernel caps it at `net.core.somaxconn`.
const BACKLOG: i32 = 1024;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn new(address: IpAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    rustix::net::socket_with(family, SocketType::STREAM, FLAGS, Some(ipproto::TCP))
}

/// Listens on one address of this host; port 0 takes any free one.
pub(super) fn listen(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = new(address.ip())?;
    // The connections of an earlier launch may still be closing.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

pub(super) fn connect(address: SocketAddr, deadline: Instant) -> Result<OwnedFd, Errno> {
    let socket = new(address.ip())?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => {
            if socket::wait(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(deadline))? == 0 {
                return Err(Errno::TIMEDOUT);
            }
            sockopt::socket_error(&socket)??;
        }
        Err(errno) => return Err(errno),
    }
    // A connection to a free local port can meet itself.
    if local(socket.as_fd())? == address {
        return Err(Errno::CONNREFUSED);
    }
    watch_over(&socket)?;
    Ok(socket)
}

/// The next connection and where it comes from; `WOULDBLOCK` where none waits.
pub(super) fn accept(listener: BorrowedFd<'_>) -> Result<(OwnedFd, IpAddr), Errno> {
    let (socket, from) = rustix::net::acceptfrom_with(listener, FLAGS)?;
    let from = from.and_then(|from| SocketAddr::try_from(from).ok()).ok_or(Errno::CONNABORTED)?;
    // It may be gone already, which is no fault of the listener.
    watch_over(&socket).map_err(|_| Errno::CONNABORTED)?;
    Ok((socket, from.ip()))
}

pub(super) fn local(socket: BorrowedFd<'_>) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(rustix::net::getsockname(socket)?)
}

/// Whether the error of a connection means that its other end is not there any more.
pub(super) const fn is_end(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::CONNRESET
            | Errno::PIPE
            | Errno::TIMEDOUT
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETRESET
            | Errno::HOSTDOWN
    )
}

/// Sends small messages at once, and bounds silence: by keepalive when idle, else by unacknowledged
/// data.
fn watch_over(socket: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, ASK)?;
    sockopt::set_tcp_keepintvl(socket, ASK)?;
    sockopt::set_tcp_keepcnt(socket, (SILENCE.as_secs() / ASK.as_secs()) as u32 - 1)?;
    sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lateness::{AMPLE, assert_soon};

    #[test]
    fn both_ends_of_a_connection_are_watched_over() {
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let caller = connect(local(listener.as_fd()).unwrap(), Instant::now() + AMPLE).unwrap();
        let (called, from) = accept(listener.as_fd()).unwrap();
        assert!(from.is_loopback());
        for socket in [&caller, &called] {
            assert!(
                sockopt::tcp_nodelay(socket).unwrap() && sockopt::socket_keepalive(socket).unwrap()
            );
            let asked = sockopt::tcp_keepidle(socket).unwrap()
                + sockopt::tcp_keepintvl(socket).unwrap() * sockopt::tcp_keepcnt(socket).unwrap();
            assert_eq!(asked, SILENCE, "nothing under way");
            assert_eq!(
                u128::from(sockopt::tcp_user_timeout(socket).unwrap()),
                SILENCE.as_millis(),
                "something under way"
            );
        }
    }

    #[test]
    fn a_connection_to_nobody_ends_by_its_deadline() {
        let free = local(listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap().as_fd()).unwrap();
        assert_eq!(connect(free, Instant::now() + AMPLE).unwrap_err(), Errno::CONNREFUSED);
        // A queue that is full answers nothing, as a host does whose packets are dropped.
        let full = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let address = local(full.as_fd()).unwrap();
        let mut held = Vec::new();
        let began = Instant::now();
        while let Ok(socket) = connect(address, Instant::now() + Duration::from_millis(200)) {
            held.push(socket);
        }
        assert_soon(began.elapsed(), Duration::from_secs(2));
        assert!(held.len() < 10, "{} connections", held.len());
    }
}
