//! The first rank of a host connects the ranks of that host.
//!
//! Invariant: it makes a socket pair for every two, and each rank alone holds its ends. Sockets
//! need no proof of identity.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use super::socket_rows;
use crate::bootstrap::deadlines::ANSWER;
use crate::bootstrap::error::BootstrapError;
use crate::bootstrap::rendezvous::hello::Reply;
use crate::bootstrap::rendezvous::{HostGroup, Member, dismiss};
use crate::bootstrap::socket;

/// The sockets to the other ranks of the group, in their order.
pub(super) fn sockets(
    ranks: &HostGroup,
    deadline: Instant,
) -> Result<Vec<OwnedFd>, BootstrapError> {
    if let Some(members) = ranks.gather(deadline)? {
        return deal(ranks, &members);
    }
    let others = ranks.group.len() - 1;
    ranks.visit(&[], deadline, |bytes, sockets| match Reply::decode(bytes) {
        Some(Reply::Welcome { sockets: count })
            if count as usize == others
                && sockets.len() == others
                && sockets.iter().all(|socket| socket::is_ours(socket.as_fd())) =>
        {
            Some(std::mem::take(sockets))
        }
        _ => None,
    })
}

/// Gives each rank its sockets. A rank that dies now is found later.
fn deal(ranks: &HostGroup, members: &[Member]) -> Result<Vec<OwnedFd>, BootstrapError> {
    let mut rows = match socket_rows(ranks.group.len()) {
        Ok(rows) => rows,
        Err(errno) => {
            dismiss(ranks.leader(), members, errno);
            return Err(BootstrapError::io("making the sockets between the ranks")(errno));
        }
    };
    let reply = Reply::Welcome { sockets: ranks.group.len() as u32 - 1 }.encode();
    for (member, row) in members.iter().zip(&rows[1..]) {
        let row: Vec<_> = row.iter().map(AsFd::as_fd).collect();
        if let Err(error) = member.link.send(&[&reply], &row, Instant::now() + ANSWER) {
            tracing::debug!(%error, "a rank left while the group formed");
        }
    }
    // The other rows close here: their ranks alone hold them from now on.
    Ok(rows.swap_remove(0))
}
