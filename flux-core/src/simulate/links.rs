//! The links of all ranks: one out of each rank into the switch, one in.
//!
//! Invariant: a link carries one message at a time, first come first served. A message enters its
//! reader's link after it has begun to leave its sender's; through host memory, after it has left.

use crate::Rank;
use crate::machine::Machine;
use std::collections::VecDeque;
use std::time::Duration;

/// Bytes from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) from: Rank,
    pub(super) to: Rank,
    pub(super) bytes: u64,
    /// Whether the bytes are in host memory already, sent for another reader.
    pub(super) again: bool,
    /// What its arrival completes.
    pub(super) effect: Effect,
}

/// What the arrival of a message completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// One more message of the sender's item with this index.
    Tile(usize),
    /// The sender's transfer with this index.
    Transfer(usize),
    /// The whole chunk of the sender's item with this index.
    Chunk(usize),
}

/// A message that has begun to leave.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Departure {
    pub(super) message: Message,
    /// Moment at which the sender's link is free again.
    pub(super) out: Duration,
    /// Moment at which the last byte is at the reader.
    pub(super) arrives: Duration,
}

#[derive(Clone, Debug, Default)]
struct Link {
    waiting: VecDeque<Message>,
    busy: bool,
    /// Moment at which the departing message has left.
    free_out: Duration,
    /// Begin and end of the busy time of the way in.
    since_in: Duration,
    free_in: Duration,
}

#[derive(Debug)]
pub(super) struct LinkQueues {
    of: Vec<Link>,
    machine: Machine,
}

impl LinkQueues {
    pub(super) fn new(ranks: usize, machine: &Machine) -> Self {
        Self { of: vec![Link::default(); ranks], machine: *machine }
    }

    /// Queues a message at its sender's link; it departs if the link is free.
    pub(super) fn send(&mut self, message: Message, now: Duration) -> Option<Departure> {
        let link = &mut self.of[message.from.index()];
        link.waiting.push_back(message);
        if link.busy { None } else { self.free(message.from, now) }
    }

    /// The link out of `rank` is free: the next message departs. It waits in the switch while the
    /// reader's link is busy.
    pub(super) fn free(&mut self, rank: Rank, now: Duration) -> Option<Departure> {
        let link = &mut self.of[rank.index()];
        let next = link.waiting.pop_front();
        link.busy = next.is_some();
        let message = next?;
        let receives = link.since_in <= now && now < link.free_in;
        let out = if message.again {
            now
        } else {
            now.saturating_add(self.machine.link_time(message.bytes, receives))
        };
        link.free_out = out;
        let reader = &mut self.of[message.to.index()];
        let enters = if self.machine.host_staged { out } else { now }.max(reader.free_in);
        // Messages queued at the reader may still be leaving by then.
        let to_leave = reader
            .waiting
            .iter()
            .filter(|message| !message.again)
            .map(|message| message.bytes)
            .sum();
        let other_way =
            reader.free_out.max(now).saturating_add(self.machine.link_time(to_leave, true))
                > enters;
        if enters > reader.free_in {
            reader.since_in = enters;
        }
        reader.free_in = enters.saturating_add(self.machine.link_time(message.bytes, other_way));
        Some(Departure { message, out, arrives: reader.free_in })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn a_link_carries_one_message_at_a_time_out_and_in() {
        let machine =
            Machine { link_bytes_per_us: 100, both_ways_bytes_per_us: 100, ..Machine::H200 };
        let mut links = LinkQueues::new(3, &machine);
        let message = |from, to, bytes| Message {
            from: Rank::new(from),
            to: Rank::new(to),
            bytes,
            again: false,
            effect: Effect::Tile(0),
        };
        let first = links.send(message(0, 2, 300), US(0)).unwrap();
        assert_eq!((first.out, first.arrives), (US(3), US(3)));
        assert_eq!(links.send(message(0, 1, 100), US(1)), None, "waits for the first");
        let other = links.send(message(1, 2, 200), US(1)).unwrap();
        assert_eq!(
            (other.out, other.arrives),
            (US(3), US(5)),
            "leaves, and waits for the reader's link"
        );
        let second = links.free(Rank::new(0), US(3)).unwrap();
        assert_eq!((second.message, second.arrives), (message(0, 1, 100), US(4)));
        assert_eq!(links.free(Rank::new(0), US(4)), None);
    }

    #[test]
    fn through_the_host_a_message_goes_on_when_it_has_arrived_and_rows_leave_once() {
        let machine = Machine {
            link_bytes_per_us: 100,
            both_ways_bytes_per_us: 50,
            ..Machine::H100_PAIR_BY_HOST
        };
        let mut links = LinkQueues::new(3, &machine);
        let message = |from, to, again| Message {
            from: Rank::new(from),
            to: Rank::new(to),
            bytes: 300,
            again,
            effect: Effect::Transfer(0),
        };
        let first = links.send(message(0, 1, false), US(0)).unwrap();
        assert_eq!((first.out, first.arrives), (US(3), US(6)));
        assert_eq!(links.send(message(0, 2, true), US(1)), None, "behind the first");
        let again = links.free(Rank::new(0), US(3)).unwrap();
        assert_eq!((again.out, again.arrives), (US(3), US(6)));
        let beside = links.send(message(1, 2, false), US(4)).unwrap();
        assert_eq!(
            (beside.out, beside.arrives),
            (US(10), US(13)),
            "out while the first comes in, then in alone"
        );
    }
}
