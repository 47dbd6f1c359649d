//! Whether a communicator works, and what the ranks were doing when it did not.
//!
//! Invariant: everybody is told the same fault. The first to look asks the peers, and tells them
//! whom this rank gave up or who made other calls.

use super::communicator::{Communicator, Inner};
use super::failure::{DOUBT, Doing, Failure, GATHER, RankReport};
use super::flight::CallRecord;
use super::health::Health;
use super::root_cause::{PeerFault, is_second_hand};
use super::straggler::{Stragglers, Verdicts, stragglers};
use crate::bootstrap::control::{GaveUp, mask_of};
use crate::reason;
use crate::{Fault, TransportError};
use flux_core::Rank;
use flux_core::layout::{FaultRecord, fault};
use std::time::{Duration, Instant};

/// How often it is looked whether a doubt has gone.
const LOOK: Duration = Duration::from_millis(2);
/// How often the peers are asked again while it has not. Who is silent is waited for half as long.
const AGAIN: Duration = Duration::from_millis(40);

impl Communicator {
    pub(super) fn working(&self) -> Result<(), TransportError> {
        self.inner
            .health
            .status()
            .map_err(|fault| TransportError::Broken { fault: self.gathered(fault).fault.clone() })
    }

    /// Whether the communicator works, as far as is known. Waits for no device and no call. A
    /// failed collective step is no fault: calls go on, and the next step is refused until the
    /// ranks rebuild. Finding the first fault takes about a quarter of a second, to ask the peers.
    ///
    /// # Errors
    /// The first fault, which stays. Results of unfinished calls are unusable; see
    /// [`rebuild`](Self::rebuild).
    pub fn status(&self) -> Result<(), Fault> {
        self.inner.world.control().settle();
        self.inner.health.transport().ask_peers();
        self.inner.health.status().map_err(|fault| self.gathered(fault).fault.clone())
    }

    /// The first fault with what every rank was doing; `None` while the communicator works.
    pub fn failure(&self) -> Option<&Failure> {
        self.inner.world.control().settle();
        self.inner.health.transport().ask_peers();
        self.inner.health.status().err().map(|fault| self.gathered(fault))
    }

    /// This rank's last calls, oldest first, at most 64.
    pub fn calls(&self) -> Vec<CallRecord> {
        self.inner.flight.last()
    }

    /// How far this rank's messages have come, where the transport knows. Waits for nothing.
    pub fn progress(&self) -> Option<String> {
        self.inner.health.transport().progress()
    }

    /// The failure behind the first fault; the first caller asks the peers and tells them who was
    /// given up.
    pub(super) fn gathered(&self, fault: Fault) -> &Failure {
        let Inner { world, failure, .. } = &*self.inner;
        failure.get_or_init(|| {
            let (control, number, began) = (world.control(), world.communicator(), Instant::now());
            // A rank that was stopped has what was found meanwhile in its sockets.
            control.settle();
            let answers = control.ask(number, began + GATHER);
            let mut ranks: Vec<RankReport> = world
                .size()
                .ranks()
                .zip(&answers)
                .map(|(rank, answer)| RankReport::new(rank, answer))
                .collect();
            control.settle();
            self.note_departures(&mut ranks);
            let fault = self.judged(fault, &mut ranks, began + DOUBT);
            Failure { fault, ranks }
        })
    }

    /// Who leaves says after which call, and does not answer any more.
    fn note_departures(&self, ranks: &mut [RankReport]) {
        let Inner { health, options, .. } = &*self.inner;
        for report in ranks {
            report.left_after(health.departures().last_of(report.rank), options.first_epoch);
        }
    }

    /// Judges this rank's record. Peers' waits end about now, so they are asked again while in
    /// doubt.
    fn judgement(
        &self,
        record: &FaultRecord,
        ranks: &mut [RankReport],
        until: Instant,
    ) -> Judgement {
        let Inner { health, world, .. } = &*self.inner;
        let ask = |ranks: &mut [RankReport]| {
            let answers = world.control().ask(world.communicator(), Instant::now() + AGAIN / 2);
            ranks.iter_mut().zip(&answers).for_each(|(report, answer)| report.renew(answer));
            // A rank that was stopped meanwhile has in its sockets that it was given up.
            world.control().settle();
            self.note_departures(ranks);
        };
        decided(ranks, until, |ranks| Judgement::of(health, record, ranks, self.deadline()), ask)
    }

    /// The first fault as it is to be told, by what the ranks do; peers are told, too.
    fn judged(&self, fault: Fault, ranks: &mut [RankReport], until: Instant) -> Fault {
        let Inner { health, world, .. } = &*self.inner;
        let control = world.control();
        let Some(record) = health.own_record() else {
            // Not told by a rank that was given up itself: its verdicts are nobody's.
            if let Some(what) = health.peer_timeout().filter(|_| health.given_up_by().is_none()) {
                control.give_up(&what);
            }
            return fault;
        };
        let found = self.judgement(&record, ranks, until);
        match found {
            // Not told: the peers go on without this rank, whatever it has waited for.
            Judgement::GivenUp(by) => Fault::Aborted { rank: by, reason: reason::LATE },
            Judgement::Peer(told) => {
                if let PeerFault::Timeout(what) = told {
                    control.give_up(&what);
                }
                told.fault()
            }
            Judgement::Unknown => {
                if record.abort == reason::NCCL && record.rank == health.rank().get() {
                    // It began here, as far as is known; not every peer has failing messages with
                    // this rank.
                    control.abort(world.communicator(), reason::NCCL);
                }
                fault
            }
            Judgement::Own(Stragglers { ranks: late, .. }) => {
                if !late.is_empty() || record.code == fault::DISAGREED {
                    health.exclude(late.iter().copied());
                    if late.contains(&health.rank()) {
                        health.give_up_itself();
                    }
                    control.give_up(&GaveUp {
                        communicator: world.communicator(),
                        late: mask_of(late.iter().copied()),
                        record,
                    });
                }
                // What was found first stays, but for who is late.
                if late.is_empty() { fault } else { Fault::from_record(&record, late) }
            }
        }
    }
}

/// What becomes of an own record.
enum Judgement {
    GivenUp(Rank),
    /// It is second-hand, and this is what it comes from.
    Peer(PeerFault),
    /// It is second-hand, and nothing was heard yet.
    Unknown,
    Own(Stragglers),
}

impl Judgement {
    fn of(health: &Health, record: &FaultRecord, ranks: &[RankReport], deadline: Duration) -> Self {
        let second_hand = is_second_hand(record, health.rank());
        // A loss or another op is what peers wait to hear, whoever has given this rank up.
        if let Some(by) =
            health.given_up_by().filter(|_| second_hand || record.code == fault::TIMEOUT)
        {
            return Self::GivenUp(by);
        }
        if second_hand {
            return health.root_cause_of(record).map_or(Self::Unknown, Self::Peer);
        }
        // In this order: whom a rank gave up is known before it counts as having reported.
        let reported = health.reported();
        Self::Own(stragglers(
            record,
            ranks,
            Verdicts { reported, given_up: health.given_up() },
            deadline,
        ))
    }

    fn certain(&self) -> bool {
        match self {
            Self::GivenUp(_) | Self::Peer(_) => true,
            Self::Unknown => false,
            Self::Own(late) => late.certain,
        }
    }

    /// Whether it gives up a rank that has not answered.
    fn names_a_silent_one(&self, ranks: &[RankReport]) -> bool {
        let is_silent = |rank: &Rank| {
            ranks.get(rank.index()).is_some_and(|report| report.doing == Doing::Silent)
        };
        matches!(self, Self::Own(late) if late.ranks.iter().any(is_silent))
    }
}

/// Judges the ranks once there is no doubt, or at `until` after one more question. Being given up
/// is final, so a silent rank is asked twice.
fn decided(
    ranks: &mut [RankReport],
    until: Instant,
    judge: impl Fn(&[RankReport]) -> Judgement,
    ask: impl Fn(&mut [RankReport]),
) -> Judgement {
    let (mut asked, mut again) = (Instant::now(), false);
    loop {
        let found = judge(ranks);
        let over = Instant::now() >= until;
        let hasty = !again && found.names_a_silent_one(ranks);
        if !hasty && (found.certain() || (over && asked >= until)) {
            return found;
        }
        if over || hasty || asked.elapsed() >= AGAIN {
            (asked, again) = (Instant::now(), true);
            ask(ranks);
        } else {
            std::thread::sleep(LOOK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::failure::tests::{call, reports, timeout};
    use super::*;
    use crate::CallState;

    /// Ranks 0 and 1 wait in call 42 for rank 2, which has not come to it. Rank 1 does not answer
    /// the first question.
    #[test]
    fn who_answers_when_asked_once_more_is_not_given_up_for_silence() {
        let (waits, behind) = (
            Doing::In(call(42, CallState::Failed)),
            Doing::Launched(call(41, CallState::Launched)),
        );
        let (record, long) = (timeout(0, 1, 42), Duration::from_secs(5));
        let judge = |ranks: &[RankReport]| {
            Judgement::Own(stragglers(&record, ranks, Verdicts::default(), long))
        };
        let given_up = |until, second| {
            let (mut ranks, asked) =
                (reports(&[waits, Doing::Silent, behind]), std::cell::Cell::new(0));
            let ask = |ranks: &mut [RankReport]| {
                asked.set(asked.get() + 1);
                ranks[1].doing = second;
            };
            let Judgement::Own(found) = decided(&mut ranks, until, judge, ask) else {
                unreachable!()
            };
            (found.ranks, asked.get())
        };
        for until in [Instant::now(), Instant::now() + long] {
            assert_eq!(given_up(until, waits), (vec![Rank::new(2)], 1));
            assert_eq!(
                given_up(until, Doing::Silent),
                (vec![Rank::new(1)], 1),
                "asked twice in all"
            );
        }
        // Whoever has left, or is gone, says so by itself.
        let mut ranks = reports(&[waits, Doing::Gone, behind]);
        let Judgement::Own(found) =
            decided(&mut ranks, Instant::now() + long, judge, |_| panic!("nobody is asked"))
        else {
            unreachable!()
        };
        assert_eq!(found.ranks, [Rank::new(1)]);
    }
}
