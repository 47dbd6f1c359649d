//! The links of all ranks: each has one out into the switch and one in from it.
//!
//! Invariant: a link carries one message at a time, in the order in which they come to it; none
//! enters a reader's link before it has begun to leave its sender's and, through memory of the
//! host, before all of it has left.

use super::Machine;
use crate::Rank;
use std::collections::VecDeque;
use std::time::Duration;

/// Bytes on their way from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) bytes: u64,
    /// Whether they lie in memory of the host already, as they left for another reader.
    pub(super) again: bool,
    /// What follows from it.
    pub(super) then: Then,
}

/// What follows when a message has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Of the sender's item with this index one more is there.
    Tile(usize),
    /// The sender's transfer with this index is there.
    Transfer(usize),
    /// The chunk of the sender's item with this index is there, which left as a whole.
    Chunk(usize),
}

/// A message that has begun to leave.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Left {
    pub(super) message: Message,
    /// When the sender's link is free again.
    pub(super) out: Duration,
    /// When the last byte is at the reader.
    pub(super) come: Duration,
}

#[derive(Clone, Debug, Default)]
struct Link {
    waiting: VecDeque<Message>,
    busy: bool,
    /// When the way out is free of what has begun to leave.
    free_out: Duration,
    /// Since when the way in is not free, and when it is free of what has left so far.
    since_in: Duration,
    free_in: Duration,
}

#[derive(Debug)]
pub(super) struct Links {
    of: Vec<Link>,
    machine: Machine,
}

impl Links {
    pub(super) fn new(ranks: usize, machine: &Machine) -> Self {
        Self { of: vec![Link::default(); ranks], machine: *machine }
    }

    /// A message comes to its sender's link, and leaves if nothing else does.
    pub(super) fn send(&mut self, message: Message, now: Duration) -> Option<Left> {
        let link = &mut self.of[message.from.index()];
        link.waiting.push_back(message);
        if link.busy { None } else { self.free(message.from, now) }
    }

    /// The link out of `rank` is free: the next message leaves, if there is one. What the reader's
    /// link has no time for waits in the switch.
    pub(super) fn free(&mut self, rank: Rank, now: Duration) -> Option<Left> {
        let link = &mut self.of[rank.index()];
        let next = link.waiting.pop_front();
        link.busy = next.is_some();
        let message = next?;
        let comes = link.since_in <= now && now < link.free_in;
        let out = if message.again { now } else { now.saturating_add(self.machine.carrying_beside(message.bytes, comes)) };
        link.free_out = out;
        let reader = &mut self.of[message.to.index()];
        let enters = if self.machine.through_host { out } else { now }.max(reader.free_in);
        // What waits there will have left by then, or is still leaving.
        let to_leave = reader.waiting.iter().filter(|message| !message.again).map(|message| message.bytes).sum();
        let other_way = reader.free_out.max(now).saturating_add(self.machine.carrying_beside(to_leave, true)) > enters;
        if enters > reader.free_in {
            reader.since_in = enters;
        }
        reader.free_in = enters.saturating_add(self.machine.carrying_beside(message.bytes, other_way));
        Some(Left { message, out, come: reader.free_in })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn a_link_carries_one_message_at_a_time_out_and_in() {
        let machine = Machine { link_bytes_per_us: 100, both_ways_bytes_per_us: 100, ..Machine::H200 };
        let mut links = Links::new(3, &machine);
        let message = |from, to, bytes| Message { from: Rank::new(from), to: Rank::new(to), bytes, again: false, then: Then::Tile(0) };
        let first = links.send(message(0, 2, 300), US(0)).unwrap();
        assert_eq!((first.out, first.come), (US(3), US(3)));
        assert_eq!(links.send(message(0, 1, 100), US(1)), None, "waits for the first");
        let other = links.send(message(1, 2, 200), US(1)).unwrap();
        assert_eq!((other.out, other.come), (US(3), US(5)), "leaves, and waits for the reader's link");
        let second = links.free(Rank::new(0), US(3)).unwrap();
        assert_eq!((second.message, second.come), (message(0, 1, 100), US(4)));
        assert_eq!(links.free(Rank::new(0), US(4)), None);
    }

    #[test]
    fn through_the_host_a_message_goes_on_when_it_is_there_and_rows_leave_once() {
        let machine = Machine { link_bytes_per_us: 100, both_ways_bytes_per_us: 50, ..Machine::H100_PAIR_BY_HOST };
        let mut links = Links::new(3, &machine);
        let message = |from, to, again| Message { from: Rank::new(from), to: Rank::new(to), bytes: 300, again, then: Then::Transfer(0) };
        let first = links.send(message(0, 1, false), US(0)).unwrap();
        assert_eq!((first.out, first.come), (US(3), US(6)));
        assert_eq!(links.send(message(0, 2, true), US(1)), None, "behind the first");
        let again = links.free(Rank::new(0), US(3)).unwrap();
        assert_eq!((again.out, again.come), (US(3), US(6)));
        let beside = links.send(message(1, 2, false), US(4)).unwrap();
        assert_eq!((beside.out, beside.come), (US(10), US(13)), "out while the first comes, and in by itself");
    }
}
